"""The signal of a teacher with another tokenizer: its probabilities of spans of text, over the student's ids.

Where student and teacher cut a text into different tokens, the text between two common borders is a span: student
tokens y_0 … y_k and teacher tokens x_0 … x_l. The span's probability is P = Π_j p(x_j) (GOLD's merged probability).

    row of y_0          a divergence over the student's ids; P counts for y_0
    rows of y_1 … y_k   P · (−log q(y_j))

By the chain rule, forward KL of the whole span is forward KL at the row of y_0 plus the second line. For other
divergences the second line is the same.

T tokens, C rows of a chunk. p is the teacher's probability, q the student's.
"""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from stillhouse.objective.signals import RowIndex, Signal, TopK, check_temperature
from stillhouse.objective.stable import expect
from stillhouse.objective.terms import Term, check_labels, check_scale, labelled
from stillhouse.objective.tile.tile import TermResult, Tile
from stillhouse.objective.tile.tile_plan import Plan


@dataclass(frozen=True, eq=False)
class SpanSignal(Signal):
    """A teacher's probabilities of spans.

    first: the distribution at rows that predict a span's first token. first_weights_T: 1 at these rows, else 0.
    continuation_weights_T: P at rows that predict a later token of a span, else 0.
    """

    first: TopK
    first_weights_T: Tensor
    continuation_weights_T: Tensor

    def __post_init__(self) -> None:
        for name in ("first_weights_T", "continuation_weights_T"):
            shape = tuple(getattr(self, name).shape)
            if shape != (self.first.tokens,):
                raise ValueError(f"{name} of shape {shape}: expected ({self.first.tokens},), one weight per token")


@dataclass(frozen=True, eq=False)
class Continuation(Term):
    """−log q(label) at a temperature that divides the student's logits, for the later tokens of spans.

    It has a name of its own in metrics, because it is a part of the divergence and not a cross-entropy with the data.
    A row with a negative label has no value. `scale_by_temperature_squared` and `label`: as in `Distill`.
    """

    labels_T: Tensor
    scale: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    _: KW_ONLY
    weights_T: Tensor | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_scale(self.scale)

    @property
    def name(self) -> str:
        return labelled("continuation", self.label)

    @property
    def tokens(self) -> int:
        return self.labels_T.shape[0]

    def has_value(self, rows: RowIndex) -> Tensor:
        return self.labels_T[rows] >= 0

    def request(self, plan: Plan) -> None:
        plan.softmax(self.temperature)
        plan.logits_at(self.labels_T)

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        label_C = tile.take(self.labels_T)
        check_labels(label_C, tile.vocabulary)
        has_label_C = label_C >= 0
        factor = self.temperature**2 if self.scale_by_temperature_squared else 1.0
        value_C = -tile.log_probs_at(self.labels_T, self.temperature)[:, 0] * factor
        if tile.needs_gradient:
            weights_C = weights_C * has_label_C * (factor / self.temperature)
            tile.add_probability(self.temperature, expect(weights_C, torch.ones_like(weights_C)))
            tile.add_at(label_C[:, None], -weights_C[:, None])
        return TermResult(value_C.masked_fill(~has_label_C, 0.0), {})
