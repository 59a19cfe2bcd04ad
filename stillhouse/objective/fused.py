"""The chunked pass: objectives from hidden states and an output head, without the logits of all tokens.

The pass processes the tokens in chunks. It projects a chunk once to a tile of logits [C, V]. The terms define the
gradient with respect to the tile (`tile.py`), and this gradient overwrites the logits. Two matrix products then
compute the gradients of the hidden states and the head from it. All of this happens in forward, so backward only
multiplies by the incoming gradient, and no product is computed twice.

Over vocabulary shards each rank does this for its own vocabulary rows. For each chunk, one collective gathers every
rank's sums for each token (two collectives if a divergence needs both normalizers first), while the next chunk's
products run.

T tokens, C rows of a chunk, D student width, V vocabulary (of this rank).
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# torch.compiler.disable, without its imports, which take a second: a compiled caller runs the pass uncompiled
from torch._compile import _disable_dynamo

from stillhouse.objective.checks import check_index, check_leaves, check_normalizer, check_terms, check_weights
from stillhouse.objective.chunks import chunks, tile_rows
from stillhouse.objective.head import OutputHead, require_head
from stillhouse.objective.keys import CHUNK_TOKENS, StatisticKeys, unique_names
from stillhouse.objective.plan import Plan, PlanBuilder
from stillhouse.objective.signals import RowIndex
from stillhouse.objective.source import HeadRows, LogitsRows, Source
from stillhouse.objective.terms import Term
from stillhouse.objective.tile import TermResult, Tile
from stillhouse.objective.vocab import VocabShard, check_shard, reduce_hidden_grad


@dataclass(frozen=True)
class ObjectiveOutput:
    """The result of a pass. All tensors are float32, or float64 for float64 inputs.

    `loss`: scalar, Σ_tokens weight · Σ_terms scale · value, divided by the normalizer; differentiable.
    `metrics`: detached sums over tokens. Each token is multiplied by its weight in the term (the objective's weight
    times the term's own). The sums are not scaled by the term's scale and not divided by the normalizer. They are
    `tokens`, the count of rows with a non-zero weight; every term's value under the term's name; and statistics:
        a distillation term has `student_entropy` and `teacher_entropy` (at its temperature), `agreement` (top-1),
        `teacher_mass` (the mass that a sparse signal covers) and, if its divergence is a sum, each summand's value
        under its expression (`forward_kl`), multiplied by the term's τ² but not by the summand's coefficient;
        a cross-entropy with label smoothing or z-loss has `negative_log_likelihood`, the plain −log q_y; with z-loss
        it also has `z_loss`, that summand of its value; both are 0 without a label.
    The second term of the same name gets "#2" after its name; the second term of the same class gets "#2" after its
    statistics' names, or the next free number. A `label` of a distillation term follows its name and its statistics'
    names ("forward_kl/label"; see `StatisticKeys`). The keys depend only on the terms, not on the rows.
    The metric `chunk_tokens` is not a sum: it is the largest number of rows of a tile, chosen by memory or given.
    `per_token`: detached [T], each term's unweighted value under its name; 0 where its weight is 0.
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
    """Compute a weighted sum of terms from hidden states [T, D] and the head, differentiable in both.

    weights_T: weight per token (None: 1). Rows of weight 0 contribute nothing and may hold any values, also NaN. The
        same is true for rows that every term excludes, by the term's own weight or by a negative label.
    normalizer: divides the sum; the optimizer step's global count of tokens with a non-zero weight.
    valid_index: the rows with a non-zero weight, int64, each row once; the pass computes only these rows. None: the
        pass finds them if weights_T is on a CPU; otherwise it computes all rows, since finding them on a GPU would
        wait for the GPU.
    chunk_tokens: rows of a tile; None: chosen by a memory budget. Results do not depend on it.

    Over a sharded head, all ranks call this with the same tokens, terms and options and get the same loss and
    metrics; each rank gets the weight's gradient for its own rows. Collectives: for each chunk, one all-gather of a
    few dozen sums per row and of one logit for each id of a sparse signal; a second all-gather for divergences other
    than forward and reverse KL; one more for each mixture of teachers; in backward, an all-reduce of the hidden
    states' gradient [T, D] in float32 (float64 for float64 inputs), unless `VocabShard.reduce_hidden_grad` is False.

    Raises ValueError for shapes or devices that do not match, for tensors on the meta device, for forward-mode
    tangents, and for weights or a normalizer that require grad. For numbers and for tensors on a CPU it also raises
    ValueError for a normalizer that is not positive, weights that are not finite, and repeated rows in valid_index.
    """
    require_head(head)
    leaves = {"hidden_TD": hidden_TD, "head.weight_VD": head.weight_VD, "head.bias": head.bias}
    check_leaves(leaves)
    if hidden_TD.dim() != 2 or hidden_TD.shape[1] != head.weight_VD.shape[1]:
        raise ValueError(
            f"hidden_TD of shape {tuple(hidden_TD.shape)}: expected [tokens, {head.weight_VD.shape[1]}] for this head"
        )
    _check(leaves, terms, weights_T, normalizer, valid_index, chunk_tokens)
    source = HeadRows(hidden_TD, head, terms)
    rows = [(source, terms, valid_index)]
    return _objective(rows, leaves, weights_T, normalizer, chunk_tokens)


@_disable_dynamo
def routed_objective(
    hidden_TD: Tensor,
    head: OutputHead,
    groups: Iterable[tuple[Tensor, Sequence[Term]]],
    *,
    weights_T: Tensor | None = None,
    normalizer: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
) -> ObjectiveOutput:
    """Compute `linear_objective` where different rows have different terms, such as those of different teachers.

    groups: one or more times the rows (int64, no row in two groups) and their terms. They are taken one after the
    other, and a group's terms are not used any more when the next one is taken. All groups add to the same gradients.
    The other arguments are those of `linear_objective`.

    Raises ValueError without a group, and for what `linear_objective` refuses.
    """
    require_head(head)
    leaves = {"hidden_TD": hidden_TD, "head.weight_VD": head.weight_VD, "head.bias": head.bias}
    check_leaves(leaves)

    def passes() -> Iterator[tuple[Source, Sequence[Term], Tensor]]:
        gradients = None
        for index, terms in groups:
            _check(leaves, terms, weights_T, normalizer, index, chunk_tokens)
            source = HeadRows(hidden_TD, head, terms, gradients)
            gradients = source.gradients
            yield source, terms, index

    return _objective(passes(), leaves, weights_T, normalizer, chunk_tokens)


@_disable_dynamo
def logits_objective(
    logits_TV: Tensor,
    terms: Sequence[Term],
    *,
    shard: VocabShard | None = None,
    weights_T: Tensor | None = None,
    normalizer: float | Tensor = 1.0,
) -> ObjectiveOutput:
    """Compute the same from logits [T, V], differentiable in the logits. The pass keeps one gradient of their size.

    shard: which columns of the whole vocabulary the logits are; None: all columns.
    """
    leaves: dict[str, Tensor | None] = {"logits_TV": logits_TV}
    check_leaves(leaves)
    if logits_TV.dim() != 2:
        raise ValueError(f"logits_TV of shape {tuple(logits_TV.shape)}: expected [tokens, vocabulary]")
    if shard is not None:
        check_shard(shard, logits_TV.shape[1])
    _check(leaves, terms, weights_T, normalizer, None, None)
    source = LogitsRows(logits_TV, shard, terms)
    return _objective([(source, terms, None)], leaves, weights_T, normalizer, None)


def _objective(
    passes: Iterable[tuple[Source, Sequence[Term], Tensor | None]],
    leaves: dict[str, Tensor | None],
    weights_T: Tensor | None,
    normalizer: float | Tensor,
    chunk_tokens: int | None,
) -> ObjectiveOutput:
    """passes: for some rows or all (None), their source and their terms. All sources have the same gradients."""
    tokens, whole = _tokens(leaves), None
    for source, terms, index in passes:
        index = _valid_rows(weights_T, index, source.device)
        with torch.no_grad(), torch.autocast(source.device.type, enabled=False):
            totals = _Totals(terms, tokens, source)
            _pass(source, terms, tokens, weights_T, index, chunk_tokens, totals)
            whole = totals if whole is None else whole.plus(totals)
    if whole is None:
        raise ValueError("no group of rows: expected at least one, which may be empty")
    with torch.no_grad():
        factor = _reciprocal(normalizer, source)
        loss = whole.loss.to(source.dtype) * factor
    if source.needs_gradient:
        loss = _Attach.apply(loss, factor, source.gradients, source.shard, *leaves.values())
    metrics = {key: value.to(source.dtype) for key, value in whole.sums.items()}
    metrics[CHUNK_TOKENS] = torch.full_like(factor, whole.chunk_tokens)
    return ObjectiveOutput(loss, metrics, whole.per_token)


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
    requests = PlanBuilder(source.scale, source.softcap)
    for term in terms:
        term.request(requests)
    plan = requests.build()
    size = chunk_tokens or tile_rows(source, tokens if valid_index is None else len(valid_index))
    # over several ranks, the next chunk's products run while the collective of this chunk is under way
    ahead = 0 if source.shard is None or source.shard.is_alone else 1
    started: deque[_Chunk] = deque()
    for number, rows in enumerate(chunks(tokens, valid_index, size)):
        started.append(_start(source, plan, terms, rows, weights_T[rows], number % (ahead + 1)))
        if len(started) > ahead:
            _finish(source, terms, started.popleft(), totals)
    while started:
        _finish(source, terms, started.popleft(), totals)


@dataclass
class _Chunk:
    """A chunk whose collective may still be under way.

    counted_C: the rows that at least one term of the loss counts. The other rows get no gradient, whatever they hold.
    """

    tile: Tile
    weights_C: Tensor
    counted_C: Tensor


def _start(
    source: Source,
    plan: Plan,
    terms: Sequence[Term],
    rows: RowIndex,
    weights_C: Tensor,
    buffer: int,
) -> _Chunk:
    # a term of scale 0 is only reported: its rows are computed, but it adds nothing to the loss
    seen_C = counted_C = torch.zeros_like(weights_C, dtype=torch.bool)
    for term in terms:
        of_term_C = term.counted(rows, weights_C)
        seen_C = seen_C | of_term_C
        counted_C = counted_C | of_term_C if term.scale else counted_C
    tiles_CV = source.tiles(rows, seen_C, plan.signals, buffer)
    tile = Tile(plan, rows, counted_C, tiles_CV, source.vocabulary, source.shard, source.needs_gradient)
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
    """The sums of a pass. They are float64: a float32 running sum loses a digit every few hundred chunks. Apple's GPU
    has no float64.
    """

    def __init__(self, terms: Sequence[Term], tokens: int, source: Source):
        self.names = unique_names(terms)
        self.keys = StatisticKeys(terms, self.names)
        self.scales = [term.scale for term in terms]
        self.per_token = {name: torch.zeros(tokens, dtype=source.dtype, device=source.device) for name in self.names}
        dtype = torch.float32 if source.device.type == "mps" else torch.float64
        self.loss = torch.zeros((), dtype=dtype, device=source.device)
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros_like(self.loss))
        self.chunk_tokens = 0

    def plus(self, other: "_Totals") -> "_Totals":
        """Add the totals of other rows."""
        self.loss += other.loss
        self.chunk_tokens = max(self.chunk_tokens, other.chunk_tokens)
        for name, value in other.sums.items():
            self.sums[name] += value
        for name, value_T in other.per_token.items():
            self.per_token[name] = self.per_token[name] + value_T if name in self.per_token else value_T
        return self

    def add(self, position: int, rows: RowIndex, own_C: Tensor, result: TermResult) -> None:
        """Add a term's result on a chunk. A row of weight 0 adds 0 even if its value is NaN."""
        has_none_C = own_C == 0
        value_C = result.value_C.masked_fill(has_none_C, 0.0)
        value = (value_C.to(self.loss.dtype) * own_C).sum()
        self.per_token[self.names[position]][rows] = value_C
        self.sums[self.names[position]] += value
        if self.scales[position]:  # a term of scale 0 is only reported: it may be infinite
            self.loss += self.scales[position] * value
        for name, statistic_C in (result.statistics | result.parts).items():
            if key := self.keys.of(position, name):
                statistic_C = statistic_C.masked_fill(has_none_C, 0.0)
                self.sums[key] += (statistic_C.to(self.loss.dtype) * own_C).sum()


class _Attach(torch.autograd.Function):
    """Connects a loss to the gradients that the forward pass has already computed.

    Backward multiplies them by the incoming gradient and by 1 / normalizer in the dtype that the source keeps them in
    (`Source.kept_dtype`), then rounds them to their leaf's dtype. So a loss scale is applied before a float16
    gradient can underflow. With retain_graph the gradients are kept, and a second backward gives the same result.
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
        else:  # no further backward will follow: multiply in place, without a copy as large as the weight
            scaled, ctx.gradients = (
                [None if gradient is None else gradient.mul_(factor) for gradient in ctx.gradients],
                [],
            )
        # the hidden states' gradient needs the sum over ranks; a gradient of logits belongs to one rank alone
        if scaled[0] is not None and len(scaled) > 1:
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
    """Return T: the first leaf of every pass is hidden states or logits, with one row per token."""
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
