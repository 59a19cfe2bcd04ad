"""The chunked pass: objectives from hidden states and an output head, without the logits of all tokens.

Tokens are taken in chunks. A chunk is projected once to a tile of logits [C, V]; terms say what the gradient with
respect to it is (`tile.py`); it takes the logits' place, and two matrix products carry it back to the hidden states
and the head. All of it happens in forward, so backward only multiplies by the incoming gradient and no product is
computed twice.

Over vocabulary shards each rank does this for its own rows. Per chunk one collective carries what the ranks know of
each row (two where a divergence needs both normalisers first), while the next chunk's products run.

T tokens, C rows of a chunk, D student width, V vocabulary (of this rank).
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# torch.compiler.disable without its second of imports: a caller that is compiled leaves the pass out
from torch._compile import _disable_dynamo

from stillhouse.objective.checks import check_index, check_leaves, check_normalizer, check_terms, check_weights
from stillhouse.objective.head import OutputHead
from stillhouse.objective.keys import CHUNK_TOKENS, StatisticKeys, unique_names
from stillhouse.objective.plan import Plan, PlanBuilder
from stillhouse.objective.signals import Rows
from stillhouse.objective.source import HeadRows, LogitsRows, Source
from stillhouse.objective.terms import Term
from stillhouse.objective.tile import TermResult, Tile
from stillhouse.objective.vocab import VocabShard, check_shard, reduce_hidden_grad

#: bytes that one float32 tile of logits may take; a pass keeps one for the student and one for each dense teacher
#: (of two chunks over vocabulary shards)
TILE_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
#: the fewest and the most rows of a tile: below the first, matrix products are far from their speed and, on a GPU,
#: summing the weight's float32 gradient is bandwidth-bound; above the second there is nothing to win
TILE_ROWS = {"cpu": (64, 512), "cuda": (1024, 4096)}


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
    `chunk_tokens` is no sum: the most rows that a tile had, as chosen by memory or given.
    `per_token`: detached float32 [T], each term's unweighted value under its name; 0 where its weight is 0.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    per_token: dict[str, Tensor]


@_disable_dynamo
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

    weights_T: weight per token (None: 1). Rows of weight 0 add nothing and may hold anything, NaN included; so do
        rows that every term leaves out, by its own weight or a negative label.
    normalizer: divides the sum; the optimizer step's global count of tokens with a non-zero weight.
    valid_index: the rows with a weight, int64, if the caller knows them (a batch made on the CPU does; finding them
        on a GPU waits for it, so without this all rows are computed there). Each row once; no other is visited.
    chunk_tokens: rows of a tile; None picks by a memory budget. Results do not depend on it.

    Over a sharded head all ranks call this with the same tokens, terms and options, and get the same loss and
    metrics; the weight's gradient is that of the rank's rows. Collectives: per chunk one all-gather of values,
    gradients and metrics, C rows times a few dozen numbers and one for each id of a sparse signal; a second one for
    divergences other than forward and reverse KL; in backward an all-reduce of the hidden states' gradient [T, D] in
    float32, unless `VocabShard.reduce_hidden_grad` is False.

    Raises ValueError where shapes or devices disagree, for tensors on the meta device, forward-mode tangents, weights
    or a normalizer that require grad and, of numbers and of tensors on a CPU, for a normalizer that is not positive,
    weights that are not finite and rows that come twice.
    """
    leaves = {"hidden_TD": hidden_TD, "head.weight_VD": head.weight_VD, "head.bias": head.bias}
    check_leaves(leaves)
    if hidden_TD.dim() != 2 or hidden_TD.shape[1] != head.weight_VD.shape[1]:
        raise ValueError(
            f"hidden_TD of shape {tuple(hidden_TD.shape)}: expected [tokens, {head.weight_VD.shape[1]}] for this head"
        )
    _check(leaves, terms, weights_T, normalizer, valid_index, chunk_tokens)
    source = HeadRows(hidden_TD, head, terms)
    return _objective(source, leaves, terms, weights_T, normalizer, valid_index, chunk_tokens)


@_disable_dynamo
def logits_objective(
    logits_TV: Tensor,
    terms: Sequence[Term],
    *,
    shard: VocabShard | None = None,
    weights_T: Tensor | None = None,
    normalizer: float | Tensor = 1.0,
) -> ObjectiveOutput:
    """The same for who holds logits [T, V]: differentiable in them. One gradient of their size is kept.

    shard: which columns of the whole vocabulary they are, if not all of them.
    """
    leaves: dict[str, Tensor | None] = {"logits_TV": logits_TV}
    check_leaves(leaves)
    if logits_TV.dim() != 2:
        raise ValueError(f"logits_TV of shape {tuple(logits_TV.shape)}: expected [tokens, vocabulary]")
    if shard is not None:
        check_shard(shard, logits_TV.shape[1])
    _check(leaves, terms, weights_T, normalizer, None, None)
    source = LogitsRows(logits_TV, shard, terms)
    return _objective(source, leaves, terms, weights_T, normalizer, None, None)


def _objective(
    source: Source,
    leaves: dict[str, Tensor | None],
    terms: Sequence[Term],
    weights_T: Tensor | None,
    normalizer: float | Tensor,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> ObjectiveOutput:
    tokens = _tokens(leaves)
    valid_index = _valid_rows(weights_T, valid_index, source.device)
    with torch.no_grad(), torch.autocast(source.device.type, enabled=False):
        totals = _Totals(terms, tokens, source)
        _pass(source, terms, tokens, weights_T, valid_index, chunk_tokens, totals)
        factor = _reciprocal(normalizer, source)
        loss = totals.loss.to(source.dtype) * factor
    if source.needs_gradient:
        loss = _Attach.apply(loss, factor, source.gradients, source.shard, *leaves.values())
    metrics = {key: value.to(source.dtype) for key, value in totals.sums.items()}
    metrics[CHUNK_TOKENS] = torch.full_like(factor, totals.chunk_tokens)
    return ObjectiveOutput(loss, metrics, totals.per_token)


def _pass(
    source: Source,
    terms: Sequence[Term],
    tokens: int,
    weights_T: Tensor | None,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
    totals: "_Totals",
) -> None:
    one = torch.ones(1, dtype=source.dtype, device=source.device)
    weights_T = one.expand(tokens) if weights_T is None else weights_T.to(source.device, source.dtype)
    asked = PlanBuilder(source.scale, source.softcap)
    for term in terms:
        term.ask(asked)
    plan = asked.build()
    size = chunk_tokens or _tile_rows(source, tokens if valid_index is None else len(valid_index))
    # with other ranks to hear from, the next chunk's products run in the meantime
    ahead = 0 if source.shard is None or source.shard.is_alone else 1
    started: deque[_Chunk] = deque()
    for number, rows in enumerate(_chunks(tokens, valid_index, size)):
        started.append(_start(source, asked, plan, terms, rows, weights_T[rows], number % (ahead + 1)))
        if len(started) > ahead:
            _finish(source, terms, started.popleft(), totals)
    while started:
        _finish(source, terms, started.popleft(), totals)


@dataclass
class _Chunk:
    """counted_C: the rows that a term of the loss counts. All others get no gradient, whatever they hold."""

    tile: Tile
    weights_C: Tensor
    counted_C: Tensor


def _start(
    source: Source,
    asked: PlanBuilder,
    plan: Plan,
    terms: Sequence[Term],
    rows: Rows,
    weights_C: Tensor,
    buffer: int,
) -> _Chunk:
    # a term of scale 0 is watched only: it sees its rows, and has no part in the loss
    seen_C = counted_C = torch.zeros_like(weights_C, dtype=torch.bool)
    for term in terms:
        of_term_C = term.counted(rows, weights_C)
        seen_C = seen_C | of_term_C
        counted_C = counted_C | of_term_C if term.scale else counted_C
    tiles_CV = source.tiles(rows, seen_C, asked.signals, buffer)
    tile = Tile(asked, plan, rows, counted_C, tiles_CV, source.vocabulary, source.shard, source.needs_gradient)
    tile.start()
    return _Chunk(tile, weights_C, counted_C)


def _finish(source: Source, terms: Sequence[Term], chunk: _Chunk, totals: "_Totals") -> None:
    tile, weights_C = chunk.tile, chunk.weights_C
    tile.wait()
    totals.sums["tokens"] += (weights_C != 0).sum()
    totals.chunk_tokens = max(totals.chunk_tokens, len(weights_C))
    for position, term in enumerate(terms):
        own_C = weights_C if term.weights_T is None else weights_C * tile.take(term.weights_T).to(source.dtype)
        totals.add(position, tile.rows, own_C, term.add_to(tile, own_C * term.scale))
    if source.needs_gradient:
        source.pull_back(tile.rows, chunk.counted_C, tile.gradient())


class _Totals:
    """What a pass adds up. Sums are float64: a float32 running sum loses a digit every few hundred chunks."""

    def __init__(self, terms: Sequence[Term], tokens: int, source: Source):
        self.names = unique_names(terms)
        self.keys = StatisticKeys(terms, self.names)
        self.scales = [term.scale for term in terms]
        self.per_token = {name: torch.zeros(tokens, dtype=source.dtype, device=source.device) for name in self.names}
        self.loss = torch.zeros((), dtype=torch.float64, device=source.device)
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros_like(self.loss))
        self.chunk_tokens = 0

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
    a loss scale reaches a half-precision gradient before it can underflow. With retain_graph they are kept, and a
    second backward gives the same.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        factor: Tensor,
        gradients: list[Tensor | None],
        shard: VocabShard | None,
        *leaves: Tensor | None,
    ) -> Tensor:
        ctx.shard = shard
        ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
        ctx.save_for_backward(factor)
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; these gradients would enter its graph as constants
            raise RuntimeError("an objective has no second derivative: call backward without create_graph")
        (factor,) = ctx.saved_tensors  # a second backward without retain_graph ends here
        factor = factor * grad_loss
        if torch._C._autograd._get_current_graph_task_keep_graph():
            scaled = [None if gradient is None else gradient * factor for gradient in ctx.gradients]
        else:  # nobody will ask again: the gradients themselves, not copies of the weight's size
            scaled, ctx.gradients = (
                [None if gradient is None else gradient.mul_(factor) for gradient in ctx.gradients],
                [],
            )
        if scaled[0] is not None and len(scaled) > 1:  # of the hidden states; logits are each rank's own
            scaled[0] = reduce_hidden_grad(scaled[0], ctx.shard)
        rounded = (
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(scaled, ctx.dtypes, strict=True)
        )
        return (None, None, None, None, *rounded)


def _check(
    leaves: dict[str, Tensor | None],
    terms: Sequence[Term],
    weights_T: Tensor | None,
    normalizer: float | Tensor,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> None:
    tokens, (first, leaf) = _tokens(leaves), next(iter(leaves.items()))
    assert leaf is not None
    check_terms(terms, tokens, first, leaf)
    check_weights(
        {"weights_T": weights_T} | {f"terms[{i}].weights_T": each.weights_T for i, each in enumerate(terms)}, tokens
    )
    if valid_index is not None:
        check_index(valid_index, tokens)
    check_normalizer(normalizer)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: expected 1 or more, or None to pick by memory")


def _tokens(leaves: dict[str, Tensor | None]) -> int:
    """T: every pass has rows of hidden states, or of logits, first."""
    rows = next(iter(leaves.values()))
    assert rows is not None
    return rows.shape[0]


def _valid_rows(weights_T: Tensor | None, valid_index: Tensor | None, device: torch.device) -> Tensor | None:
    if valid_index is None and weights_T is not None and weights_T.device.type == "cpu":
        valid_index = weights_T.nonzero()[:, 0]
    if valid_index is None or device.type != "cuda" or valid_index.device.type != "cpu":
        return None if valid_index is None else valid_index.to(device)
    return valid_index.pin_memory().to(device, non_blocking=True)


def _reciprocal(normalizer: float | Tensor, source: Source) -> Tensor:
    if isinstance(normalizer, Tensor):
        return normalizer.to(source.device, source.dtype).reshape(()).reciprocal()
    return torch.full((), 1 / normalizer, dtype=source.dtype, device=source.device)


def _chunks(tokens: int, valid_index: Tensor | None, size: int) -> Iterator[Rows]:
    """At least one chunk, empty if need be: a micro-batch without a valid row has all the metrics of another."""
    if valid_index is not None:
        yield from valid_index.split(size)
    else:
        yield from (slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size))


def _tile_rows(source: Source, tokens: int) -> int:
    """Rows of a tile by the memory budget, the tokens spread evenly over the chunks."""
    device = source.device.type if source.device.type in TILE_BYTES else "cpu"
    fewest, most = TILE_ROWS[device]
    # over shards, every rank has to come to the same number
    columns = source.vocabulary if source.shard is None else source.shard.most_rows
    rows = min(most, max(fewest, TILE_BYTES[device] // (columns * source.dtype.itemsize)))
    return math.ceil(tokens / math.ceil(tokens / rows)) if tokens else rows
