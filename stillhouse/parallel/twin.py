"""Student and teacher side by side: one micro-batch through both, or through the layers of both that are here.

B rows, S tokens per row; D, E widths of student and teacher.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stillhouse.models import Balance, Decoder, OutputProcessor, evaluating, processors, without_lora
from stillhouse.objective import FullVocab, OutputHead, Signal


class Tokens(Protocol):
    """What models see of a micro-batch."""

    @property
    def input_ids_BS(self) -> Tensor: ...

    @property
    def position_ids_BS(self) -> Tensor: ...


@dataclass(frozen=True)
class Work:
    """A micro-batch and what is to be made of it.

    processor: the student's; its context is `context(signal)`, with what the teacher of the twin says, None if it is
    not asked. precision: the student's autocast; the teacher computes in its own dtype. balance: of the student's
    routers, if that is asked for. heard_BSE: hidden states of a teacher in another layout (`separate.py`).
    """

    tokens: Tokens
    processor: OutputProcessor
    context: Callable[[Signal | None], Any]
    asks_teacher: bool
    precision: Callable[[], AbstractContextManager[Any]]
    balance: Balance | None = None
    heard_BSE: Tensor | None = None


class Twin(nn.Module):
    """Decoders of which each may have lost layers to other pipeline stages. The teacher has no gradient, ever.

    own_base: the student without its adapter is the teacher; there is no other one.
    """

    def __init__(self, student: Decoder, teacher: Decoder | None, *, own_base: bool = False):
        super().__init__()
        assert teacher is None or not own_base
        self.student, self.own_base = student, own_base
        self.teacher = None if teacher is None else teacher.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Twin":
        """The student's mode; a teacher stays as it is."""
        self.student.train(mode)
        return self

    def forward(
        self,
        work: Work,
        student_BSD: Tensor | None = None,
        teacher_BSE: Tensor | None = None,
        said_BSE: Tensor | None = None,
    ) -> Any:
        """What the processor makes of the micro-batch; where the student has no head, its hidden states, or a pair of
        those and the teacher's, if it is asked. student_BSD, teacher_BSE: those of the stage before. said_BSE: what
        `speak` of the last stage has given, if the teacher has spoken.
        """
        if work.asks_teacher and self.own_base:
            return self._learn_from_base(work, student_BSD, teacher_BSE)
        if not work.asks_teacher or self.teacher is None:
            return self._learn(work, student_BSD)
        if work.heard_BSE is not None:
            teacher_BSE = work.heard_BSE
        learns = torch.is_grad_enabled()

        def told(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Any:
            signal = processors.full_vocab(hidden_states=hidden_states, head=head, context=None)
            with torch.set_grad_enabled(learns):
                return self._learn(work, student_BSD, signal)

        # the student learns inside the teacher's head: where that is gathered for its forward alone, it is there
        precision = torch.autocast(work.tokens.input_ids_BS.device.type, enabled=False)
        with torch.no_grad(), evaluating(self.teacher), precision:
            if said_BSE is not None:
                return self.teacher.head(said_BSE, told)
            heard = self.teacher(**_inputs(work.tokens, teacher_BSE), processor=told)
        return heard if self.teacher.has_head else (self._learn(work, student_BSD), heard)

    def speak(self, tokens: Tokens, teacher_BSE: Tensor | None = None) -> Tensor:
        """The hidden states of the teacher's layers that are here, without the student; on the last stage after its
        last norm. teacher_BSE: those of the stage before.
        """
        assert self.teacher is not None
        precision = torch.autocast(tokens.input_ids_BS.device.type, enabled=False)
        with torch.no_grad(), evaluating(self.teacher), precision:
            return self.teacher(**_inputs(tokens, teacher_BSE), processor=processors.hidden_states)

    def _learn_from_base(self, work: Work, student_BSD: Tensor | None, base_BSD: Tensor | None) -> Any:
        """One after the other, since it is one model, and in the same precision. Both heads are its own, frozen."""
        with torch.no_grad(), evaluating(self.student), without_lora(self.student), work.precision():
            base_BSD = self.student(**_inputs(work.tokens, base_BSD), processor=processors.hidden_states)
        if not self.student.has_head:
            return self._learn(work, student_BSD), base_BSD

        def told(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Any:
            context = work.context(processors.full_vocab(hidden_states=base_BSD, head=head, context=None))
            return work.processor(hidden_states=hidden_states, head=head, context=context, depth=depth)

        return self._learn(replace(work, processor=told, context=lambda _: None), student_BSD)

    def _learn(self, work: Work, student_BSD: Tensor | None, signal: FullVocab | None = None) -> Any:
        context = work.context(signal) if self.student.has_head else None
        inputs = _inputs(work.tokens, student_BSD)
        if work.balance is not None:
            inputs["balance"] = work.balance
        with work.precision():
            return self.student(**inputs, processor=work.processor, context=context)


def _inputs(tokens: Tokens, hidden: Tensor | None) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": tokens.input_ids_BS, "position_ids": tokens.position_ids_BS}
    return inputs if hidden is None else inputs | {"input_ids": None, "inputs_embeds": hidden}
