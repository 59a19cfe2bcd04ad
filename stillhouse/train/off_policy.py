"""The training loop on a fixed dataset: the teacher gives signals for the data's own tokens.

`engine.py` computes a step; `schedule.py` decides which micro-batches the step takes.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from stillhouse.objective.keys import CHUNK_TOKENS
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import destroy_process_group, is_first, watchdog
from stillhouse.preemption import Preempted, finishing
from stillhouse.teachers import SignalsLostError, request_ahead
from stillhouse.train.agreement import from_all_ranks
from stillhouse.train.checkpoint import load_checkpoint, save_checkpoint
from stillhouse.train.checkpoint_folder import prune
from stillhouse.train.engine import ROUTER_LOSS
from stillhouse.train.evaluation import evaluate, means
from stillhouse.train.finite import stop_unless_finite
from stillhouse.train.folder import RunFolder
from stillhouse.train.identity import configuration_hash
from stillhouse.train.integrity import IntactCheckpoint
from stillhouse.train.logging import NoLog, RunLog, open_log
from stillhouse.train.progress import Progress, folder_name
from stillhouse.train.schedule import learning_rate
from stillhouse.train.session import Session
from stillhouse.train.stopping import agreed_signal

#: the keys of metrics that are no summand of the loss, or not in nats
_KEYS = {
    ROUTER_LOSS: f"loss/{ROUTER_LOSS}",
    "student_entropy": "train/student_entropy_nats",
    "teacher_entropy": "train/teacher_entropy_nats",
    "agreement": "train/agreement",
    "teacher_mass": "train/teacher_mass",
}


def train(session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None = None) -> Progress:
    """Run all remaining steps; returns the run's progress at the end. The student then holds the final weights.

    Raises ValueError for a loss or gradient that is not finite, before it is applied, and for weights that are not
    finite, before they are saved. Raises Preempted after the step in which a rank has received a signal.
    """
    config, step_schedule, engine, mesh = session.config, session.step_schedule, session.engine, session.runner.mesh
    progress = _progress(session, folder, checkpoint)
    with ExitStack() as stack:
        log = stack.enter_context(open_log(folder, progress, step_schedule.steps, config.track))
        if session.evaluation is not None and _lacks_evaluation(session, progress):
            progress.metrics = evaluate(session)
            log.evaluation(progress.step, progress.tokens, progress.metrics)
        stack.enter_context(finishing("this step and a checkpoint of it"))
        stack.enter_context(_saving_when_signals_are_lost(session, folder, progress, log))
        steps = range(progress.step, step_schedule.steps)
        sharded = (session.shard(step_schedule.micro_batches(session.train, step)) for step in steps)
        requests = request_ahead(session.source_for(session.spec), sharded)
        for step in steps:
            watchdog.enter(f"step {step + 1}")
            started = time.monotonic()
            micro_batches, signals = next(requests)
            whole = micro_batches.whole
            output = engine.forward_backward(micro_batches, signals.result(), whole.normalizer)
            norm = engine.clip()
            stop_unless_finite(session, step + 1, micro_batches, output, norm)
            rate = learning_rate(config.train, step_schedule.steps, step)
            engine.update(rate)

            progress.step, progress.tokens = step + 1, progress.tokens + int(output.sums["tokens"])
            seconds = time.monotonic() - started
            speed = whole.tokens / seconds
            log.train(progress.step, progress.tokens, _train_metrics(output.sums, session.spec, rate, norm, speed))
            last = progress.step == step_schedule.steps
            saving = _due(progress.step, config.checkpoint.every) or last
            progress.metrics = {}  # a checkpoint holds the evaluation of its own step only
            if session.evaluation is not None and (_due(progress.step, config.eval.every) or saving):
                progress.metrics = evaluate(session)
                log.evaluation(progress.step, progress.tokens, progress.metrics)
            stopped_by = 0 if last else agreed_signal(mesh)
            if saving or stopped_by:
                saved = _save(session, folder, progress, log)
                if not stopped_by and not last:
                    stopped_by = agreed_signal(mesh)  # a signal may have come while the checkpoint was written
            if stopped_by:
                destroy_process_group()
                raise Preempted(stopped_by, progress.step, saved)
    watchdog.enter("the final model", timed=False)
    return progress


def _progress(session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None) -> Progress:
    """The run's progress at its start, after the checkpoint, if there is one, has been loaded."""
    progress, steps = Progress(), session.step_schedule.steps
    if checkpoint is not None:
        progress = load_checkpoint(checkpoint, session.runner, session.engine.optimizer, session.engine.average)
        if progress.step > steps:
            raise ValueError(
                f"{checkpoint.path} is at step {progress.step}, and this run ends at {steps}: nothing to train"
            )
        if not folder.owns(checkpoint.path):  # a checkpoint of another run, which has a log of its own
            progress = replace(progress, started_from=str(checkpoint.path.resolve()), log_bytes=0)
    return replace(
        progress,
        data=session.data_hashes,
        models=session.model_hashes,
        configuration=configuration_hash(session.config),
    )


@contextmanager
def _saving_when_signals_are_lost(
    session: Session, folder: RunFolder, progress: Progress, log: RunLog | NoLog
) -> Iterator[None]:
    """If the teacher's signals cannot be had, save the steps that are done. All processes raise that error."""
    try:
        yield
    except SignalsLostError as error:
        if progress.step == 0:
            raise
        saved = folder.checkpoints / folder_name(progress.step)
        if not from_all_ranks(saved.exists(), session.device)[0]:
            saved = _save(session, folder, progress, log)
        if stopped_by := agreed_signal(session.runner.mesh):
            destroy_process_group()
            raise Preempted(stopped_by, progress.step, saved) from error
        raise SignalsLostError(f"{error}; the run has stopped after a checkpoint: {saved}") from error


def _save(session: Session, folder: RunFolder, progress: Progress, log: RunLog | NoLog) -> Path:
    """Write a checkpoint, then remove the older ones that need not be kept; returns its path."""
    watchdog.enter(f"the checkpoint of step {progress.step}", timed=False)
    progress.seconds, progress.log_bytes, progress.log_sha256 = log.seconds, *log.position
    engine = session.engine
    saved = save_checkpoint(
        folder.checkpoints, progress, engine.runner, engine.optimizer, session.tokenizer, engine.average
    )
    if is_first():
        settings = session.config.checkpoint
        for damage in prune(folder.checkpoints, settings.keep, settings.best):
            log.print_line(f"warning: {damage}")
    return saved


def _lacks_evaluation(session: Session, progress: Progress) -> bool:
    """Whether the evaluation of the present step is still to be made: the first one, or one that was interrupted."""
    step = progress.step
    is_due = step == 0 or _due(step, session.config.eval.every) or step == session.step_schedule.steps
    return is_due and not progress.metrics


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _train_metrics(
    sums: dict[str, float], objective: ObjectiveSpec, rate: float, norm: float, speed: float
) -> dict[str, float]:
    """A step's log record: each unscaled term and their scaled total, in nats per target token, and other metrics."""
    metrics = {"loss/total_nats_per_token": sums["loss"]}
    temperatures = {each.temperature or objective.temperature for each in objective.teachers.values()}
    for name, mean in means(sums, objective, mixes_temperatures=len(temperatures) > 1).items():
        kind, slash, teacher = name.partition("/")
        key = f"{_KEYS[kind]}{slash}{teacher}" if kind in _KEYS else f"loss/{name}_nats_per_token"
        metrics[key] = mean
    return metrics | {
        "train/learning_rate": rate,
        "train/gradient_norm": norm,
        "speed/tokens_per_second": speed,
        "speed/chunk_tokens": sums[CHUNK_TOKENS],
    }
