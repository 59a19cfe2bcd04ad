"""Output processors: they compute objectives from hidden states and a head, for any model that calls them.

    decoder(input_ids, processor=selected_log_probs(), context=Targets(labels))
    model(…, output_processor=MegatronProcessor(model, cross_entropy()), output_processor_context=Targets(labels))

A processor is created once, with everything that is the same for all batches; its context holds the tensors of one
micro-batch. No processor computes the logits of all tokens at once. Every processor gives the same result over a
vocabulary shard as over the whole head.

Row t of depth 0 predicts labels_T[t]. Depth k of multi-token prediction has the same rows and predicts the k-th token
after that one. Only `shift_for_mtp` shifts targets for multi-token prediction.

B rows of S tokens each, T = B·S tokens in the rows' order, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stillhouse.models.head import OutputProcessor
from stillhouse.objective import (
    CrossEntropy,
    Entropy,
    FullVocab,
    ObjectiveOutput,
    OutputHead,
    PolicyGradient,
    Signal,
    Term,
    linear_log_probs,
    linear_objective,
)
from stillhouse.objective.spec import ObjectiveSpec


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens to predict, and their weights.

    labels_T: of any shape, in the rows' order; a negative label means that there is no label. weights_T: of the same
    shape; None: 1 where there is a label, else 0. normalizer: divides the sum over tokens; the optimizer step's
    global count of tokens with a non-zero weight. valid_index: the rows with a non-zero weight, if the caller knows
    them (see `linear_objective`). mtp_targets: the targets of depths 1, 2, … of multi-token prediction (see
    `shift_for_mtp`).
    """

    labels_T: Tensor
    weights_T: Tensor | None = None
    normalizer: float | Tensor = 1.0
    valid_index: Tensor | None = None
    mtp_targets: tuple[Self, ...] = ()

    _per_token: ClassVar[tuple[str, ...]] = ("labels_T", "weights_T")

    def __post_init__(self) -> None:
        if self.weights_T is None:
            object.__setattr__(self, "weights_T", (self.labels_T >= 0).float())
        for name in self._per_token:
            if isinstance(given := getattr(self, name), Tensor):
                object.__setattr__(self, name, given.flatten())

    def at(self, depth: int) -> Self:
        """Return the targets of a depth. Raises ValueError for a depth that `mtp_targets` does not have."""
        if depth > len(self.mtp_targets):
            raise ValueError(
                f"depth {depth} of multi-token prediction with targets of {len(self.mtp_targets)} further depths: "
                f"expected targets.shift_for_mtp(position_ids, {depth})"
            )
        return self.mtp_targets[depth - 1] if depth else self

    def shift_for_mtp(self, position_ids_BS: Tensor, depths: int) -> Self:
        """Return these targets with `mtp_targets` for `depths` further depths.

        At depth k, row t gets the values of row t + k if that row is in the same document, otherwise no label and
        weight 0. Call it on whole rows, and cut context shards from the result with `rows`.

        position_ids_BS: [B, S], restarting at each document; [1, S] if all rows have the same positions.
        """
        tokens, shape_BS = len(self.labels_T), tuple(position_ids_BS.shape)
        rows, rest = divmod(tokens, shape_BS[1])
        if rest or shape_BS[0] not in (1, rows):
            raise ValueError(f"position_ids of shape {shape_BS} for {tokens} labels: expected [B, S], all rows whole")
        positions_BS = position_ids_BS.expand(rows, -1)
        return replace(self, mtp_targets=tuple(self._moved(*each) for each in _shifted_rows(positions_BS, depths)))

    def rows(self, index_T: Tensor) -> Self:
        """Return the targets of the given rows at every depth, for a context shard."""
        return replace(self._taken(index_T), mtp_targets=tuple(each._taken(index_T) for each in self.mtp_targets))

    def _moved(self, index_T: Tensor, exists_T: Tensor) -> Self:
        taken = self._taken(index_T)
        assert taken.weights_T is not None
        labels_T = taken.labels_T.masked_fill(~exists_T, -1)
        return replace(
            taken, labels_T=labels_T, weights_T=taken.weights_T.masked_fill(~exists_T, 0.0), mtp_targets=()
        )

    def _taken(self, index_T: Tensor) -> Self:
        taken: dict[str, Any] = {
            name: each.rows(index_T) if isinstance(each, Signal) else each[index_T]
            for name in self._per_token
            if (each := getattr(self, name)) is not None
        }
        return replace(self, **taken, valid_index=None, mtp_targets=())


@dataclass(frozen=True, eq=False)
class DistillTargets(Targets):
    """Targets, and the teacher's signal for the same rows; None if no term needs a teacher."""

    signal: Signal | None = None

    _per_token = (*Targets._per_token, "signal")


@dataclass(frozen=True, eq=False)
class PolicyTargets(Targets):
    """Tokens that a policy sampled, with the advantages and log-probabilities that `PolicyGradient` takes."""

    advantages_T: Tensor | None = None
    old_log_probs_T: Tensor | None = None
    reference_log_probs_T: Tensor | None = None

    _per_token = (*Targets._per_token, "advantages_T", "old_log_probs_T", "reference_log_probs_T")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("advantages_T", "old_log_probs_T"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing: expected a number for each of {len(self.labels_T)} tokens")


@dataclass(frozen=True, eq=False)
class LogProbs:
    """The log-probability of each row's label (0 without a label) and the entropy of each row's distribution in nats.

    Both are differentiable and at least float32.
    """

    log_probs_BS: Tensor
    entropy_BS: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.log_probs_BS, self.entropy_BS))


@dataclass(frozen=True)
class Objective:
    """The processor of a weighted sum of terms. `terms` makes the terms from a micro-batch's context."""

    terms: Callable[[Any], Sequence[Term]]
    chunk_tokens: int | None = None

    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0
    ) -> ObjectiveOutput:
        here = context.at(depth)
        return linear_objective(
            hidden_states.flatten(0, -2),
            head,
            self.terms(here),
            weights_T=here.weights_T,
            valid_index=here.valid_index,
            normalizer=here.normalizer,
            chunk_tokens=self.chunk_tokens,
        )


def hidden_states(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Tensor:
    """Return the hidden states [B, S, D] after the last norm: for serving, and for teachers with a separate head."""
    return replicated_hidden(hidden_states, head)


def replicated_hidden(hidden_states: Tensor, head: OutputHead) -> Tensor:
    """Return hidden states for a computation that all ranks of a vocabulary shard repeat, such as a value head.

    With sequence parallelism, the layer below sums the gradient over these ranks, since each rank's vocabulary rows
    contribute only a part of it (`VocabShard.reduce_hidden_grad`). A repeated computation gives every rank the whole
    gradient, so backward divides it by the number of ranks.
    """
    shard = head.shard
    if shard is None or shard.is_alone or shard.reduce_hidden_grad:
        return hidden_states
    assert shard.group is not None
    return _PartOfGradient.apply(hidden_states, shard.group.size())


def full_vocab(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> FullVocab:
    """Return the exact teacher signal, without gradients."""
    # a frozen weight stays the same tensor: `vocab.rows_of` exchanges rows between ranks once per tensor
    if head.weight_VD.requires_grad:
        head = replace(
            head, weight_VD=head.weight_VD.detach(), bias=None if head.bias is None else head.bias.detach()
        )
    return FullVocab(hidden_states.detach().flatten(0, -2), head)


def selected_log_probs(*, temperature: float = 1.0) -> OutputProcessor:
    """Return a processor that gives `LogProbs` [B, S] of the context's labels (`Targets`) and ignores the weights."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0) -> LogProbs:
        hidden_TD, labels_T = hidden_states.flatten(0, -2), context.at(depth).labels_T
        made = linear_log_probs(hidden_TD, head, labels_T, temperature=temperature)
        return LogProbs(*(each_T.view(hidden_states.shape[:-1]) for each_T in made))

    return process


def cross_entropy(*, label_smoothing: float = 0.0, z_loss: float = 0.0) -> OutputProcessor:
    """Return a processor that gives the `ObjectiveOutput` of cross-entropy with the context's labels (`Targets`)."""
    return Objective(lambda context: [CrossEntropy(context.labels_T, 1.0, label_smoothing, z_loss)])


def distillation(spec: ObjectiveSpec, *, chunk_tokens: int | None = None) -> OutputProcessor:
    """Return a processor that gives the `ObjectiveOutput` of a spec; its context is `DistillTargets`.

    spec: for example `parse_objective("0.3*cross_entropy + 0.7*jsd(0.5)")`.
    """

    def terms(context: DistillTargets) -> list[Term]:
        if spec.needs_teacher and context.signal is None:
            raise ValueError(f"signal is missing: expected what a teacher says of {len(context.labels_T)} tokens")
        return spec.terms(context.labels_T, context.signal)

    return Objective(terms, chunk_tokens)


def policy_gradient(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_scale: float = 0.0,
    entropy_bonus: float = 0.0,
    temperature: float = 1.0,
) -> OutputProcessor:
    """Return a processor for the clipped surrogate of PPO and GRPO (`PolicyGradient`).

    It gives an `ObjectiveOutput`; its context is `PolicyTargets`. entropy_bonus: the loss is reduced by entropy_bonus
    times the entropy.
    """

    def terms(context: PolicyTargets) -> Iterator[Term]:
        assert context.advantages_T is not None
        assert context.old_log_probs_T is not None
        yield PolicyGradient(
            context.labels_T,
            context.advantages_T,
            context.old_log_probs_T,
            context.reference_log_probs_T,
            clip_low,
            clip_high,
            kl_scale,
            temperature=temperature,
        )
        if entropy_bonus:
            yield Entropy(-entropy_bonus, temperature)

    objective = Objective(lambda context: list(terms(context)))

    def process(
        *, hidden_states: Tensor, head: OutputHead, context: PolicyTargets, depth: int = 0
    ) -> ObjectiveOutput:
        if depth:
            raise ValueError(
                f"a policy gradient at depth {depth}: expected 0, the head that tokens are drawn from; "
                "by_depth(policy_gradient(…), cross_entropy()) has another objective for the others"
            )
        return objective(hidden_states=hidden_states, head=head, context=context)

    return process


def by_depth(main: OutputProcessor, mtp_targets: OutputProcessor) -> OutputProcessor:
    """Return a processor that calls `main` at depth 0 and `mtp_targets` at further depths, with the same context."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Any:
        chosen = mtp_targets if depth else main
        return chosen(hidden_states=hidden_states, head=head, context=context, depth=depth)

    return process


class _PartOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.parts, None


def _shifted_rows(position_ids_BS: Tensor, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth k ≥ 1 the index of the row k tokens later, and whether it is in the same document; [T]."""
    rows, tokens = position_ids_BS.shape
    document_BS = (position_ids_BS == 0).cumsum(1)
    place_S = torch.arange(tokens, device=position_ids_BS.device)
    starts_B1 = torch.arange(rows, device=position_ids_BS.device)[:, None] * tokens
    for depth in range(1, depths + 1):
        further_S = (place_S + depth).clamp(max=tokens - 1)
        same_BS = (document_BS[:, further_S] == document_BS) & (place_S + depth < tokens)
        yield (starts_B1 + further_S).flatten(), same_BS.flatten()
