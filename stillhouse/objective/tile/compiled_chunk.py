"""The work on the rows of a chunk between its kernels and collectives, as few compiled functions.

On a GPU, the statistics, terms and sums of a chunk would be hundreds of small kernels. So they run as

    row_masks     which rows are read and which are counted
    finish_rows   from the gathered sums to the sums of the metrics, the terms' values and the numbers of the gradient

Both run the terms' own Python code, once, on symbolic tensors. The code runs on terms that are rebuilt from a
`TermLayout` and the tensors of a chunk. So it is compiled once for all micro-batches with equal layouts.

C rows of a chunk of T tokens, K sums, N terms, R ranks, X numbers of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stillhouse.objective.signals import RowIndex
from stillhouse.objective.terms import Term
from stillhouse.objective.tile.compiled import traced
from stillhouse.objective.tile.logits_provider import LogitsProvider
from stillhouse.objective.tile.metric_sums import StackedTotals, Totals
from stillhouse.objective.tile.term_layout import TermLayout, layout_of, requested
from stillhouse.objective.tile.tile import Tile
from stillhouse.objective.tile.tile_plan import Plan
from stillhouse.objective.vocab import VocabShard


class ChunkWork:
    """The compiled work on the rows of a pass's chunks."""

    def __init__(
        self,
        terms: Sequence[Term],
        plan: Plan,
        provider: LogitsProvider,
        weights_T: Tensor,
        index: Tensor | None,
    ):
        """index: the rows of the pass; None: all."""
        self._layout, self._per_token = layout_of(terms, plan, provider)
        chosen = [tensor if index is None else tensor[index] for tensor in (weights_T, *self._per_token)]
        # functions are compiled for the strides of their inputs
        self._tensors = [tensor.contiguous() for tensor in chosen]
        self._tokens = len(weights_T)
        self.totals = StackedTotals()

    def taken(self, first: int, last: int) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """Return the weights, and the rows of each tensor of the terms, of one chunk of the rows."""
        weights_C, *tensors = (tensor[first:last] for tensor in self._tensors)
        return weights_C, dict(zip(self._per_token, tensors, strict=True))

    def masks(self, weights_C: Tensor, taken: dict[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        seen_C, *counted = traced(row_masks, self._layout, [weights_C, *taken.values()], [])
        return seen_C, (counted or [seen_C])[0]

    def finish(self, tile: Tile) -> None:
        """Add the terms' values on a chunk to the totals, and their gradient to the tile."""
        # the rows are the first dim of every tensor
        tensors = [sums_RCX.transpose(0, 1) for sums_RCX in tile.gathered_sums()]
        tensors += [tile.weights_C, tile.counted_C, *tile.taken.values(), *tile.tiles_CV]
        sums_K, values_NC, *gradients = traced(finish_rows, self._layout, tensors, tile.tiles_CV)
        self.totals.add(self._layout.keys, sums_K, tile.rows, values_NC, self._tokens)
        if gradients:
            tile.set_gradient(*gradients)


def masks(terms: Sequence[Term], rows: RowIndex, weights_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that a term reads and those that the loss counts, [C] each; one tensor if they are equal."""
    # a term of scale 0 is only reported: its rows are computed, but the term adds nothing to the loss
    seen_C = counted_C = torch.zeros_like(weights_C, dtype=torch.bool)
    for term in terms:
        term_rows_C = term.counted(rows, weights_C)
        seen_C = seen_C | term_rows_C
        counted_C = counted_C | term_rows_C if term.scale else counted_C
    return seen_C, seen_C if all(term.scale for term in terms) else counted_C


def row_masks(layout: TermLayout, weights_C: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    seen_C, counted_C = masks(layout.build(tensors), slice(None), weights_C)
    return (seen_C,) if counted_C is seen_C else (seen_C, counted_C)


def finish_rows(layout: TermLayout, gathered_CRX: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the sums [K], of which the first is the loss, and the terms' values [N, C].

    With gradients, further the normalizers and coefficients [C, X], and the tensors of `Tile.gradient_at_ids`.
    tensors: the normalized sums, if the plan has a second sweep; the weights; the mask of counted rows; the tensors
    of the terms; the tiles.
    """
    at = len(tensors) - layout.tensors - layout.tiles
    gathered = [gathered_CRX, *tensors[: at - 2]]
    weights_C, counted_C = tensors[at - 2 : at]
    terms, tiles_CV = layout.build(tensors[at : at + layout.tensors]), list(tensors[at + layout.tensors :])
    plan = requested(terms, layout.scale, layout.softcap)
    shard = VocabShard(layout.first, layout.first + tiles_CV[0].shape[1], None)
    tile = Tile(plan, slice(None), weights_C, counted_C, tiles_CV, layout.vocabulary, shard, layout.needs_gradient)
    tile.read(*(sums_CRX.transpose(0, 1) for sums_CRX in gathered))
    totals = Totals(terms, weights_C.shape[0], layout.dtype, weights_C.device)
    totals.add_tile(terms, tile)
    layout.keys[:] = totals.sums
    stacked = torch.stack([totals.loss, *totals.sums.values()]), torch.stack(list(totals.per_token.values()))
    if not layout.needs_gradient:
        return stacked
    rows_CX = tile.gradient_rows()
    return *stacked, rows_CX, *tile.gradient_at_ids(rows_CX, layout.rounded)
