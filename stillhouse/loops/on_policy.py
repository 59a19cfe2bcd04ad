"""The on-policy training loop: an engine generates completions, and the teacher scores every token.

It differs from `off_policy.py` in the source of its micro-batches (`rollouts.py`) and in the records of completions.
`training.py` has the parts that both loops share.
"""

import time
from contextlib import closing
from typing import NamedTuple

from stillhouse.checkpoint.integrity import IntactCheckpoint
from stillhouse.loops.rollout_records import RolloutMetrics, shown_samples
from stillhouse.loops.rollouts import Rollouts
from stillhouse.loops.session import Session
from stillhouse.loops.source_metrics import source_metrics
from stillhouse.loops.training import training
from stillhouse.models.forward_modes import noise_of
from stillhouse.output.folder import RunFolder
from stillhouse.output.progress import Progress
from stillhouse.output.rollout_log import RolloutLog
from stillhouse.parallel import ShardedMicroBatches, is_first
from stillhouse.rollout import Sample
from stillhouse.signals import PendingSignals


def train(session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None = None) -> Progress:
    """Run all remaining steps; returns the run's progress at the end. The student then has the final weights.

    Raises the errors of `off_policy.train`. If no server answers, it saves a checkpoint and raises SignalsLostError.
    """
    engine, plan = session.engine, session.plan
    assert plan is not None
    metrics = RolloutMetrics(plan, session.ranks, session.rollouts, noise_of(session.student))
    source = session.source_for(engine)
    with (
        closing(Rollouts(session, folder, is_new=checkpoint is None)) as rollouts,
        training(session, folder, checkpoint, rollouts.queue) as run,
        RolloutLog(
            folder if is_first() else None,
            run.progress.step,
            (lambda: run.log.seconds) if is_first() else time.monotonic,
        ) as log,
    ):
        rollouts.require_same_writer(folder)
        timeline = log.timeline
        requested: dict[int, _Requested] = {}

        def request(step: int) -> _Requested:
            samples = rollouts.take(step, timeline)
            micro_batches = rollouts.micro_batches(step, samples)
            return _Requested(samples, micro_batches, source.request(micro_batches))

        for step in run.steps:
            run.begin(step)
            timeline.begin_step(step + 1)
            rollouts.ask(step, timeline)
            samples, micro_batches, pending = requested.pop(step) if step in requested else request(step)
            if source.steps_ahead and rollouts.can_take(step + 1):
                requested[step + 1] = request(step + 1)  # the teacher scores the next step while this step is trained
            with (
                timeline.trainer("wait for the teacher"),
                timeline.span(step + 1, "teacher", "score"),
            ):
                signals = pending.result()
            with timeline.trainer("train"):
                output = engine.forward_backward(micro_batches, signals, micro_batches.all_ranks.normalizer)
                run.update(step, micro_batches, output)
                rollouts.trained(step)
            shown = shown_samples(session, step, samples, micro_batches, output)
            seconds, waited = timeline.end_step()
            log.write(shown)
            measured = metrics.of(step, samples, micro_batches, output, seconds, waited)
            measured |= metrics.of_calls(rollouts.call_times(), seconds)
            if session.prompt_sources:
                measured |= source_metrics(session, step, samples, micro_batches, output)
            run.end(step, micro_batches, output, measured, seconds)
        rollouts.finish()
    return run.progress


class _Requested(NamedTuple):
    samples: list[Sample]
    micro_batches: ShardedMicroBatches
    pending: PendingSignals
