"""The student as its own teacher: with its present weights and a privileged prompt, or with averaged weights.

It runs in eval mode and without gradients, in the student's own stages, before each step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from stillhouse.models import evaluating
from stillhouse.models.processors import full_vocab, replicated_hidden
from stillhouse.objective import FullVocab, OutputHead
from stillhouse.parallel import Computation, Runner, ShardedMicroBatches, StudentHidden
from stillhouse.signals.source import ReadySignals
from stillhouse.signals.weight_average import WeightAverage


class SelfTeacher:
    """precision: the student's autocast context. average: the weights; None: the student's present ones."""

    steps_ahead = 0  # the weights of the step itself

    def __init__(
        self,
        runner: Runner,
        precision: Callable[[], AbstractContextManager[Any]],
        average: WeightAverage | None = None,
    ):
        self._runner, self._precision, self._average = runner, precision, average

    def request(self, micro_batches: ShardedMicroBatches) -> ReadySignals:
        """Compute the signals at once.

        On processes with the student's last stage, they are `StudentHidden`, or `FullVocab` with the averaged head;
        on all others, None.
        """
        own = [replace(each, inputs=each.teacher_inputs or each.inputs) for each in micro_batches]
        processor = _hidden if self._average is None else _WithHead()
        computation = Computation(processor, lambda *_: None, self._precision)
        with ExitStack() as modes:
            for student in self._runner.students():
                modes.enter_context(evaluating(student))
            if self._average is not None:
                modes.enter_context(self._average.applied())
            found = self._runner.forward(computation, own, [None] * len(own))
        return ReadySignals(found if self._runner.has_last_stage else [None] * len(own))


def _hidden(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> StudentHidden:
    return StudentHidden(replicated_hidden(hidden_states, head))


class _WithHead:
    """Gives exact signals with a copy of the averaged head. One copy serves all micro-batches of a step."""

    def __init__(self) -> None:
        self._head: OutputHead | None = None

    def __call__(self, *, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> FullVocab:
        if self._head is None:
            bias = None if head.bias is None else head.bias.detach().clone()
            self._head = replace(head, weight_VD=head.weight_VD.detach().clone(), bias=bias)
        return full_vocab(hidden_states=hidden_states, head=self._head, context=None)
