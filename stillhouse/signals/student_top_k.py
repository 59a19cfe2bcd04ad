"""A served teacher that scores the student's top-k ids (student-top-k distillation).

The reverse KL depends mainly on these ids. They depend on the student's present weights, so they are requested at the
beginning of the step, after an additional forward pass of the student.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.models.processor_targets import DistillTargets
from stillhouse.objective import OutputHead
from stillhouse.objective.signals import Tail
from stillhouse.parallel import DistributedStudent, ShardedMicroBatches
from stillhouse.signals.id_log_probs import top_k_log_probs
from stillhouse.signals.in_stage_teachers import student_forward
from stillhouse.signals.signal_store import SignalStore, StoredTeacher


class ChosenTeacher(StoredTeacher):
    """Requests the teacher's log-probabilities of the student's top-k ids, except ids that the teacher's head lacks.

    autocast: the dtype of the student's matrix products; None: the dtype of its weights
    """

    steps_ahead = 0

    def __init__(
        self,
        store: SignalStore,
        student: DistributedStudent,
        autocast: torch.dtype | None,
        tail: Tail = "bucket",
        name: str = "",
    ):
        super().__init__(store, student, tail, name)
        assert store.vocabulary is not None
        self._vocabulary = store.vocabulary
        self._processor = _TopKOfStudent(store.signal.entries)
        self._autocast = autocast

    def _ids(self, micro_batches: ShardedMicroBatches) -> list[Tensor]:
        """The student's top-k ids at the rows with a non-zero weight; empty on processes that do not read."""
        top_k = student_forward(self._student, micro_batches, self._processor, self._autocast)
        if not self._student.has_results:
            return []
        return [tensors["ids"].masked_fill(tensors["ids"] >= self._vocabulary, -1) for tensors in top_k]


@dataclass(frozen=True)
class _TopKOfStudent:
    """An output processor that returns the student's top-k ids at the rows with a non-zero weight."""

    k: int

    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: DistillTargets, depth: int = 0
    ) -> dict[str, Tensor]:
        assert context.valid_index is not None
        return top_k_log_probs(hidden_states.flatten(0, -2)[context.valid_index], head, self.k, 1.0)
