"""Signal sources for a teacher in the student's own stages and for a run without a teacher."""

from stillhouse.objective import TEACHER
from stillhouse.parallel import InStage, Runner, ShardedMicroBatches
from stillhouse.signals.signal_source import ReadySignals


class InStageTeacher:
    """The teacher runs within the student's forward and backward pass.

    Under a schedule that prefetches the teacher, the teacher runs up to one step ahead, in the pipeline's bubbles, on
    the micro-batches that were requested.
    """

    def __init__(self, runner: Runner):
        self._runner = runner

    @property
    def steps_ahead(self) -> int:
        return 1 if self._runner.prefetches_teacher else 0

    def request(self, micro_batches: ShardedMicroBatches) -> ReadySignals:
        marker = InStage(self._runner.announce(micro_batches))
        return ReadySignals([{TEACHER: marker}] * len(micro_batches))


class NoTeacher:
    """The source for objectives without a divergence: no micro-batch has a signal."""

    steps_ahead = 0

    def request(self, micro_batches: ShardedMicroBatches) -> ReadySignals:
        return ReadySignals([{}] * len(micro_batches))
