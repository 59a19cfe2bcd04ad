"""Runs a micro-batch through student and teacher, or through the layers of both models on a pipeline stage.

If the micro-batch has the signal IN_STAGE, the pair runs the teacher, then the student with the teacher's exact
distribution. Otherwise the pair runs only the student, and the output processor gets the micro-batch's signals.

B rows, S tokens per row, T = B·S; D width of the student, E width of the teacher.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stillhouse.data import MicroBatch
from stillhouse.models import Decoder, OutputProcessor, evaluating, without_lora
from stillhouse.models.forward_modes import autocast
from stillhouse.models.processors import DistillTargets
from stillhouse.models.vision_language import MEDIA_ARGUMENT
from stillhouse.objective import FullVocab, OutputHead, Signal, Signals, StudentHidden, detached
from stillhouse.objective.signals import RowIndex
from stillhouse.parallel import watchdog
from stillhouse.parallel.layer_loss import LayerLosses


@dataclass(frozen=True)
class InStage(Signal):
    """Marks micro-batches whose teacher runs in the student's stages."""

    @property
    def tokens(self) -> int:
        raise AssertionError("the stages replace this signal by the teacher's hidden states")

    def rows(self, rows: RowIndex) -> "InStage":
        return self


IN_STAGE = InStage()


class TeacherHead(Protocol):
    """A teacher's output head on this process, with all vocabulary rows or with this process's shard of them."""

    def opened(self) -> AbstractContextManager[OutputHead]:
        """Return a context that yields the head. The context is open only while the student's loss is computed."""


@dataclass(frozen=True)
class DecoderHead:
    """The head of a decoder on this process. If FSDP has sharded the head, `opened` gathers it in a collective.

    keep_gathered: whether the head stays gathered after its use.
    """

    decoder: Decoder
    keep_gathered: bool = False

    @contextmanager
    def opened(self) -> Iterator[OutputHead]:
        # FSDP has a separate group for an untied head; a tied head is in the root's group
        modules = (self.decoder.head, self.decoder)
        group = next((module for module in modules if isinstance(module, FSDPModule)), None)
        if group is not None:
            group.unshard()
        try:
            yield self.decoder.output_head()
        finally:
            if group is not None and not self.keep_gathered:
                group.reshard()


@dataclass(frozen=True, eq=False)
class TeacherHidden(Signal):
    """A teacher's hidden states after its final norm, and its head."""

    hidden_TE: Tensor
    head: TeacherHead

    @property
    def tokens(self) -> int:
        return len(self.hidden_TE)

    def rows(self, rows: RowIndex) -> "TeacherHidden":
        return replace(self, hidden_TE=self.hidden_TE[rows])

    @contextmanager
    def opened(self, student: OutputHead) -> Iterator[Signal]:
        with self.head.opened() as head:
            yield FullVocab(self.hidden_TE.detach(), detached(head))


@dataclass(frozen=True)
class StageInputs:
    """The inputs of a stage for one micro-batch, without the hidden states of the previous stage.

    signals: the signals by the teachers' names.
    processor: the student's output processor; its context is `DistillTargets`.
    losses: the losses inside the student's layers.
    normalizer: the number of target tokens of the step.
    autocast: the dtype of the student's matrix products, or None for the weights' dtype. A separate teacher model
        runs without autocast.
    """

    micro_batch: MicroBatch
    signals: Signals
    processor: OutputProcessor
    losses: Sequence[LayerLosses] = ()
    normalizer: float = 1.0
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class StageResults:
    """The results of a stage for one micro-batch.

    output: the processor's result; on a stage without the student's head, the student's hidden states [B, S, D].
    teacher_BSE: the teacher's hidden states if the teacher ran.
    losses: the names and values of the layers' losses.
    """

    output: Any
    teacher_BSE: Tensor | None = None
    losses: Sequence[tuple[str, Tensor]] = ()


class TeacherStudentPair(nn.Module):
    """A student and its teacher, or their parts on a pipeline stage. The teacher never has a gradient.

    teacher_is_base: whether the teacher is the student without its adapter; `teacher` is then None.
    keep_gathered: whether the teacher's head stays gathered until the end of the step, under FSDP.
    """

    def __init__(
        self, student: Decoder, teacher: Decoder | None, *, teacher_is_base: bool = False, keep_gathered: bool = False
    ):
        super().__init__()
        assert teacher is None or not teacher_is_base
        self.student, self.teacher_is_base, self.keep_gathered = student, teacher_is_base, keep_gathered
        self.teacher = None if teacher is None else teacher.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "TeacherStudentPair":
        """Set the student's mode; the teacher stays in eval mode."""
        self.student.train(mode)
        return self

    @property
    def teacher_head(self) -> DecoderHead | None:
        """The teacher's head, if it is on this stage."""
        if self.teacher is None or not self.teacher.has_head:
            return None
        return DecoderHead(self.teacher, self.keep_gathered)

    def forward(
        self, inputs: StageInputs, student_BSD: Tensor | None = None, teacher_BSE: Tensor | None = None
    ) -> StageResults:
        """Run a micro-batch. student_BSD, teacher_BSE: the hidden states of the previous stage."""
        watchdog.progress()
        micro_batch, signals = inputs.micro_batch, inputs.signals
        losses = [part.start(micro_batch, self.student, inputs.normalizer) for part in inputs.losses]
        in_stage = next((name for name, signal in signals.items() if isinstance(signal, InStage)), None)
        if in_stage is None:
            teacher_BSE = None
        else:
            with ExitStack() as running:
                for loss in losses:
                    running.enter_context(loss.during_teacher(self._teacher_layers))
                dtype = inputs.autocast if self.teacher_is_base else None
                teacher_BSE = self._teacher_forward(micro_batch, teacher_BSE, dtype)
        # only the last stage has the heads
        if in_stage is not None and self.student.has_head:
            assert teacher_BSE is not None
            assert len(signals) == 1, "a teacher in the stages must be the only teacher"
            teacher_TE, head = teacher_BSE.flatten(0, 1), self.teacher_head
            assert head is not None or self.teacher_is_base
            signals = {in_stage: StudentHidden(teacher_TE) if head is None else TeacherHidden(teacher_TE, head)}
        arguments = model_inputs(micro_batch, student_BSD)
        context = distill_targets(micro_batch, signals) if self.student.has_head else None
        with ExitStack() as running:
            running.enter_context(autocast(micro_batch.input_ids_BS.device, inputs.autocast))
            for part, loss in zip(inputs.losses, losses, strict=True):
                arguments |= part.student_inputs(micro_batch, self.student)
                running.enter_context(loss.during_student())
            output = self.student(**arguments, processor=inputs.processor, context=context)
        return StageResults(output, teacher_BSE, [named for loss in losses for named in loss.losses()])

    def _teacher_forward(
        self, micro_batch: MicroBatch, hidden_BSE: Tensor | None, dtype: torch.dtype | None
    ) -> Tensor:
        """Return the teacher's hidden states after its layers on this stage, at positions of the student's tokens.

        On the last stage, the final norm has been applied.

        dtype: the autocast dtype; None for a separate teacher model.
        """
        teacher, device = self._teacher_layers, micro_batch.input_ids_BS.device
        inputs = model_inputs(micro_batch.as_read_by_teacher, hidden_BSE)
        base = without_lora(teacher) if self.teacher_is_base else nullcontext()
        with torch.no_grad(), evaluating(teacher), base, autocast(device, dtype):
            return micro_batch.in_student_rows(teacher(**inputs, head=False))

    @property
    def _teacher_layers(self) -> Decoder:
        teacher = self.student if self.teacher_is_base else self.teacher
        assert teacher is not None
        return teacher


def distill_targets(micro_batch: MicroBatch, signals: Signals) -> DistillTargets:
    """Return the context of the student's output processor."""
    return DistillTargets(
        micro_batch.labels_T,
        micro_batch.weights_T,
        micro_batch.valid_index,
        signals=signals,
        per_token=micro_batch.per_token,
        document_T=micro_batch.document_T,
        position_ids_BS=micro_batch.position_ids_BS,
    )


def model_inputs(micro_batch: MicroBatch, hidden: Tensor | None) -> dict[str, Any]:
    """Return the arguments of a decoder's forward. Hidden states of the previous stage replace ids and media."""
    inputs = {**micro_batch.inputs, "is_padding": micro_batch.is_padding_BS, "lengths": micro_batch.lengths}
    if hidden is None:
        return {**inputs, MEDIA_ARGUMENT: micro_batch.media}
    return {**inputs, "input_ids": None, "inputs_embeds": hidden}
