"""The chunked pass: objectives from hidden states and an output head, without the logits of all tokens.

Tokens are taken in chunks. A chunk is projected once to a tile of logits [C, V]; each term adds its value and its
gradient to the tile; two matrix products carry the gradient back to the hidden states and the head. All of it
happens in forward, so backward only multiplies by the incoming gradient and no product is computed twice.

T tokens, C rows of a chunk, D student width, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stillhouse.objective.head import OutputHead, Projection, common_vocabulary, operand_dtype
from stillhouse.objective.signals import DenseLogits, FullVocab, Rows, Signal
from stillhouse.objective.terms import Term
from stillhouse.objective.tile import Tile
from stillhouse.objective.vocab import VocabShard, require_whole_vocabulary

#: bytes that one float32 tile of logits may take; a pass keeps a handful of them
TILE_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


@dataclass(frozen=True)
class ObjectiveOutput:
    """What a pass gives.

    `loss`: float32 scalar, Σ_tokens weight · Σ_terms scale · value, divided by the normalizer; differentiable.
    `metrics`: detached float32 sums over tokens, each token with its weight and nothing scaled or divided: every
    term's value under the term's name, `student_entropy` and `teacher_entropy` (at the temperature of the
    distillation term), `agreement` (top-1), `teacher_mass` (covered by a sparse signal), and `tokens`, the count of
    rows with a weight. A second term of the same name has "#2" behind its keys.
    `per_token`: detached float32 [T], each term's unweighted value under its name; 0 where the weight is 0.
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

    weights_T: weight per token (None: 1). Rows of weight 0 cost nothing and may hold anything.
    normalizer: divides the sum; the optimizer step's global count of tokens with a non-zero weight.
    valid_index: the rows with a weight, if the caller knows them (a batch made on the CPU does; finding them on a
        GPU waits for it, so without this all rows are computed there).
    chunk_tokens: rows of a tile; None picks by a memory budget. Results do not depend on it.

    Raises ValueError where shapes disagree; NotImplementedError for a head sharded over ranks.
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

    def logits(self, rows: Rows) -> Tensor:
        raise NotImplementedError

    def teacher_logits(self, signal: Signal) -> Tensor:
        raise NotImplementedError

    def pull_back(self, rows: Rows, tile: Tile) -> None:
        """Add the tile's gradient to `gradients`."""
        raise NotImplementedError


class _HeadRows(_Source):
    """Hidden states and a head: gradients are kept in float32 until the incoming one has been multiplied in."""

    def __init__(self, hidden_TD: Tensor, head: OutputHead, terms: Sequence[Term]):
        teacher_heads = {id(each): each for term in terms for signal in term.signals() for each in signal.heads()}
        self.vocabulary = common_vocabulary(head, list(teacher_heads.values()))
        self.hidden_TD = hidden_TD.detach()
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

    def logits(self, rows: Rows) -> Tensor:
        return self.projection.logits(self.hidden_TD[rows])

    def teacher_logits(self, signal: Signal) -> Tensor:
        return self.teachers.logits(signal, self.dtype)

    def pull_back(self, rows: Rows, tile: Tile) -> None:
        assert tile.grad_CV is not None
        grad_CV = self.projection.before_head(tile.grad_CV, tile.logits_CV)
        hidden_grad_TD, weight_grad_VD, bias_grad_V = self.gradients
        if hidden_grad_TD is not None:
            hidden_grad_TD[rows] = self.projection.hidden_grad(grad_CV)
        if weight_grad_VD is not None:
            self.projection.add_weight_grad(weight_grad_VD[: self.vocabulary], grad_CV, self.hidden_TD[rows])
        if bias_grad_V is not None:
            bias_grad_V[: self.vocabulary] += grad_CV.sum(0)


class _LogitsRows(_Source):
    """Logits that exist already."""

    def __init__(self, logits_TV: Tensor, terms: Sequence[Term]):
        heads = [each for term in terms for signal in term.signals() for each in signal.heads()]
        rows = logits_TV.shape[1]
        for each in heads:
            require_whole_vocabulary(each.shard, each.weight_VD.shape[0])
        self.vocabulary = min([rows, *(each.vocab_size or each.weight_VD.shape[0] for each in heads)])
        self.logits_TV = logits_TV.detach()[:, : self.vocabulary]
        self.device, self.dtype = logits_TV.device, torch.promote_types(logits_TV.dtype, torch.float32)
        self.teachers = _TeacherProjections(self.vocabulary)
        # float16 would lose an unnormalised gradient below 6e-8 before the loss scale is multiplied in
        kept = torch.float32 if logits_TV.dtype == torch.float16 else logits_TV.dtype
        needed = torch.is_grad_enabled() and logits_TV.requires_grad
        self.gradients = [torch.zeros_like(logits_TV, dtype=kept) if needed else None]

    def logits(self, rows: Rows) -> Tensor:
        return self.logits_TV[rows].to(self.dtype)

    def teacher_logits(self, signal: Signal) -> Tensor:
        return self.teachers.logits(signal, self.dtype)

    def pull_back(self, rows: Rows, tile: Tile) -> None:
        (grad_TV,) = self.gradients
        assert grad_TV is not None
        assert tile.grad_CV is not None
        grad_TV[rows, : self.vocabulary] = tile.grad_CV.to(grad_TV.dtype)


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
    _check(terms, tokens, weights_T, normalizer, chunk_tokens)
    valid_index = _valid_rows(weights_T, valid_index)
    with torch.no_grad(), torch.autocast(source.device.type, enabled=False):
        total, metrics, per_token = _pass(source, terms, tokens, weights_T, valid_index, chunk_tokens)
        factor = torch.as_tensor(normalizer, dtype=source.dtype, device=source.device).reciprocal()
        loss = total * factor
    if any(gradient is not None for gradient in source.gradients):
        loss = _Attach.apply(loss, factor, source.gradients, *leaves)
    return ObjectiveOutput(loss, metrics, per_token)


def _pass(
    source: _Source,
    terms: Sequence[Term],
    tokens: int,
    weights_T: Tensor | None,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    needs_gradient = any(gradient is not None for gradient in source.gradients)
    names = _unique_names(terms)
    per_token = {name: torch.zeros(tokens, dtype=source.dtype, device=source.device) for name in names}
    # sums over tokens in float64: a float32 running sum loses a digit every few hundred chunks
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=source.device))
    total = torch.zeros((), dtype=torch.float64, device=source.device)
    ones = torch.ones((), dtype=source.dtype, device=source.device)
    for rows in _chunks(tokens, valid_index, chunk_tokens or _tile_rows(source)):
        tile = Tile(source.logits(rows), rows, source.teacher_logits, needs_gradient)
        weights_C = (ones if weights_T is None else tile.take(weights_T).to(source.dtype)).expand(len(tile.logits_CV))
        sums["tokens"] += (weights_C != 0).sum()
        for name, term in zip(names, terms, strict=True):
            own_C = weights_C if term.weights_T is None else weights_C * tile.take(term.weights_T)
            result = term.add_to(tile, own_C * term.scale)
            value_C = result.value_C.masked_fill(weights_C == 0, 0.0)
            per_token[name][rows] = value_C
            value = _weighted_sum(value_C, own_C)
            sums[name] += value
            total += term.scale * value
            suffix = name[len(term.name) :]
            for key, statistic_C in result.statistics.items():
                sums[key + suffix] += _weighted_sum(statistic_C, weights_C)
        if needs_gradient:
            source.pull_back(rows, tile)
    for name in ("tokens", *names):
        sums[name] += 0  # present even when no row was valid
    return total.to(source.dtype), {key: value.to(source.dtype) for key, value in sums.items()}, per_token


def _weighted_sum(value_C: Tensor, weights_C: Tensor) -> Tensor:
    """Σ weight·value in float64; a row of weight 0 counts nothing, whatever its value (0·NaN)."""
    return (value_C.masked_fill(weights_C == 0, 0.0).double() * weights_C).sum()


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
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
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
    chunk_tokens: int | None,
) -> None:
    if not terms:
        raise ValueError("no terms: expected at least one of CrossEntropy, Distill, Entropy")
    counts = {f"terms[{i}] ({term.name})": term.tokens for i, term in enumerate(terms)}
    counts |= {f"terms[{i}].weights_T": len(t.weights_T) for i, t in enumerate(terms) if t.weights_T is not None}
    counts["weights_T"] = None if weights_T is None else len(weights_T)
    for what, count in counts.items():
        if count not in (None, tokens):
            raise ValueError(
                f"{what} has {count} tokens, the student {tokens}; expected one row per token on all sides"
            )
    if isinstance(normalizer, int | float) and not normalizer > 0:
        raise ValueError(f"normalizer={normalizer}: expected the positive number of valid tokens of the whole step")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: expected 1 or more, or None to pick by memory")


def _valid_rows(weights_T: Tensor | None, valid_index: Tensor | None) -> Tensor | None:
    if valid_index is None and weights_T is not None and weights_T.device.type == "cpu":
        return weights_T.nonzero()[:, 0]
    return valid_index


def _chunks(tokens: int, valid_index: Tensor | None, size: int) -> Iterator[Rows]:
    if valid_index is not None:
        yield from (part for part in valid_index.split(size) if len(part))
    else:
        yield from (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _tile_rows(source: _Source) -> int:
    budget = TILE_BYTES.get(source.device.type, TILE_BYTES["cpu"])
    return max(16, budget // (source.vocabulary * source.dtype.itemsize))


def _unique_names(terms: Sequence[Term]) -> list[str]:
    seen: dict[str, int] = defaultdict(int)
    names = []
    for term in terms:
        seen[term.name] += 1
        names.append(term.name if seen[term.name] == 1 else f"{term.name}#{seen[term.name]}")
    return names
