"""A served teacher that scores the ids which are likeliest for the student: on-policy in the choice of the ids.

With reverse KL, these are the ids that decide the loss (student-top-k distillation). The ids are those of the
student's present weights, so a step's request is made when the step begins, and costs a forward of the student.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

from stillhouse.models import evaluating
from stillhouse.objective.signals import Tail
from stillhouse.parallel import Computation, Runner, ShardedMicroBatches
from stillhouse.signals.extract import Extract
from stillhouse.signals.source import PendingSignals
from stillhouse.signals.spec import SignalSpec
from stillhouse.signals.stored import SignalStore, StoredTeacher


class ChosenTeacher(StoredTeacher):
    """vocabulary: rows of the teacher's head; ids of the student beyond it are left out. precision: the student's
    autocast context.
    """

    steps_ahead = 0

    def __init__(
        self,
        store: SignalStore,
        runner: Runner,
        vocabulary: int,
        precision: Callable[[], AbstractContextManager[Any]],
        tail: Tail = "bucket",
        name: str = "",
    ):
        super().__init__(store, runner, tail, name)
        assert store.signal.top_k is not None
        self._vocabulary = vocabulary
        processor = Extract(SignalSpec("top_k", "float32", store.signal.top_k, 1.0))
        self._computation = Computation(processor, lambda micro_batch, _: micro_batch.valid_index, precision)

    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        return self._request(micro_batches, self._likeliest(micro_batches))

    def _likeliest(self, micro_batches: ShardedMicroBatches) -> list[Tensor]:
        """The student's likeliest ids of each micro-batch's rows with a weight; empty without the last stage."""
        with ExitStack() as modes:
            for student in self.runner.students():
                modes.enter_context(evaluating(student))
            found = self.runner.forward(self._computation, micro_batches, [None] * len(micro_batches))
        if not self.runner.has_results:
            return []
        return [each["ids"].masked_fill(each["ids"] >= self._vocabulary, -1) for each in found]
