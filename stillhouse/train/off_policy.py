"""The loop on a fixed dataset: the teacher speaks about the data's own tokens.

It reads top to bottom; what a step is stands in `step.py`, what it sees in `schedule.py`.
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from stillhouse.objective.keys import CHUNK_TOKENS
from stillhouse.parallel import Work, is_first, leave, watchdog
from stillhouse.preemption import Preempted, finishing
from stillhouse.train.checkpoint import load_checkpoint, prune, save_checkpoint
from stillhouse.train.evaluation import evaluate
from stillhouse.train.finite import stop_unless_finite
from stillhouse.train.folder import RunFolder
from stillhouse.train.identity import configuration_hash
from stillhouse.train.integrity import IntactCheckpoint
from stillhouse.train.logging import RunLog, Silence, open_log
from stillhouse.train.progress import Progress
from stillhouse.train.schedule import learning_rate
from stillhouse.train.session import Session
from stillhouse.train.step import ROUTER_LOSS, make_optimizer, optimizer_step
from stillhouse.train.stopping import agreed_signal


def train(session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None = None) -> Progress:
    """Run every step that is left; returns how far the run is then. The student holds the final weights.

    Raises ValueError at a loss or gradient that is not finite, before it is applied, and at weights that are not,
    before they are saved; Preempted after the step in which a rank has received a signal.
    """
    config, plan, runner = session.config, session.plan, session.runner
    settings = config.train
    optimizer = make_optimizer(
        (parameter for _, parameter in runner.named_parameters()),
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        eps=settings.eps,
    )
    progress = _progress(session, folder, checkpoint, optimizer)
    with ExitStack() as stack:
        log = stack.enter_context(open_log(folder, progress, plan.steps, config.track))
        if progress.step == 0 and session.evaluation is not None:
            progress.metrics = evaluate(session)
            log.evaluation(0, 0, progress.metrics)
        stack.enter_context(finishing("this step and a checkpoint of it"))
        upcoming: list[Work] = []
        for step in range(progress.step, plan.steps):
            watchdog.enter(f"step {step + 1}")
            started = time.monotonic()
            works = upcoming or session.step_works(step)
            upcoming = session.step_works(step + 1) if runner.looks_ahead and step + 1 < plan.steps else []
            outputs = runner.forward_backward(works, upcoming)
            norm = float(runner.clip(settings.clip or 0.0))
            sums = session.totals(outputs, works)
            stop_unless_finite(session, step + 1, works, outputs, sums["loss"], norm)
            rate = learning_rate(settings, plan.steps, step)
            optimizer_step(optimizer, rate)

            progress.step, progress.tokens = step + 1, progress.tokens + int(sums["tokens"])
            seconds = time.monotonic() - started
            speed = session.train.tokens(plan.micro_batches(session.train, step)) / seconds
            log.train(progress.step, progress.tokens, _train_metrics(sums, rate, norm, speed))
            last = progress.step == plan.steps
            saving = _due(progress.step, config.checkpoint.every) or last
            progress.metrics = {}  # of this step, or none
            if session.evaluation is not None and (_due(progress.step, config.eval.every) or saving):
                progress.metrics = evaluate(session)
                log.evaluation(progress.step, progress.tokens, progress.metrics)
            stopped_by = 0 if last else agreed_signal(runner.mesh)
            if saving or stopped_by:
                saved = _save(session, folder, progress, optimizer, log)
                stopped_by = stopped_by or (0 if last else agreed_signal(runner.mesh))  # while that was written
            if stopped_by:
                leave()
                raise Preempted(stopped_by, progress.step, saved)
    watchdog.enter("the final model", timed=False)
    return progress


def _progress(
    session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None, optimizer: torch.optim.Optimizer
) -> Progress:
    """How far the run is, after a checkpoint to go on from has been loaded."""
    progress, steps = Progress(), session.plan.steps
    if checkpoint is not None:
        progress = load_checkpoint(checkpoint, session.runner, optimizer)
        if progress.step > steps:
            raise ValueError(
                f"{checkpoint.path} is at step {progress.step}, and this run ends at {steps}: nothing to train"
            )
        if not folder.owns(checkpoint.path):  # another run's: its log is elsewhere
            progress = replace(progress, started_from=str(checkpoint.path.resolve()), log_bytes=0)
    return replace(
        progress,
        data=session.data,
        models=session.models,
        configuration=configuration_hash(session.config),
    )


def _save(
    session: Session, folder: RunFolder, progress: Progress, optimizer: torch.optim.Optimizer, log: RunLog | Silence
) -> Path:
    """Write a checkpoint and remove those that need not be kept; returns its path."""
    watchdog.enter(f"the checkpoint of step {progress.step}", timed=False)
    progress.seconds, progress.log_bytes, progress.log_sha256 = log.seconds, *log.position
    saved = save_checkpoint(folder.checkpoints, progress, session.runner, optimizer, session.tokenizer)
    if is_first():
        settings = session.config.checkpoint
        for damage in prune(folder.checkpoints, settings.keep, settings.best):
            log.say(f"warning: {damage}")
    return saved


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _train_metrics(sums: dict[str, float], rate: float, norm: float, speed: float) -> dict[str, float]:
    """A step's log record: terms in nats per target token, each unscaled, and their scaled total."""
    tokens = max(1.0, sums["tokens"])
    known = {"student_entropy": "_nats", "teacher_entropy": "_nats", "agreement": "", "teacher_mass": ""}
    metrics = {"loss/total_nats_per_token": sums["loss"]}
    for name, value in sums.items():
        if name == ROUTER_LOSS:
            metrics[f"loss/{name}"] = value / tokens
        elif name in known:
            metrics[f"train/{name}{known[name]}"] = value / tokens
        elif name not in ("loss", "tokens", CHUNK_TOKENS):
            metrics[f"loss/{name}_nats_per_token"] = value / tokens
    return metrics | {
        "train/learning_rate": rate,
        "train/gradient_norm": norm,
        "speed/tokens_per_second": speed,
        "speed/chunk_tokens": sums[CHUNK_TOKENS],
    }
