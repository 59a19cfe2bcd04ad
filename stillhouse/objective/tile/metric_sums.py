"""The sums of a pass: the loss, the metrics, and the value of each term at every token.

T tokens, C rows of a chunk, K sums, N terms.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from stillhouse.objective.metric_keys import StatisticKeys, unique_names
from stillhouse.objective.signals import RowIndex
from stillhouse.objective.terms import Term
from stillhouse.objective.tile.tile import TermResult, Tile


class Totals:
    """The sums of a pass, in float64, because a float32 running sum loses a digit every few hundred chunks. They are
    float32 on Apple's GPUs, which have no float64.
    """

    def __init__(self, terms: Sequence[Term], tokens: int, dtype: torch.dtype, device: torch.device):
        self.names = unique_names(terms)
        self.keys = StatisticKeys(terms, self.names)
        self.scales = [term.scale for term in terms]
        self.per_token = {name: torch.zeros(tokens, dtype=dtype, device=device) for name in self.names}
        self.loss = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self.sums: dict[str, Tensor] = defaultdict(partial(torch.zeros_like, self.loss))
        self.chunk_tokens = 0

    def plus(self, other: "Totals") -> "Totals":
        """Add the totals of another pass, over other rows."""
        self.loss += other.loss
        self.chunk_tokens = max(self.chunk_tokens, other.chunk_tokens)
        for name, value in other.sums.items():
            self.sums[name] += value
        for name, value_T in other.per_token.items():
            self.per_token[name] = self.per_token[name] + value_T if name in self.per_token else value_T
        return self

    def add_tile(self, terms: Sequence[Term], tile: Tile) -> None:
        """Add the values of all terms on a chunk. The terms add their gradient to the tile."""
        self.sums["tokens"] += (tile.weights_C != 0).sum()
        for position, term in enumerate(terms):
            weights_C = tile.weights_C
            if term.weights_T is not None:
                weights_C = weights_C * tile.take(term.weights_T).to(weights_C.dtype)
            self._add(position, tile.rows, weights_C, term.add_to(tile, weights_C * term.scale))

    def _add(self, position: int, rows: RowIndex, weights_C: Tensor, result: TermResult) -> None:
        """Add a term's result on a chunk. A row of weight 0 adds 0, even if its value is NaN."""
        value_C = result.value_C.masked_fill(weights_C == 0, 0.0)
        self.per_token[self.names[position]][rows] = value_C
        value = self._weighted_sum(value_C, weights_C)
        self.sums[self.names[position]] += value
        if self.scales[position]:  # a term of scale 0 is only reported; its value may be infinite
            self.loss += self.scales[position] * value
        for name, statistic_C in (result.statistics | result.parts).items():
            if key := self.keys.of(position, name):
                self.sums[key] += self._weighted_sum(statistic_C, weights_C)

    def _weighted_sum(self, values_C: Tensor, weights_C: Tensor) -> Tensor:
        return (values_C.masked_fill(weights_C == 0, 0.0).to(self.loss.dtype) * weights_C).sum()


class StackedTotals:
    """The sums that `compiled_chunk.finish_rows` returns, as one tensor, so that a chunk needs few kernels."""

    def __init__(self) -> None:
        self._sums_K: Tensor | None = None
        self._values_NT: Tensor | None = None
        self._keys: Sequence[str] = ()

    def add(self, keys: Sequence[str], sums_K: Tensor, rows: RowIndex, values_NC: Tensor, tokens: int) -> None:
        """keys: those of sums_K after the first number, which is the loss. values_NC: the terms' values per token."""
        if self._sums_K is None or self._values_NT is None:
            self._sums_K, self._keys = sums_K, keys
            self._values_NT = values_NC.new_zeros(len(values_NC), tokens)
        else:
            self._sums_K += sums_K
        self._values_NT[:, rows] = values_NC

    def add_to(self, totals: Totals) -> None:
        if self._sums_K is None or self._values_NT is None:
            return
        totals.loss += self._sums_K[0]
        for key, value in zip(self._keys, self._sums_K[1:], strict=True):
            totals.sums[key] += value
        for name, values_T in zip(totals.names, self._values_NT, strict=True):
            totals.per_token[name] += values_T
