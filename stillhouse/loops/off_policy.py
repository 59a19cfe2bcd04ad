"""The training loop on a fixed dataset: the teacher gives signals for the data's own tokens.

`schedule.py` decides which micro-batches a step takes; `training.py` has the parts that both loops share.
"""

from stillhouse.checkpoint.checkpoint_folder import IntactCheckpoint
from stillhouse.loops.session import Session
from stillhouse.loops.training import FIRST_STEP, training
from stillhouse.output.folder import RunFolder
from stillhouse.output.progress import Progress
from stillhouse.signals import RequestedSteps


def train(session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None = None) -> Progress:
    """Run all remaining steps, and return the run's progress at the end. The student then has the final weights.

    Raises ValueError before the update if the loss or the gradient is not finite, and before a checkpoint is saved if
    a weight is not finite. Raises Preempted after the step in which a rank has received a signal.
    """
    models, steps = session.models, session.schedule.step_schedule
    with training(session, folder, checkpoint) as run:
        sharded = (models.shard(steps.micro_batches(session.data.train, step)) for step in run.steps)
        requests = RequestedSteps(models.source_for(models.engine), sharded)
        for step in run.steps:
            run.begin(step)
            micro_batches, signals = next(requests)
            normalizer = micro_batches.all_ranks.normalizer
            with run.named_at_first(step, FIRST_STEP):
                output = models.engine.forward_backward(micro_batches, signals.result(), normalizer)
            requests.build_next()  # before `update`, which waits for the device
            run.update(step, micro_batches, output)
            run.end(step, micro_batches, output)
            if run.has_ended_early:
                break
    return run.progress
