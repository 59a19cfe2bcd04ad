"""Student and teacher side by side: runs a micro-batch through both, or through the layers of both on this stage.

    signal          what the pair does
    None            the student alone
    IN_STAGE        the teacher's layers on this stage, then the student with the teacher's exact distribution
    TeacherHidden   the teacher's head on hidden states that were computed elsewhere or earlier, then the student
    a `Signal`      the student with this signal
    NamedSignals    the student with the signals of several teachers

B rows, S tokens per row; D, E widths of student and teacher.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stillhouse.data import MicroBatch
from stillhouse.models import (
    Decoder,
    HiddenMatchLoss,
    OutputProcessor,
    RouterAuxLoss,
    evaluating,
    recorded,
    without_lora,
)
from stillhouse.models.processors import full_vocab
from stillhouse.objective import OutputHead, RoutedSignals, SeveralSignals, Signal
from stillhouse.parallel.context_parallel import NextTokens
from stillhouse.parallel.heads import TeacherHeads


class TeacherHidden(NamedTuple):
    """A teacher's hidden states [B, S, E] after its last norm. The teacher's head is on the student's last stage."""

    hidden_BSE: Tensor


class StudentHidden(NamedTuple):
    """The student's own hidden states [B, S, D] after its last norm, as a teacher's. The head is the student's."""

    hidden_BSD: Tensor


class NamedSignals(NamedTuple):
    """The signals of several teachers for the same micro-batch.

    rows: by the teacher's name, the rows that it judges, if every row has one teacher; None: each judges all rows.
    """

    named: Mapping[str, Signal | TeacherHidden | StudentHidden]
    rows: Mapping[str, Tensor] | None


class InStage(NamedTuple):
    """Marks micro-batches whose teacher runs in the student's stages."""


IN_STAGE = InStage()

PairSignal: TypeAlias = Signal | TeacherHidden | StudentHidden | NamedSignals | InStage | None


@dataclass(frozen=True)
class Computation:
    """The functions that a pass applies to every micro-batch.

    processor: the student's output processor.
    context: makes the processor's context from a micro-batch and the teacher's signal (None without a teacher).
    precision: makes the student's autocast context; a teacher computes in its own dtype.
    router_aux_loss: makes the router loss of a micro-batch, for students whose routers are balanced.
    mtp: appends the next tokens to a context rank's columns of the token ids. If it is given, the student's layers of
    multi-token prediction run, and the processor gets the hidden states of all depths.
    hidden_loss: makes the hidden-state loss of a micro-batch, for students with `match_hidden`; IN_STAGE only.
    """

    processor: OutputProcessor
    context: Callable[[MicroBatch, Signal | RoutedSignals | None], Any]
    precision: Callable[[], AbstractContextManager[Any]]
    router_aux_loss: Callable[[MicroBatch], RouterAuxLoss] | None = None
    mtp: NextTokens | None = None
    hidden_loss: Callable[[MicroBatch], HiddenMatchLoss] | None = None


class TeacherStudentPair(nn.Module):
    """A student and its teacher, or the parts of both on one pipeline stage. The teacher never has a gradient.

    teacher_is_base: the teacher is the student without its adapter, and `teacher` is None.
    keep_gathered: under FSDP, whether the teacher's head stays gathered until the end of the step.
    heads: the output heads of several teachers, if there are any.
    """

    def __init__(
        self,
        student: Decoder,
        teacher: Decoder | None,
        *,
        teacher_is_base: bool = False,
        keep_gathered: bool = False,
    ):
        super().__init__()
        assert teacher is None or not teacher_is_base
        self.student, self.teacher_is_base, self.keep_gathered = student, teacher_is_base, keep_gathered
        self.teacher = None if teacher is None else teacher.requires_grad_(False).eval()
        self.heads: TeacherHeads | None = None

    def train(self, mode: bool = True) -> "TeacherStudentPair":
        """Set the student's mode; the teacher stays in eval mode."""
        self.student.train(mode)
        return self

    def forward(
        self,
        computation: Computation,
        micro_batch: MicroBatch,
        signal: PairSignal,
        student_BSD: Tensor | None = None,
        teacher_BSE: Tensor | None = None,
    ) -> Any:
        """Return the processor's result; on a stage without heads, the student's hidden states, or the student's and
        the teacher's if the signal is IN_STAGE.

        student_BSD, teacher_BSE: the hidden states of the previous stage.
        """
        hidden_loss: HiddenMatchLoss | None = None
        if isinstance(signal, InStage):
            if computation.hidden_loss is not None:
                hidden_loss = computation.hidden_loss(micro_batch)
            if self.teacher_is_base:
                return self._forward_with_base(computation, micro_batch, student_BSD, teacher_BSE, hidden_loss)
            teacher_BSE = self.teacher_forward(micro_batch, teacher_BSE, hidden_loss=hidden_loss)
            if not self.student.has_head:
                student_BSD = self.student_forward(computation, micro_batch, None, student_BSD, hidden_loss)
                return student_BSD, teacher_BSE
            signal = TeacherHidden(teacher_BSE)
        # a rank with two stages passes the teacher's hidden states to both, but only the last stage has the heads
        if isinstance(signal, TeacherHidden) and self.student.has_head:
            with self._teacher_head() as head:
                exact = full_vocab(hidden_states=signal.hidden_BSE, head=head, context=None)
                return self.student_forward(computation, micro_batch, exact, student_BSD, hidden_loss)
        if isinstance(signal, NamedSignals) and self.student.has_head:
            return self._forward_with_several(computation, micro_batch, signal, student_BSD)
        given = signal if isinstance(signal, Signal) else None
        return self.student_forward(computation, micro_batch, given, student_BSD)

    def student_forward(
        self,
        computation: Computation,
        micro_batch: MicroBatch,
        signal: Signal | None,
        hidden_BSD: Tensor | None = None,
        hidden_loss: HiddenMatchLoss | None = None,
    ) -> Any:
        """Return the processor's result, or the hidden states on a stage without the student's head.

        hidden_loss: with the outputs of the teacher's layers.
        """
        context = computation.context(micro_batch, signal) if self.student.has_head else None
        inputs = _model_inputs(micro_batch.inputs, hidden_BSD)
        if computation.mtp is not None and self.student.has_head:
            inputs["mtp_input_ids"] = computation.mtp(micro_batch.input_ids_BS)
        with ExitStack() as losses:
            losses.enter_context(computation.precision())
            if computation.router_aux_loss is not None:
                losses.enter_context(self.student.balancing(computation.router_aux_loss(micro_batch)))
            if hidden_loss is not None:
                losses.enter_context(self.student.matching(hidden_loss))
            return self.student(**inputs, processor=computation.processor, context=context)

    def teacher_forward(
        self,
        micro_batch: MicroBatch,
        hidden_BSE: Tensor | None = None,
        *,
        hidden_loss: HiddenMatchLoss | None = None,
    ) -> Tensor:
        """Return the teacher's hidden states after its layers on this stage; on its last stage, after its norm.

        hidden_loss: it gets the outputs of the teacher's layers that the student's layers learn.
        """
        assert self.teacher is not None
        inputs = _model_inputs(micro_batch.teacher_inputs or micro_batch.inputs, hidden_BSE)
        precision = torch.autocast(micro_batch.input_ids_BS.device.type, enabled=False)
        with torch.no_grad(), evaluating(self.teacher), precision, self._recorded(self.teacher, hidden_loss):
            return self.teacher(**inputs, head=False)

    def _recorded(self, teacher: Decoder, hidden_loss: HiddenMatchLoss | None) -> AbstractContextManager[None]:
        if hidden_loss is None:
            return nullcontext()
        assert self.student.hidden_match is not None
        return recorded(teacher, self.student.hidden_match.teacher_layers, hidden_loss.teacher_BSE)

    @contextmanager
    def _teacher_head(self) -> Iterator[OutputHead]:
        """Yield the teacher's head with its FSDP shards gathered.

        The head's own FSDP group gathers its weight; the root's group does so if the head is tied to the embedding.
        """
        assert self.teacher is not None
        group = next((each for each in (self.teacher.head, self.teacher) if isinstance(each, FSDPModule)), None)
        if group is not None:
            group.unshard()
        try:
            yield self.teacher.output_head()
        finally:
            if group is not None and not self.keep_gathered:
                group.reshard()

    def _forward_with_base(
        self,
        computation: Computation,
        micro_batch: MicroBatch,
        student_BSD: Tensor | None,
        base_BSD: Tensor | None,
        hidden_loss: HiddenMatchLoss | None,
    ) -> Any:
        """Run the base, then the student. Both are one model in one precision, and they share one frozen head."""
        inputs = _model_inputs(micro_batch.teacher_inputs or micro_batch.inputs, base_BSD)
        with (
            torch.no_grad(),
            evaluating(self.student),
            without_lora(self.student),
            computation.precision(),
            self._recorded(self.student, hidden_loss),
        ):
            base_BSD = self.student(**inputs, head=False)
        if not self.student.has_head:
            return self.student_forward(computation, micro_batch, None, student_BSD, hidden_loss), base_BSD

        def processor(*, hidden_states: Tensor, head: OutputHead, context: MicroBatch, depth: int = 0) -> Any:
            exact = full_vocab(hidden_states=base_BSD, head=head, context=None)
            return computation.processor(
                hidden_states=hidden_states, head=head, context=computation.context(context, exact), depth=depth
            )

        with_base = replace(computation, processor=processor, context=lambda given, _: given)
        return self.student_forward(with_base, micro_batch, None, student_BSD, hidden_loss)

    def _forward_with_several(
        self, computation: Computation, micro_batch: MicroBatch, signals: NamedSignals, student_BSD: Tensor | None
    ) -> Any:
        """Run the student with several teachers, whose heads are needed only while the student's processor runs."""

        def processor(*, hidden_states: Tensor, head: OutputHead, context: MicroBatch, depth: int = 0) -> Any:
            opened = partial(self._opened, signals, head)
            process = partial(computation.processor, hidden_states=hidden_states, head=head, depth=depth)
            if signals.rows is not None:
                return process(context=computation.context(context, RoutedSignals(self._routed(signals), opened)))
            with ExitStack() as heads:
                several = SeveralSignals({name: heads.enter_context(opened(name)) for name in signals.named})
                return process(context=computation.context(context, several))

        with_heads = replace(computation, processor=processor, context=lambda given, _: given)
        return self.student_forward(with_heads, micro_batch, None, student_BSD)

    @contextmanager
    def _opened(self, signals: NamedSignals, student_head: OutputHead, name: str) -> Iterator[Signal]:
        """Yield the signal of one of several teachers; its head is there until the context ends."""
        signal = signals.named[name]
        if isinstance(signal, StudentHidden):
            yield full_vocab(hidden_states=signal.hidden_BSD, head=student_head, context=None)
        elif isinstance(signal, TeacherHidden):
            assert self.heads is not None
            with self.heads.opened(name) as head:
                yield full_vocab(hidden_states=signal.hidden_BSE, head=head, context=None)
        else:
            yield signal

    def _routed(self, signals: NamedSignals) -> dict[str, Tensor]:
        """The teachers of a micro-batch with their rows; at least one, which may have none."""
        assert signals.rows is not None
        if self.heads is not None and self.heads.is_sharded:
            return dict(signals.rows)  # all processes gather the shards of all heads, in the same order
        present = {name: index for name, index in signals.rows.items() if len(index)}
        return present or dict(list(signals.rows.items())[:1])


def _model_inputs(inputs: Mapping[str, Tensor], hidden: Tensor | None) -> dict[str, Any]:
    """Return the arguments of a model's forward; the previous stage's hidden states replace the token ids."""
    return dict(inputs) if hidden is None else {**inputs, "input_ids": None, "inputs_embeds": hidden}
