"""Provides a chunk's logits, from hidden states and a head or from a tensor, and back-propagates their gradient.

T tokens, C rows of a chunk, D student width, E teacher width, V vocabulary of this rank, R ranks, X numbers of a row.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stillhouse.objective.head import ALIGNED, OutputHead, Projection, common_vocabulary, operand_dtype
from stillhouse.objective.signals import DenseLogits, FullVocab, Mixture, RowIndex, Signal
from stillhouse.objective.terms import Term
from stillhouse.objective.tile.pointwise import log_mean
from stillhouse.objective.tile.statistics import statistics
from stillhouse.objective.tile.sweeps import by_blocks, sweep_raw_sums
from stillhouse.objective.tile.tile_plan import STUDENT, PointwisePlan
from stillhouse.objective.vocab import AsyncAllGather, VocabShard


class LogitsProvider:
    """The inputs of a pass and their gradients. Subclasses compute logits and back-propagate their gradient."""

    def __init__(
        self,
        heads: Sequence[OutputHead],
        terms: Sequence[Term],
        shard: VocabShard | None,
        dtype: torch.dtype,
        gradients: list[Tensor | None],
        logit_columns: int | None = None,
    ):
        teacher_heads = {id(head): head for term in terms for signal in term.signals() for head in signal.heads()}
        #: the size of the whole vocabulary, over all ranks
        self.vocabulary = common_vocabulary([*heads, *teacher_heads.values()], logit_columns)
        self.start, self.stop = (0, self.vocabulary) if shard is None else shard.within(self.vocabulary)
        #: V, the number of vocabulary rows on this rank
        self.columns = self.stop - self.start
        self.shard, self.dtype, self.gradients = shard, dtype, gradients
        self.needs_gradient = any(gradient is not None for gradient in gradients)
        self._teachers: dict[int, Projection] = {}
        self._buffers: dict[Hashable, Tensor] = {}

    scale: float
    softcap: float | None
    device: torch.device

    def tiles(self, rows: RowIndex, seen_C: Tensor, signals: Iterable[Signal], buffer: int) -> list[Tensor]:
        """Return the logits [C, V] of the student and of dense teachers, in buffers that the pass can overwrite.

        seen_C: False for a row that no term reads.
        buffer: the number of the set of buffers. Chunks that are in progress at the same time use different sets.
        """
        tiles = [self.student_logits(rows, seen_C, self._buffer((0, buffer), len(seen_C)))]
        for place, signal in enumerate(signals, start=1):
            tiles.append(self._teacher_logits(signal.rows(rows), self._buffer((place, buffer), len(seen_C))))
        return tiles

    def student_logits(self, rows: RowIndex, seen_C: Tensor, out_CV: Tensor) -> Tensor:
        raise NotImplementedError

    def pull_back(self, rows: RowIndex, counted_C: Tensor, grad_CV: Tensor) -> None:
        """Back-propagate a chunk's gradient to `gradients`. grad_CV: the result of `Tile.gradient`."""
        raise NotImplementedError

    def rounded_buffer(self, rows: int) -> Tensor | None:
        """Return a buffer [C, V] for the gradient, or None if `pull_back` needs the gradient in the logits' dtype."""
        return None

    def _teacher_logits(self, signal: Signal, out_CV: Tensor) -> Tensor:
        if isinstance(signal, Mixture):
            return self._mixture_logits(signal, out_CV)
        if isinstance(signal, DenseLogits):
            return out_CV.copy_(self._dense_columns(signal.logits_TV.detach()))
        assert isinstance(signal, FullVocab)
        head = signal.head
        if id(head) not in self._teachers:
            dtype = operand_dtype(signal.hidden_TE, head.weight_VD)
            if self.dtype == torch.float64:  # for a float64 student, compute the teacher's products in float64, too
                dtype = self.dtype
            self._teachers[id(head)] = Projection(head, self.vocabulary, dtype, self.shard)
        projection, hidden_CE = self._teachers[id(head)], signal.hidden_TE.detach()
        if projection.compute_dtype == out_CV.dtype:
            return projection.logits(hidden_CE, out_CV)
        return out_CV.copy_(projection.logits(hidden_CE))  # the dtypes can differ, as with a float64 teacher

    def _mixture_logits(self, mixture: Mixture, out_CV: Tensor) -> Tensor:
        """Return the logits τ·log p of a mixture, whose softmax at the mixture's temperature τ is p.

        In one process, members are computed and added one after the other, in one work tile. Over several ranks, the
        logits of all members are kept, so that one all-gather can exchange the sums of all members.
        """
        together = 1 if self.shard is None or self.shard.is_alone else len(mixture.signals)
        log_weights = mixture.log_weights
        for first in range(0, len(mixture.signals), together):
            batch = slice(first, first + together)
            members_CV = [
                # all chunks share these work tiles, because no tile is needed after this function returns
                self._teacher_logits(signal, self._buffer((-place, 0), len(out_CV)) if place else out_CV)
                for place, signal in enumerate(mixture.signals[batch], start=min(first, 1))
            ]
            add_members(out_CV, members_CV, log_weights[batch], mixture.temperature, self.shard)
        return out_CV

    def _dense_columns(self, logits_TV: Tensor) -> Tensor:
        """Return a dense teacher's logits on this rank's columns; logits_TV has all columns or only this rank's."""
        if logits_TV.shape[1] == self.vocabulary:
            return logits_TV[:, self.start : self.stop]
        if self.shard is not None and logits_TV.shape[1] in (self.columns, self.shard.stop - self.shard.start):
            return logits_TV[:, : self.columns]  # further columns are padding
        raise ValueError(
            f"teacher logits over {logits_TV.shape[1]} tokens, student over {self.vocabulary}; expected the same "
            "vocabulary: cut padded columns off, or set vocab_size on the head"
        )

    def _buffer(self, key: Hashable, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a work tile [C, V], allocated once and overwritten by later chunks.

        key: "rounded" for the gradient, or a place and the number of the set of buffers. The place is 0 for the
            student, 1, 2, … for dense signals, and negative for the members of a mixture.
        dtype: by default the logits' dtype.
        """
        buffer_CV = self._buffers.get(key)
        if buffer_CV is None or len(buffer_CV) < rows:
            buffer_CV = work_tile(rows, self.columns, dtype or self.dtype, self.device)
            self._buffers[key] = buffer_CV
        return buffer_CV[:rows]


def add_members(
    total_CV: Tensor,
    members_CV: Sequence[Tensor],
    log_weights: Sequence[float],
    temperature: float,
    shard: VocabShard | None,
) -> None:
    """Add w_i p_i of some members i of a mixture to the sum over earlier members, stored in `total_CV` as τ·log(sum).

    members_CV: the members' logits. If the first of these tensors is `total_CV` itself, there are no earlier members.
    log_weights: log w_i. Over several ranks, one all-gather exchanges the sums of all these members.
    """
    plan = PointwisePlan(temperatures=(temperature,))
    local_CX = torch.cat([sweep_raw_sums(plan, [member_CV]) for member_CV in members_CV], 1)
    gathered_RCX = AsyncAllGather(local_CX, shard).wait()
    columns = []
    for raw_RCX, log_weight in zip(gathered_RCX.split(len(plan.raw_sums), 2), log_weights, strict=True):
        teacher_rows = statistics(plan, raw_RCX)
        columns += [teacher_rows.references[STUDENT], teacher_rows.student_log_mass[0] - log_weight]
    tiles_CV = list(members_CV)
    if members_CV[0] is not total_CV:
        # the total is one more tile, which is already normalized
        tiles_CV = [total_CV, *tiles_CV]
        columns = [torch.zeros_like(columns[0])] * 2 + columns
    by_blocks(log_mean, replace(plan, tiles=len(tiles_CV)), tiles_CV, torch.stack(columns, 1))


class HeadLogits(LogitsProvider):
    """Logits from hidden states and a head. Gradients are kept in float32 (or float64) until backward scales them."""

    def __init__(
        self, hidden_TD: Tensor, head: OutputHead, terms: Sequence[Term], gradients: list[Tensor | None] | None = None
    ):
        """gradients: the gradients of an earlier provider with the same inputs, to add to; None for new gradients."""
        dtype = operand_dtype(hidden_TD, head.weight_VD)
        self.hidden_TD, self.device = hidden_TD.detach(), hidden_TD.device
        self.scale, self.softcap = head.scale, head.softcap
        wide = torch.promote_types(dtype, torch.float32)
        if gradients is None:
            gradients = [zero_gradient(leaf, wide) for leaf in (hidden_TD, head.weight_VD, head.bias)]
        super().__init__([head], terms, head.shard, wide, gradients)
        self.projection = Projection(head, self.vocabulary, dtype, head.shard)
        #: (mask, result) of the last calls of `_hidden`, for the chunks that are in progress
        self._masked: deque[tuple[Tensor, Tensor]] = deque(maxlen=2)

    def student_logits(self, rows: RowIndex, seen_C: Tensor, out_CV: Tensor) -> Tensor:
        return self.projection.logits(self._hidden(rows, seen_C), out_CV)

    def pull_back(self, rows: RowIndex, counted_C: Tensor, grad_CV: Tensor) -> None:
        hidden_grad_TD, weight_grad_VD, bias_grad_V = self.gradients
        if bias_grad_V is not None:
            bias_grad_V[: self.columns] += grad_CV.sum(0)
        operand_CV = grad_CV.to(self.projection.gradient_dtype)
        if hidden_grad_TD is not None:
            if isinstance(rows, slice):
                self.projection.hidden_grad(operand_CV, hidden_grad_TD[rows])
            else:
                hidden_grad_TD[rows] = self.projection.hidden_grad(operand_CV)
        if weight_grad_VD is not None:
            here_VD = weight_grad_VD[: self.columns]
            self.projection.add_weight_grad(here_VD, operand_CV, self._hidden(rows, counted_C))

    def rounded_buffer(self, rows: int) -> Tensor | None:
        # the gradient of a bias is summed before rounding, so it needs the gradient in the logits' dtype
        if self.projection.gradient_dtype == self.dtype or self.gradients[2] is not None:
            return None
        return self._buffer("rounded", rows, self.projection.gradient_dtype)

    def _hidden(self, rows: RowIndex, kept_C: Tensor) -> Tensor:
        # rows that are not counted can contain NaN, and 0·NaN would make the weight's gradient NaN
        for mask_C, hidden_CD in self._masked:
            if mask_C is kept_C:
                return hidden_CD
        hidden_CD = self.hidden_TD[rows].masked_fill(~kept_C[:, None], 0.0)
        self._masked.append((kept_C, hidden_CD))
        return hidden_CD


class TensorLogits(LogitsProvider):
    """Logits that are given as a tensor. The gradient has the logits' dtype, or float32 for float16 logits."""

    scale, softcap = 1.0, None

    def __init__(
        self,
        logits_TV: Tensor,
        shard: VocabShard | None,
        terms: Sequence[Term],
        gradients: list[Tensor | None] | None = None,
    ):
        self.device = logits_TV.device
        rows = logits_TV.shape[1] if shard is None else shard.rows
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        # in float16, gradients below 6e-8 would become 0 before they are multiplied by the loss scale
        kept_dtype = torch.float32 if logits_TV.dtype == torch.float16 else logits_TV.dtype
        super().__init__([], terms, shard, dtype, gradients or [zero_gradient(logits_TV, kept_dtype)], rows)
        self.logits_TV = logits_TV.detach()[:, : self.columns]

    def student_logits(self, rows: RowIndex, seen_C: Tensor, out_CV: Tensor) -> Tensor:
        return out_CV.copy_(self.logits_TV[rows]).masked_fill_(~seen_C[:, None], 0.0)

    def pull_back(self, rows: RowIndex, counted_C: Tensor, grad_CV: Tensor) -> None:
        (grad_TV,) = self.gradients
        assert grad_TV is not None
        grad_TV[rows, : self.columns] = grad_CV.to(grad_TV.dtype)


def work_tile(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tile. On a GPU its rows begin at multiples of 16 bytes, as fast matrix products require."""
    stride = -(-columns // ALIGNED) * ALIGNED if device.type == "cuda" else columns
    return torch.empty(rows, stride, dtype=dtype, device=device)[:, :columns]


def zero_gradient(leaf: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return zeros of this dtype, to accumulate the leaf's gradient; None if the leaf needs no gradient."""
    if leaf is None or not leaf.requires_grad or not torch.is_grad_enabled():
        return None
    return torch.zeros_like(leaf, dtype=dtype, memory_format=torch.contiguous_format)
