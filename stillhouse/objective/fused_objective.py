"""The chunked pass: objectives from hidden states and an output head, without the logits of all tokens.

The pass projects each chunk of tokens once to a tile of logits [C, V]. The terms' gradient with respect to the tile
(`tile/tile.py`) overwrites the logits, and two matrix products compute the gradients of the hidden states and the
head. All of this happens in forward, so backward only multiplies these gradients by the incoming gradient, and no
product is computed twice. With vocabulary shards, each rank does this for its own rows of the vocabulary. One
all-gather per chunk (two for some divergences) gives all ranks the sums of every rank for each token, while the
matrix products of the next chunk run.

Invalid inputs raise ValueError. The values of a tensor are checked only if the tensor is on a CPU, because a check on
a GPU would have to wait for the GPU.

T tokens, C rows of a chunk, D student width, V vocabulary (of this rank).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

# torch.compile must not trace the pass. `_disable_dynamo` prevents it without the imports of torch.compiler (1 s)
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from stillhouse.objective.head import OutputHead
from stillhouse.objective.metrics import CHUNK_TOKENS
from stillhouse.objective.signals import check_per_token
from stillhouse.objective.terms import Term, require_terms
from stillhouse.objective.tile.chunks import run_chunks
from stillhouse.objective.tile.logits_provider import HeadLogits, LogitsProvider, TensorLogits
from stillhouse.objective.vocab import VocabShard, check_shard, reduce_hidden_grad

#: the tensors of a pass that receive a gradient, by their names in error messages. The first tensor, hidden states or
#: logits, has one row per token
Leaves: TypeAlias = dict[str, Tensor | None]


@dataclass(frozen=True)
class ObjectiveOutput:
    """The result of a pass. All tensors are float32, or float64 for float64 inputs.

    `loss`: scalar, Σ_tokens weight · Σ_terms scale · value, divided by the normalizer; differentiable.
    `metrics`: detached sums over tokens of each term's value and statistics. A token's weight in a sum is the
        objective's weight times the term's own weight. The sums are not multiplied by the term's scale and not
        divided by the normalizer. The keys depend only on the terms, not on the rows: `tokens`, and each term by its
        name. A divergence adds `student_entropy`, `teacher_entropy` and `agreement`; a sum of divergences, each
        summand; top ids, `teacher_mass`; smoothing or z-loss, `negative_log_likelihood` and `z_loss`; a policy
        gradient, `ratio`, `clipped` and `reference_kl`; rollouts, `log_ratio` and `sampled`. Only `chunk_tokens` is
        not a sum: it is the largest number of rows of a tile.
    `per_token`: detached [T], each term's unweighted value under the term's name; 0 where the token's weight is 0.
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

    weights_T: a weight per token, by default 1. Rows of weight 0 contribute nothing and may contain any values, even
        NaN. The same is true for rows that every term excludes, by the term's own weight or by a negative label.
    normalizer: the divisor of the sum, usually the number of tokens with a non-zero weight in the optimizer step.
    valid_index: the rows with a non-zero weight, int64, each row once; the pass computes only these rows. If it is
        None, the pass finds these rows only if weights_T is on a CPU. If weights_T is on a GPU, the pass computes all
        rows, because finding the rows would have to wait for the GPU.
    chunk_tokens: the number of rows of a tile, or None for a number that fits a memory budget. The results do not
        depend on this number.

    Over a sharded head, all ranks call this with the same tokens, terms and options. They get the same loss and
    metrics, and each rank gets the weight's gradient for its own rows. Collectives of a chunk: one all-gather of a
    few dozen sums per row and of one logit for each id of a sparse signal; a second all-gather for divergences other
    than forward and reverse KL; one more for each mixture of teachers. Collective of backward: an all-reduce of the
    hidden states' gradient [T, D] in float32 (float64 for float64 inputs) if `VocabShard.reduce_hidden_grad` is True.

    Raises ValueError for shapes or devices that do not match, for tensors on the meta device, for forward-mode
    tangents, and for weights or a normalizer that require grad. Values are checked only if they are on a CPU: the
    normalizer must be positive, the weights must be finite, and valid_index must not repeat a row.
    """
    groups = [(valid_index, terms)]
    return routed_objective(
        hidden_TD, head, groups, weights_T=weights_T, normalizer=normalizer, chunk_tokens=chunk_tokens
    )


@_disable_dynamo
def routed_objective(
    hidden_TD: Tensor,
    head: OutputHead,
    groups: Iterable[tuple[Tensor | None, Sequence[Term]]],
    *,
    weights_T: Tensor | None = None,
    normalizer: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
) -> ObjectiveOutput:
    """Compute `linear_objective` with different terms for different rows, for example one group of rows per teacher.

    groups: (rows, terms) of each group. The rows are int64, or None for all rows. No row is in two groups. The pass
    requests the next group only when it no longer needs the previous group's terms. All groups add to the same
    gradients. The other arguments are the same as in `linear_objective`.

    Raises ValueError if there is no group, and where `linear_objective` raises it.
    """
    if not isinstance(head, OutputHead):
        raise ValueError(
            f"head is of type {type(head).__name__}: expected OutputHead(lm_head.weight, lm_head.bias), or the head"
            " that a Decoder gives to an output processor"
        )
    leaves: Leaves = {"hidden_TD": hidden_TD, "head.weight_VD": head.weight_VD, "head.bias": head.bias}
    check_leaves(leaves)
    if hidden_TD.dim() != 2 or hidden_TD.shape[1] != head.weight_VD.shape[1]:
        raise ValueError(
            f"hidden_TD of shape {tuple(hidden_TD.shape)}: expected [tokens, {head.weight_VD.shape[1]}] for this head"
        )

    return _objective(partial(HeadLogits, hidden_TD, head), leaves, groups, weights_T, normalizer, chunk_tokens)


@_disable_dynamo
def logits_objective(
    logits_TV: Tensor,
    terms: Sequence[Term],
    *,
    shard: VocabShard | None = None,
    weights_T: Tensor | None = None,
    normalizer: float | Tensor = 1.0,
) -> ObjectiveOutput:
    """Compute a weighted sum of terms from logits [T, V]. The pass keeps a gradient [T, V] for backward, in
    the logits' dtype, or in float32 for float16 logits.

    shard: the columns of the vocabulary that the logits contain, or None for all columns. For the other arguments and
    the errors, see `linear_objective`.
    """
    leaves: Leaves = {"logits_TV": logits_TV}
    check_leaves(leaves)
    if logits_TV.dim() != 2:
        raise ValueError(f"logits_TV of shape {tuple(logits_TV.shape)}: expected [tokens, vocabulary]")
    if shard is not None:
        check_shard(shard, logits_TV.shape[1])
    return _objective(partial(TensorLogits, logits_TV, shard), leaves, [(None, terms)], weights_T, normalizer, None)


def _objective(
    provide: Callable[[Sequence[Term], list[Tensor | None] | None], LogitsProvider],
    leaves: Leaves,
    groups: Iterable[tuple[Tensor | None, Sequence[Term]]],
    weights_T: Tensor | None,
    normalizer: float | Tensor,
    chunk_tokens: int | None,
) -> ObjectiveOutput:
    """Run the pass over all groups, and connect the loss to autograd.

    provide: returns the provider of logits for given terms and gradients. The provider adds to the given gradients;
    if they are None, it makes new ones.
    """
    tokens = len(_first_leaf(leaves)[1])
    totals, gradients = None, None
    for index, terms in groups:
        _check_pass(leaves, terms, weights_T, normalizer, index, chunk_tokens)
        provider = provide(terms, gradients)
        gradients = provider.gradients
        if index is None and weights_T is not None and weights_T.device.type == "cpu":
            index = weights_T.nonzero()[:, 0]
        if index is not None and provider.device.type == "cuda" and index.device.type == "cpu":
            index = index.pin_memory().to(provider.device, non_blocking=True)
        elif index is not None:
            index = index.to(provider.device)
        with torch.no_grad(), torch.autocast(provider.device.type, enabled=False):
            group_totals = run_chunks(provider, terms, tokens, weights_T, index, chunk_tokens)
            totals = group_totals if totals is None else totals.plus(group_totals)
    if totals is None:
        raise ValueError("no group of rows: expected at least one group, which can have no rows")
    with torch.no_grad():
        if isinstance(normalizer, Tensor):
            factor = normalizer.to(provider.device, provider.dtype).reshape(()).reciprocal()
        else:
            factor = torch.full((), 1 / normalizer, dtype=provider.dtype, device=provider.device)
        loss = totals.loss.to(provider.dtype) * factor
    if provider.needs_gradient:
        loss = _Attach.apply(loss, factor, provider.gradients, provider.shard, *leaves.values())
    metrics = {key: value.to(provider.dtype) for key, value in totals.sums.items()}
    metrics[CHUNK_TOKENS] = torch.full_like(factor, totals.chunk_tokens)
    return ObjectiveOutput(loss, metrics, totals.per_token)


class _Attach(torch.autograd.Function):
    """Connects a loss to the gradients that the forward pass has already computed.

    Backward multiplies each gradient, in the dtype in which the provider keeps it, by the incoming gradient and by
    1 / normalizer, and then rounds it to the dtype of its leaf. So a loss scale is applied before a float16 gradient
    can underflow. With retain_graph=True, the gradients are kept, and a second backward gives the same result.
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
        if torch.is_grad_enabled():  # with create_graph=True, the graph would treat these gradients as constants
            raise RuntimeError("an objective has no second derivative: call backward without create_graph")
        (factor,) = ctx.saved_tensors  # torch refuses a second backward without retain_graph
        factor = factor * grad_loss
        gradients, dtypes = ctx.gradients, list(ctx.dtypes)
        # without retain_graph, multiply in place, because a copy would be as large as the weight
        in_place = not torch._C._autograd._get_current_graph_task_keep_graph()
        if in_place:
            ctx.gradients = []
        # the hidden states' gradient is summed over ranks; a gradient of logits is not: each rank has other columns
        is_summed = ctx.shard is not None and len(gradients) > 1
        if is_summed and gradients[0] is not None:
            dtypes[0] = gradients[0].dtype
        scaled: list[Tensor | None] = []
        for gradient, dtype in zip(gradients, dtypes, strict=True):
            if gradient is None:
                scaled.append(None)
            elif gradient.dtype == dtype:
                scaled.append(gradient.mul_(factor) if in_place else gradient * factor)
            else:  # the product is computed in the dtype of the gradient, and then rounded
                scaled.append(torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype)))
        if is_summed and scaled[0] is not None:
            scaled[0] = reduce_hidden_grad(scaled[0], ctx.shard).to(ctx.dtypes[0])
        return (None, None, None, None, *scaled)


def check_leaves(leaves: Leaves) -> None:
    """Require that all leaves are on one device and have no forward-mode tangent."""
    for name, tensor in leaves.items():
        if tensor is None:
            continue
        check_device(name, tensor, *_first_leaf(leaves))
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(
                f"{name} carries a forward-mode tangent (torch.func.jvp): expected none, since an objective's "
                "gradients are computed in reverse mode only; use torch.autograd.grad or backward"
            )


def check_device(name: str, tensor: Tensor, first: str, leaf: Tensor) -> None:
    """Require that the tensor has data and is on the device of `leaf`. first: the name of `leaf`."""
    _check_has_data(name, tensor)
    if tensor.device != leaf.device:
        raise ValueError(
            f"{name} is on {tensor.device}, {first} on {leaf.device}: expected both on one device; move the former "
            f"with .to({str(leaf.device)!r})"
        )


def _check_pass(
    leaves: Leaves,
    terms: Sequence[Term],
    weights_T: Tensor | None,
    normalizer: float | Tensor,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> None:
    """Raise ValueError for invalid arguments of `linear_objective`."""
    first, leaf = _first_leaf(leaves)
    require_terms(terms)
    if not terms:
        raise ValueError("no terms: expected at least one, such as CrossEntropy(labels) or Distill(signal, jsd(0.5))")
    tokens = len(leaf)
    for at, term in enumerate(terms):
        if term.tokens not in (None, tokens):
            raise ValueError(
                f"terms[{at}] ({term.name}) has {term.tokens} tokens, the student {tokens}; expected the same "
                "number, with one row per token"
            )
        for name, tensor in _tensors(f"terms[{at}]", term):
            check_device(name, tensor, first, leaf)
    weights = {"weights_T": weights_T} | {f"terms[{at}].weights_T": term.weights_T for at, term in enumerate(terms)}
    check_per_token(tokens, **weights)
    constants = weights | {"normalizer": normalizer if isinstance(normalizer, Tensor) else None}
    for name, constant in constants.items():
        if constant is None:
            continue
        _check_has_data(name, constant)
        if constant.requires_grad:
            raise ValueError(f"{name} requires grad: expected a constant; detach it")
        if name != "normalizer" and constant.device.type == "cpu" and not constant.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity: expected finite weights, 0 for rows that do not count")
    if valid_index is not None:
        _check_index(valid_index, tokens)
    is_on_device = isinstance(normalizer, Tensor) and normalizer.device.type != "cpu"
    if not is_on_device and not 0 < float(normalizer) < math.inf:
        raise ValueError(
            f"normalizer={normalizer}: expected a positive number, such as the number of valid tokens in the step"
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: expected 1 or more, or None for a number that fits in memory")


def _check_index(valid_index: Tensor, tokens: int) -> None:
    if valid_index.dim() != 1 or valid_index.dtype != torch.int64:
        raise ValueError(
            f"valid_index of shape {tuple(valid_index.shape)} and dtype {valid_index.dtype}: expected row numbers, "
            "one dim of int64 (for a mask, mask.nonzero()[:, 0])"
        )
    _check_has_data("valid_index", valid_index)
    if valid_index.device.type != "cpu" or not len(valid_index):
        return
    first, last = int(valid_index.min()), int(valid_index.max())
    if first < 0 or last >= tokens:
        raise ValueError(f"valid_index holds rows {first} to {last}: expected rows from 0 to {tokens - 1}")
    # a repeated row would count twice in the loss and the head's gradient, but once in the hidden states' gradient
    if repeated := len(valid_index) - len(valid_index.unique()):
        raise ValueError(f"valid_index repeats {repeated} of its {len(valid_index)} rows: expected each row once")


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a term, of its signals and of their heads, after its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        for at, element in enumerate(value):
            yield from _tensors(f"{name}[{at}]", element)


def _check_has_data(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name} is on the meta device, which holds no numbers: expected a tensor with its data (if the "
            "model was built on meta, load its weights before the first pass)"
        )


def _first_leaf(leaves: Leaves) -> tuple[str, Tensor]:
    name, tensor = next(iter(leaves.items()))
    assert tensor is not None
    return name, tensor
