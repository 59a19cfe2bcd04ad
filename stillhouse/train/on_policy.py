"""The training loop on the student's own completions: an engine writes them, the teacher judges every token.

It differs from `off_policy.py` only in where micro-batches come from (`rollouts.py`); `training.py` does what all
loops do.
"""

from contextlib import closing

from stillhouse.train.folder import RunFolder
from stillhouse.train.integrity import IntactCheckpoint
from stillhouse.train.progress import Progress
from stillhouse.train.rollout_metrics import RolloutMetrics
from stillhouse.train.rollouts import Rollouts
from stillhouse.train.session import Session
from stillhouse.train.training import training


def train(session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None = None) -> Progress:
    """Run all remaining steps; returns the run's progress at the end. The student then holds the final weights.

    Raises what `off_policy.train` raises, and SignalsLostError, after a checkpoint, if no server writes completions.
    """
    source, metrics = session.source_for(session.spec), RolloutMetrics(session)
    with closing(Rollouts(session, folder)) as rollouts, training(session, folder, checkpoint, rollouts.queue) as run:
        for step in run.steps:
            run.begin(step)
            rollouts.ask(step)
            samples = rollouts.take(step)
            micro_batches = rollouts.micro_batches(step, samples)
            signals = source.request(micro_batches)
            output = run.learn(step, micro_batches, signals)
            run.end(step, micro_batches, output, metrics.of(step, samples, output))
    return run.progress
