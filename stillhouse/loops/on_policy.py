"""The training loop on the student's own completions: an engine writes them, the teacher judges every token.

It differs from `off_policy.py` only in where micro-batches come from (`rollouts.py`), and in what it records of the
completions; `training.py` does what all loops do.
"""

from contextlib import closing

from stillhouse.checkpoint.integrity import IntactCheckpoint
from stillhouse.loops.rollout_metrics import RolloutMetrics
from stillhouse.loops.shown_samples import shown_samples
from stillhouse.loops.step_samples import Rollouts
from stillhouse.loops.training import training
from stillhouse.output.folder import RunFolder
from stillhouse.output.progress import Progress
from stillhouse.output.rollout_log import open_rollout_log
from stillhouse.run.session import Session


def train(session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None = None) -> Progress:
    """Run all remaining steps; returns the run's progress at the end. The student then holds the final weights.

    Raises what `off_policy.train` raises, and SignalsLostError, after a checkpoint, if no server writes completions.
    """
    engine, metrics = session.engine, RolloutMetrics(session)
    source = session.source_for(engine)
    with (
        closing(Rollouts(session, folder)) as rollouts,
        training(session, folder, checkpoint, rollouts.queue) as run,
        open_rollout_log(folder, run.progress, run.log) as log,
    ):
        rollouts.require_same_writer(folder)
        timeline = log.timeline
        for step in run.steps:
            run.begin(step)
            rollouts.ask(step, timeline)
            samples = rollouts.take(step, timeline)
            micro_batches = rollouts.micro_batches(step, samples)
            with (
                timeline.span(step + 1, "trainer", "wait for the teacher"),
                timeline.span(step + 1, "teacher", "judge"),
            ):
                signals = source.request(micro_batches).result()
            with timeline.span(step + 1, "trainer", "train"):
                output = engine.forward_backward(micro_batches, signals, micro_batches.whole.normalizer)
                run.update(step, micro_batches, output)
                rollouts.trained()
            log.write(step + 1, shown_samples(session, step, samples, micro_batches, output))
            measured = metrics.of(step, samples, micro_batches, output, timeline, run.seconds)
            run.end(step, micro_batches, output, measured)
    return run.progress
