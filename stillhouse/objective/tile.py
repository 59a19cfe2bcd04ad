"""One chunk of student logits, with what the terms share: log-probabilities, the teacher's tile, the gradient.

Everything that two terms could compute twice is computed here once. C rows of the chunk, V vocabulary.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from stillhouse.objective.head import entropy, log_probs
from stillhouse.objective.signals import Rows, Signal

#: teacher logits [C, V] of a dense signal's rows
TeacherLogits = Callable[[Signal], Tensor]


class Tile:
    """Student logits [C, V] in float32 at least, and the gradient of the weighted sum with respect to them."""

    def __init__(self, logits_CV: Tensor, rows: Rows, teacher_logits: TeacherLogits, needs_gradient: bool):
        self.logits_CV = logits_CV
        self.rows = rows
        self.grad_CV = torch.zeros_like(logits_CV) if needs_gradient else None
        self._teacher_logits = teacher_logits
        self._student: dict[float, Tensor] = {}
        self._entropy: dict[float, Tensor] = {}
        self._teacher: dict[tuple[int, float], Tensor] = {}

    @property
    def needs_gradient(self) -> bool:
        return self.grad_CV is not None

    def take(self, per_token: Tensor) -> Tensor:
        """The chunk's rows of a tensor over all tokens."""
        return per_token[self.rows]

    def log_probs(self, temperature: float) -> Tensor:
        """The student's log q, [C, V]. Shared: not to be written to."""
        if temperature not in self._student:
            self._student[temperature] = log_probs(self.logits_CV, temperature)
        return self._student[temperature]

    @cached_property
    def log_normalizer_C(self) -> Tensor:
        """log Σ e^logits, [C]."""
        return torch.logsumexp(self.logits_CV, dim=1)

    def entropy(self, temperature: float) -> Tensor:
        """The student's entropy in nats, [C]."""
        if temperature not in self._entropy:
            self._entropy[temperature] = entropy(self.log_probs(temperature))
        return self._entropy[temperature]

    def teacher_log_probs(self, signal: Signal, temperature: float) -> Tensor:
        """A dense teacher's log p on the chunk's rows, [C, V]; terms that carry the same signal share it."""
        key = (id(signal), temperature)
        if key not in self._teacher:
            self._teacher[key] = log_probs(self._teacher_logits(signal.rows(self.rows)), temperature)
        return self._teacher[key]

    def add_gradient(self, grad_CV: Tensor, weights_C: Tensor) -> None:
        """Add the gradient of Σ weights·value. A row of weight 0 adds nothing, whatever it holds."""
        assert self.grad_CV is not None
        self.grad_CV.addcmul_(grad_CV.masked_fill((weights_C == 0)[:, None], 0.0), weights_C[:, None])
