"""The on-policy training loop: an engine generates completions, and the teacher scores every token.

This loop differs from `off_policy.py` in the source of the micro-batches (`rollout/`) and in records of completions.
`training.py` has the parts that both loops share.
"""

import time

from stillhouse.checkpoint.checkpoint_folder import IntactCheckpoint
from stillhouse.loops.rollout_records import RolloutMetrics, SampledStep, shown_samples
from stillhouse.loops.rollouts import open_rollout, require_same_weights
from stillhouse.loops.session import Session
from stillhouse.loops.training import FIRST_STEP, training
from stillhouse.models.forward_modes import noise_of
from stillhouse.output.folder import RunFolder
from stillhouse.output.progress import Progress
from stillhouse.output.rollout_log import RolloutLog
from stillhouse.parallel import is_first
from stillhouse.signals import RequestedSteps


def train(session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None = None) -> Progress:
    """Run all remaining steps, and return the run's progress at the end. The student then has the final weights.

    Raises the errors of `off_policy.train`. If no server answers, a checkpoint is saved and SignalsLostError is
    raised.
    """
    models, plan = session.models, session.rollout
    assert plan is not None
    metrics = RolloutMetrics(
        plan,
        models.ranks,
        session.loss.spec,
        one_teacher_per_document=session.data.train.together is not None,
        noise=noise_of(models.student),
    )
    with (
        open_rollout(session, folder, is_new=checkpoint is None) as rollout,
        training(session, folder, checkpoint, rollout.queue) as run,
        RolloutLog(
            folder if is_first() else None, run.progress.step, run.log.seconds if is_first() else time.monotonic
        ) as timeline,
    ):
        require_same_weights(plan.config, rollout, folder)
        requests = RequestedSteps(models.source_for(models.engine), rollout.micro_batches(run.steps, timeline))
        for step in run.steps:
            run.begin(step)
            timeline.begin_step(step + 1)
            with run.named_at_first(step, "the first completions and their rewards"):
                samples = rollout.take(step, timeline)
            micro_batches, pending = next(requests)
            with timeline.trainer("wait for the teacher", step + 1, "teacher", "score"):
                signals = pending.result()
            with timeline.trainer("train"):
                with run.named_at_first(step, FIRST_STEP):
                    normalizer = micro_batches.all_ranks.normalizer
                    output = models.engine.forward_backward(micro_batches, signals, normalizer)
                run.update(step, micro_batches, output)
                rollout.trained(step)
            sampled = SampledStep(step, samples, micro_batches, output)
            shown = shown_samples(models.ranks, session.data, plan, sampled)
            seconds, waited = timeline.end_step()
            timeline.write(shown)
            times = {} if rollout.functions is None else rollout.functions.take_times()
            run.end(step, micro_batches, output, metrics.of(sampled, seconds, waited, times), seconds)
            if run.has_ended_early:
                break
        rollout.finish()
    return run.progress
