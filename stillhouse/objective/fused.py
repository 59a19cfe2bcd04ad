"""The chunked pass: objectives from hidden states and an output head, without the logits of all tokens.

Tokens are taken in chunks. A chunk is projected once to a tile of logits [C, V]; each term adds its value and its
gradient to the tile; two matrix products carry the gradient back to the hidden states and the head. All of it
happens in forward, so backward only multiplies by the incoming gradient and no product is computed twice.

T tokens, C rows of a chunk, D student width, V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stillhouse.objective.head import OutputHead, Projection, common_vocabulary, operand_dtype
from stillhouse.objective.keys import StatisticKeys, unique_names
from stillhouse.objective.signals import DenseLogits, FullVocab, Rows, Signal
from stillhouse.objective.terms import Term, TermResult
from stillhouse.objective.tile import Tile
from stillhouse.objective.vocab import VocabShard, require_whole_vocabulary

#: bytes that one float32 tile of logits may take; a pass keeps a handful of them
TILE_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}
#: rows of a tile whatever the budget: on a GPU, below these, summing the weight's float32 gradient is bandwidth-bound
TILE_ROWS = {"cpu": 16, "cuda": 1024}


@dataclass(frozen=True)
class ObjectiveOutput:
    """What a pass gives.

    `loss`: float32 scalar, Σ_tokens weight · Σ_terms scale · value, divided by the normalizer; differentiable.
    `metrics`: detached float32 sums over tokens, each token with its weight in the term (the objective's times the
    term's own) and nothing scaled or divided: `tokens`, the count of rows with a weight; every term's value under the
    term's name; and statistics:
        of a distillation term `student_entropy` and `teacher_entropy` (at its temperature), `agreement` (top-1),
        `teacher_mass` (covered by a sparse signal) and, if its divergence is a sum, each summand's own value under
        its expression (`forward_kl`), with the term's τ² and without its coefficient;
        of a cross-entropy with label smoothing or z-loss `negative_log_likelihood`, the plain −log q_y, and of one
        with z-loss `z_loss`, that summand of the value; both are 0 where there is no label.
    A second term of the same name has "#2" behind its name, the second term of its kind "#2" behind its statistics,
    or the next number that is free. The keys depend on the terms alone, not on the rows.
    `per_token`: detached float32 [T], each term's unweighted value under its name; 0 where its weight is 0.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    per_token: dict[str, Tensor]


def linear_objective(
    hidden_TD: Tensor,
    head: OutputHead,
    terms: Sequence[Term],
    *,
    weights_T: Tensor | None = None,
    normalizer: float | Tensor = 1.0,
    valid_index: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> ObjectiveOutput:
    """A weighted sum of terms from hidden states [T, D] and the head, differentiable in both.

    weights_T: weight per token (None: 1). Rows of weight 0 add nothing and may hold anything, NaN included.
    normalizer: divides the sum; the optimizer step's global count of tokens with a non-zero weight.
    valid_index: the rows with a weight, int64, if the caller knows them (a batch made on the CPU does; finding them
        on a GPU waits for it, so without this all rows are computed there). Each row once; no other is visited.
    chunk_tokens: rows of a tile; None picks by a memory budget. Results do not depend on it.

    Raises ValueError where shapes disagree, for a normalizer that is no positive number and, of tensors on a CPU, for
    weights that are not finite and rows that come twice; NotImplementedError for a head sharded over ranks.
    """
    if hidden_TD.dim() != 2 or hidden_TD.shape[1] != head.weight_VD.shape[1]:
        raise ValueError(
            f"hidden_TD of shape {tuple(hidden_TD.shape)}: expected [tokens, {head.weight_VD.shape[1]}] for this head"
        )
    leaves = [hidden_TD, head.weight_VD, head.bias]
    source = _HeadRows(hidden_TD, head, terms)
    return _objective(source, leaves, terms, hidden_TD.shape[0], weights_T, normalizer, valid_index, chunk_tokens)


def logits_objective(
    logits_TV: Tensor,
    terms: Sequence[Term],
    *,
    shard: VocabShard | None = None,
    weights_T: Tensor | None = None,
    normalizer: float | Tensor = 1.0,
) -> ObjectiveOutput:
    """The same for who holds logits [T, V]: differentiable in them. One gradient of their size is kept."""
    if logits_TV.dim() != 2:
        raise ValueError(f"logits_TV of shape {tuple(logits_TV.shape)}: expected [tokens, vocabulary]")
    require_whole_vocabulary(shard, logits_TV.shape[1])
    source = _LogitsRows(logits_TV, terms)
    return _objective(source, [logits_TV], terms, logits_TV.shape[0], weights_T, normalizer, None, None)


def linear_log_probs(
    hidden_TD: Tensor, head: OutputHead, labels_T: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probability [T] and entropy [T] of chosen tokens. Not in this version."""
    raise NotImplementedError("linear_log_probs is not in this version of stillhouse")


class _Source:
    """Where a chunk's student logits come from and where their gradient goes."""

    vocabulary: int
    device: torch.device
    dtype: torch.dtype
    gradients: list[Tensor | None]

    @property
    def needs_gradient(self) -> bool:
        return any(gradient is not None for gradient in self.gradients)

    def logits(self, rows: Rows, weights_C: Tensor) -> Tensor:
        """The chunk's logits [C, V]; those of a row of weight 0 are not looked at."""
        raise NotImplementedError

    def teacher_logits(self, signal: Signal) -> Tensor:
        raise NotImplementedError

    def pull_back(self, tile: Tile) -> None:
        """Add the gradient of the tile, the last one asked for, to `gradients`."""
        raise NotImplementedError


class _HeadRows(_Source):
    """Hidden states and a head: gradients are kept in float32 until the incoming one has been multiplied in."""

    def __init__(self, hidden_TD: Tensor, head: OutputHead, terms: Sequence[Term]):
        teacher_heads = {id(each): each for term in terms for signal in term.signals() for each in signal.heads()}
        self.vocabulary = common_vocabulary([head, *teacher_heads.values()])
        self.hidden_TD = hidden_TD.detach()
        self.hidden_CD = self.hidden_TD[:0]
        self.projection = Projection(head, self.vocabulary, operand_dtype(hidden_TD, head.weight_VD))
        self.teachers = _TeacherProjections(self.vocabulary)
        self.device, self.dtype = hidden_TD.device, self.projection.compute_dtype
        leaves = (hidden_TD, head.weight_VD, head.bias)
        grad_enabled = torch.is_grad_enabled()
        self.gradients = [
            torch.zeros_like(leaf, dtype=self.dtype, memory_format=torch.contiguous_format)
            if grad_enabled and leaf is not None and leaf.requires_grad
            else None
            for leaf in leaves
        ]

    def logits(self, rows: Rows, weights_C: Tensor) -> Tensor:
        # a row of weight 0 may hold NaN, and its zero gradient times NaN would reach the weight
        self.hidden_CD = self.hidden_TD[rows].masked_fill((weights_C == 0)[:, None], 0.0)
        return self.projection.logits(self.hidden_CD)

    def teacher_logits(self, signal: Signal) -> Tensor:
        return self.teachers.logits(signal, self.dtype)

    def pull_back(self, tile: Tile) -> None:
        assert tile.grad_CV is not None
        grad_CV = self.projection.before_head(tile.grad_CV, tile.logits_CV)
        hidden_grad_TD, weight_grad_VD, bias_grad_V = self.gradients
        if hidden_grad_TD is not None:
            hidden_grad_TD[tile.rows] = self.projection.hidden_grad(grad_CV)
        if weight_grad_VD is not None:
            self.projection.add_weight_grad(weight_grad_VD[: self.vocabulary], grad_CV, self.hidden_CD)
        if bias_grad_V is not None:
            bias_grad_V[: self.vocabulary] += grad_CV.sum(0)


class _LogitsRows(_Source):
    """Logits that exist already."""

    def __init__(self, logits_TV: Tensor, terms: Sequence[Term]):
        heads = [each for term in terms for signal in term.signals() for each in signal.heads()]
        self.vocabulary = common_vocabulary(heads, logits_TV.shape[1])
        self.logits_TV = logits_TV.detach()[:, : self.vocabulary]
        self.device, self.dtype = logits_TV.device, torch.promote_types(logits_TV.dtype, torch.float32)
        self.teachers = _TeacherProjections(self.vocabulary)
        # float16 would lose an unnormalised gradient below 6e-8 before the loss scale is multiplied in
        kept = torch.float32 if logits_TV.dtype == torch.float16 else logits_TV.dtype
        needed = torch.is_grad_enabled() and logits_TV.requires_grad
        self.gradients = [torch.zeros_like(logits_TV, dtype=kept) if needed else None]

    def logits(self, rows: Rows, weights_C: Tensor) -> Tensor:
        return self.logits_TV[rows].to(self.dtype)

    def teacher_logits(self, signal: Signal) -> Tensor:
        return self.teachers.logits(signal, self.dtype)

    def pull_back(self, tile: Tile) -> None:
        (grad_TV,) = self.gradients
        assert grad_TV is not None
        assert tile.grad_CV is not None
        grad_TV[tile.rows, : self.vocabulary] = tile.grad_CV.to(grad_TV.dtype)


@dataclass
class _TeacherProjections:
    """Dense teachers' logits over the common vocabulary; each teacher head is made ready once."""

    vocabulary: int
    ready: dict[int, Projection] = field(default_factory=dict)

    def logits(self, signal: Signal, dtype: torch.dtype) -> Tensor:
        if isinstance(signal, DenseLogits):
            return _dense_teacher(signal, self.vocabulary).to(dtype)
        assert isinstance(signal, FullVocab)
        head = signal.head
        if id(head) not in self.ready:
            self.ready[id(head)] = Projection(head, self.vocabulary, operand_dtype(signal.hidden_TE, head.weight_VD))
        return self.ready[id(head)].logits(signal.hidden_TE.detach()).to(dtype)


def _dense_teacher(signal: DenseLogits, vocabulary: int) -> Tensor:
    if signal.logits_TV.shape[1] != vocabulary:
        raise ValueError(
            f"teacher logits over {signal.logits_TV.shape[1]} tokens, student over {vocabulary}; expected the same "
            "vocabulary: cut padded columns off, or set vocab_size on the head"
        )
    return signal.logits_TV.detach()


def _objective(
    source: _Source,
    leaves: list[Tensor | None],
    terms: Sequence[Term],
    tokens: int,
    weights_T: Tensor | None,
    normalizer: float | Tensor,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> ObjectiveOutput:
    _check(terms, tokens, weights_T, normalizer, valid_index, chunk_tokens)
    valid_index = _valid_rows(weights_T, valid_index, source.device)
    with torch.no_grad(), torch.autocast(source.device.type, enabled=False):
        totals = _pass(source, terms, tokens, weights_T, valid_index, chunk_tokens)
        factor = _reciprocal(normalizer, source)
        loss = totals.loss.to(source.dtype) * factor
    if source.needs_gradient:
        loss = _Attach.apply(loss, factor, source.gradients, *leaves)
    metrics = {key: value.to(source.dtype) for key, value in totals.sums.items()}
    return ObjectiveOutput(loss, metrics, totals.per_token)


def _pass(
    source: _Source,
    terms: Sequence[Term],
    tokens: int,
    weights_T: Tensor | None,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> "_Totals":
    totals = _Totals(terms, tokens, source)
    one = torch.ones(1, dtype=source.dtype, device=source.device)
    weights_T = one.expand(tokens) if weights_T is None else weights_T.to(source.device, source.dtype)
    for rows in _chunks(tokens, valid_index, chunk_tokens or _tile_rows(source)):
        _add_chunk(source, terms, rows, weights_T[rows], totals)
    return totals


def _add_chunk(source: _Source, terms: Sequence[Term], rows: Rows, weights_C: Tensor, totals: "_Totals") -> None:
    tile = Tile(source.logits(rows, weights_C), rows, source.teacher_logits, source.needs_gradient)
    totals.sums["tokens"] += (weights_C != 0).sum()
    for position, term in enumerate(terms):
        own_C = weights_C if term.weights_T is None else weights_C * tile.take(term.weights_T).to(source.dtype)
        totals.add(position, rows, own_C, term.add_to(tile, own_C * term.scale))
    if source.needs_gradient:
        source.pull_back(tile)


class _Totals:
    """What a pass adds up. Sums are float64: a float32 running sum loses a digit every few hundred chunks."""

    def __init__(self, terms: Sequence[Term], tokens: int, source: _Source):
        self.names = unique_names(terms)
        self.keys = StatisticKeys(terms, self.names)
        self.scales = [term.scale for term in terms]
        self.per_token = {name: torch.zeros(tokens, dtype=source.dtype, device=source.device) for name in self.names}
        self.loss = torch.zeros((), dtype=torch.float64, device=source.device)
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros_like(self.loss))

    def add(self, position: int, rows: Rows, own_C: Tensor, result: TermResult) -> None:
        """A term's result on a chunk. A row of weight 0 counts nothing, whatever its value (0·NaN)."""
        has_none_C = own_C == 0
        value_C = result.value_C.masked_fill(has_none_C, 0.0)
        value = (value_C.double() * own_C).sum()
        self.per_token[self.names[position]][rows] = value_C
        self.sums[self.names[position]] += value
        if self.scales[position]:  # a term of scale 0 is watched only: it may be infinite
            self.loss += self.scales[position] * value
        for name, statistic_C in (result.statistics | result.parts).items():
            statistic_C = statistic_C.masked_fill(has_none_C, 0.0)
            self.sums[self.keys.of(position, name)] += (statistic_C.double() * own_C).sum()


class _Attach(torch.autograd.Function):
    """Gives a loss the gradients that its forward pass has computed already.

    They are multiplied by the incoming gradient and the normaliser in float32, then rounded to their leaf's dtype:
    a loss scale reaches a half-precision gradient before it can underflow. Nothing is overwritten, so that a second
    backward gives the same.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, factor: Tensor, gradients: list[Tensor | None], *leaves: Tensor | None
    ) -> Tensor:
        ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
        ctx.save_for_backward(factor, *gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; these gradients would enter its graph as constants
            raise RuntimeError("an objective has no second derivative: call backward without create_graph")
        factor, *gradients = ctx.saved_tensors
        factor = factor * grad_loss
        scaled = (
            None if gradient is None else (gradient * factor).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (None, None, None, *scaled)


def _check(
    terms: Sequence[Term],
    tokens: int,
    weights_T: Tensor | None,
    normalizer: float | Tensor,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> None:
    if not terms:
        raise ValueError("no terms: expected at least one of CrossEntropy, Distill, Entropy")
    for what, count in {f"terms[{i}] ({term.name})": term.tokens for i, term in enumerate(terms)}.items():
        if count not in (None, tokens):
            raise ValueError(
                f"{what} has {count} tokens, the student {tokens}; expected one row per token on all sides"
            )
    weights = {"weights_T": weights_T} | {f"terms[{i}].weights_T": term.weights_T for i, term in enumerate(terms)}
    for what, each_T in weights.items():
        if each_T is not None and each_T.shape != (tokens,):
            raise ValueError(f"{what} of shape {tuple(each_T.shape)}: expected ({tokens},), one weight per token")
        if each_T is not None and each_T.device.type == "cpu" and not each_T.isfinite().all():
            raise ValueError(f"{what} holds NaN or infinity: expected finite weights, 0 for rows that do not count")
    if valid_index is not None:
        _check_index(valid_index, tokens)
    if not isinstance(normalizer, Tensor) and not 0 < normalizer < math.inf:
        raise ValueError(f"normalizer={normalizer}: expected the positive number of valid tokens of the whole step")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: expected 1 or more, or None to pick by memory")


def _check_index(valid_index: Tensor, tokens: int) -> None:
    """Its form anywhere, its rows on a CPU: on a GPU the question alone would wait for it."""
    if valid_index.dim() != 1 or valid_index.dtype != torch.int64:
        raise ValueError(
            f"valid_index of shape {tuple(valid_index.shape)} and dtype {valid_index.dtype}: expected row numbers, "
            "one dim of int64 (a mask's are mask.nonzero()[:, 0])"
        )
    if valid_index.device.type != "cpu" or not len(valid_index):
        return
    first, last = int(valid_index.min()), int(valid_index.max())
    if first < 0 or last >= tokens:
        raise ValueError(f"valid_index holds rows {first} to {last}: expected rows from 0 to {tokens - 1}")
    # a repeated row would count twice in the loss and the head's gradient, once in the hidden states'
    if repeated := len(valid_index) - len(valid_index.unique()):
        raise ValueError(f"valid_index holds {repeated} of its {len(valid_index)} rows again: expected each row once")


def _valid_rows(weights_T: Tensor | None, valid_index: Tensor | None, device: torch.device) -> Tensor | None:
    if valid_index is None and weights_T is not None and weights_T.device.type == "cpu":
        valid_index = weights_T.nonzero()[:, 0]
    return None if valid_index is None else valid_index.to(device)


def _reciprocal(normalizer: float | Tensor, source: _Source) -> Tensor:
    if isinstance(normalizer, Tensor):
        return normalizer.to(source.device, source.dtype).reshape(()).reciprocal()
    return torch.full((), 1 / normalizer, dtype=source.dtype, device=source.device)


def _chunks(tokens: int, valid_index: Tensor | None, size: int) -> Iterator[Rows]:
    """At least one chunk, empty if need be: a micro-batch without a valid row has all the metrics of another."""
    if valid_index is not None:
        yield from valid_index.split(size)
    else:
        yield from (slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size))


def _tile_rows(source: _Source) -> int:
    device = source.device.type if source.device.type in TILE_BYTES else "cpu"
    return max(TILE_ROWS[device], TILE_BYTES[device] // (source.vocabulary * source.dtype.itemsize))
