"""Teachers that run in the student's stages: another model, or the student itself, perhaps with averaged weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.models import OutputProcessor, evaluating
from stillhouse.models.dtensors import local
from stillhouse.models.processors import full_vocab, replicated_hidden
from stillhouse.objective import TEACHER, FullVocab, OutputHead, StudentHidden
from stillhouse.parallel import IN_STAGE, DistributedStudent, ShardedMicroBatches, StageInputs
from stillhouse.signals.signal_source import PendingSignals, SignalSource


class WeightAverage:
    """Exponential moving averages of the student's trained weights on this process, sharded like the weights.

    The averages are at least float32, because rounding to bfloat16 would lose most of each update.
    """

    def __init__(self, student: DistributedStudent, decay: float):
        self._student, self.decay = student, decay
        #: the averages by the names of `DistributedStudent.named_parameters`
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in student.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Set the average to decay × average + (1 − decay) × weights.

        weights: the optimizer's weights by name, if they have a wider dtype than the parameters. If it is None, the
            parameters are the weights.
        """
        for name, weight in self._student.named_parameters() if weights is None else weights:
            if (average := self.tensors.get(name)) is not None:
                local(average).lerp_(local(weight.detach()).to(average.dtype), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averages as the student's weights until the context ends; a copy of the weights is in memory."""
        parameters = {name: parameter for name, parameter in self._student.named_parameters() if name in self.tensors}
        kept = {name: local(parameter.detach()).clone() for name, parameter in parameters.items()}

        def set_weights(tensors: Mapping[str, Tensor]) -> None:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    local(parameter.detach()).copy_(local(tensors[name]))

        set_weights(self.tensors)
        try:
            yield
        finally:
            set_weights(kept)


class InStageTeacher(SignalSource):
    """A teacher whose forward runs together with the student's forward of the same micro-batch."""

    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        return PendingSignals.ready([{TEACHER: IN_STAGE}] * len(micro_batches))


class SelfTeacher(SignalSource):
    """The student as its own teacher: with its present weights and a privileged prompt, or with averaged weights.

    The teacher runs at the beginning of each step, because it needs the step's weights. It runs in eval mode, without
    gradients.

    autocast: the dtype of the student's matrix products. If it is None, they have the weights' dtype.
    """

    def __init__(
        self, student: DistributedStudent, autocast: torch.dtype | None, average: WeightAverage | None = None
    ):
        self._student, self._autocast, self._average = student, autocast, average

    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        """Compute the signals on the student's last stage: `StudentHidden` or, with averaged weights, `FullVocab`."""
        processor: OutputProcessor = _hidden if self._average is None else _WithHead()
        read = [batch.as_read_by_teacher for batch in micro_batches]
        with nullcontext() if self._average is None else self._average.applied():
            signals = student_forward(self._student, read, processor, self._autocast)
        if not self._student.has_last_stage:
            return PendingSignals.ready([{}] * len(read))
        return PendingSignals.ready([{TEACHER: signal} for signal in signals])


def student_forward(
    student: DistributedStudent,
    micro_batches: Iterable[MicroBatch],
    processor: OutputProcessor,
    autocast: torch.dtype | None,
) -> Sequence[Any]:
    """Run the student in eval mode, and return the processor's output for each micro-batch."""
    with evaluating(*student.decoders):
        return student.forward([StageInputs(batch, {}, processor, autocast=autocast) for batch in micro_batches])


def _hidden(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> StudentHidden:
    return StudentHidden(replicated_hidden(hidden_states, head).flatten(0, 1))


class _WithHead:
    """Returns exact signals with a copy of the averaged head. All micro-batches of a step share this copy."""

    def __init__(self) -> None:
        self._head: OutputHead | None = None

    def __call__(self, *, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> FullVocab:
        if self._head is None:
            bias = None if head.bias is None else head.bias.detach().clone()
            self._head = replace(head, weight_VD=head.weight_VD.detach().clone(), bias=bias)
        return full_vocab(hidden_states=hidden_states, head=self._head, context=None)
