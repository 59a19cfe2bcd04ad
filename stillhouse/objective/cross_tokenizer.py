"""The signal and the term of a teacher with another tokenizer: probabilities of spans of text.

Where student and teacher split a text into different tokens, a span is the text between two common token borders. It
has student tokens y_0 … y_k, teacher tokens x_0 … x_l and the probability P = Π_j p(x_j) (GOLD's merged probability).

    row of y_0          a divergence over the student's ids; P counts for y_0
    rows of y_1 … y_k   P · (−log q(y_j))

By the chain rule, forward KL of the whole span is forward KL at the row of y_0 plus the values at the rows of y_1 …
y_k. The other divergences have the same values at the rows of y_1 … y_k.

T tokens, C rows of a chunk. p is the teacher's probability, q the student's.
"""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from stillhouse.objective.sampled_terms import SampledTerm
from stillhouse.objective.signals import Signal, TopK, check_per_token
from stillhouse.objective.terms import labelled
from stillhouse.objective.tile.tile import Tile


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
        names = ("first_weights_T", "continuation_weights_T")
        check_per_token(self.first.tokens, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, eq=False)
class Continuation(SampledTerm):
    """−log q(label) at a temperature that divides the student's logits, for the later tokens of spans.

    Its metric is not called cross-entropy, because it is a part of the divergence. The options are as in `Distill`.
    """

    labels_T: Tensor
    scale: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    _: KW_ONLY
    weights_T: Tensor | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        return labelled("continuation", self.label)

    def of(self, tile: Tile, log_q_C: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return -log_q_C * self.factor, torch.full_like(log_q_C, -self.factor), {}
