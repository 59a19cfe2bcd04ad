"""Output processors, which compute objectives from hidden states and a head, for any model that calls them.

    decoder(input_ids, processor=selected_log_probs(), context=Targets(labels))

A processor is created for one optimizer step. Its context has the tensors of one micro-batch: the token to predict at
each row, and the data for this token's loss. No processor computes the logits of all tokens at once. A processor
gives the same result for a vocabulary shard as for the full head. The processor of runs is in `engine/loss.py`.

At depth 0, row t predicts labels_T[t]. At depth k of multi-token prediction, row t predicts the k-th token after that
token. Only `shift_for_mtp` shifts targets for multi-token prediction.

B rows of S tokens each, T = B·S tokens in the rows' order, D width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stillhouse.models.lm_head import OutputProcessor
from stillhouse.objective import (
    CrossEntropy,
    Entropy,
    FullVocab,
    ObjectiveOutput,
    OutputHead,
    PolicyGradient,
    Signal,
    Signals,
    Term,
    detached,
    linear_log_probs,
    linear_objective,
)


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens to predict, and their weights.

    labels_T: a tensor of any shape, in the rows' order; a negative value means that the row has no label.
    weights_T: a tensor of the same shape; by default 1 if there is a label, else 0.
    valid_index: the numbers of the rows with a non-zero weight, if the caller knows them (see `linear_objective`).
    mtp_targets: the targets of depths 1, 2, … (see `shift_for_mtp`).
    """

    labels_T: Tensor
    weights_T: Tensor | None = None
    valid_index: Tensor | None = None
    mtp_targets: tuple[Self, ...] = ()

    _per_token: ClassVar[tuple[str, ...]] = ("labels_T", "weights_T")

    def __post_init__(self) -> None:
        if self.weights_T is None:
            object.__setattr__(self, "weights_T", (self.labels_T >= 0).float())
        for name in self._per_token:
            flat = _mapped(lambda value: value.flatten() if isinstance(value, Tensor) else value, getattr(self, name))
            object.__setattr__(self, name, flat)

    def at(self, depth: int) -> Self:
        """Return the targets of a depth. Raises ValueError for a depth that `mtp_targets` does not have."""
        if depth > len(self.mtp_targets):
            raise ValueError(
                f"depth {depth} of multi-token prediction is missing in targets with {len(self.mtp_targets)} MTP "
                f"depths: expected targets.shift_for_mtp(position_ids, {depth})"
            )
        return self.mtp_targets[depth - 1] if depth else self

    def shift_for_mtp(self, position_ids_BS: Tensor, depths: int) -> Self:
        """Return these targets with `mtp_targets` for depths 1 to `depths`.

        At depth k, row t gets the values of row t + k if that row is in the same document, otherwise no label and
        weight 0. Call this before context parallelism divides the rows, and select each context shard from the result
        with `rows`. position_ids_BS: positions that restart at each document; [1, S] if they are equal in all rows.
        """
        tokens, shape_BS = len(self.labels_T), tuple(position_ids_BS.shape)
        columns = shape_BS[1]
        rows, rest = divmod(tokens, columns)
        if rest or shape_BS[0] not in (1, rows):
            raise ValueError(f"position_ids of shape {shape_BS} for {tokens} labels: expected [B, S] with B·S labels")
        document_BS = (position_ids_BS.expand(rows, -1) == 0).cumsum(1)
        column_S = torch.arange(columns, device=position_ids_BS.device)
        start_B1 = torch.arange(rows, device=position_ids_BS.device)[:, None] * columns
        without_depths, mtp_targets = replace(self, mtp_targets=()), []
        for depth in range(1, depths + 1):
            later_S = (column_S + depth).clamp(max=columns - 1)
            exists_T = ((document_BS[:, later_S] == document_BS) & (column_S + depth < columns)).flatten()
            taken = without_depths.rows((start_B1 + later_S).flatten())
            assert taken.weights_T is not None
            labels_T = taken.labels_T.masked_fill(~exists_T, -1)
            mtp_targets.append(replace(taken, labels_T=labels_T, weights_T=taken.weights_T.masked_fill(~exists_T, 0)))
        return replace(self, mtp_targets=tuple(mtp_targets))

    def rows(self, index_T: Tensor) -> Self:
        """Return the targets of the rows with these numbers, such as the rows of a context shard, at every depth."""
        taken = self._changed(lambda value: value.rows(index_T) if isinstance(value, Signal) else value[index_T])
        return replace(taken, mtp_targets=tuple(targets.rows(index_T) for targets in self.mtp_targets))

    def extended(self, extend: Callable[[Tensor], Tensor], shape_BS: tuple[int, int]) -> Self:
        """Return these targets with more columns. extend: appends columns to a tensor [B, S, …]. shape_BS: (B, S)."""

        def extended_value(value: Any) -> Any:
            if isinstance(value, Tensor):
                return extend(value.unflatten(0, shape_BS)).flatten(0, 1)
            if isinstance(value, Signal) and is_dataclass(value):
                values = {entry.name: getattr(value, entry.name) for entry in fields(value)}
                per_token = {name: entry for name, entry in values.items() if isinstance(entry, Tensor | Mapping)}
                return replace(value, **_mapped(extended_value, per_token))
            raise ValueError(f"{type(value).__name__} cannot be extended: expected a signal with tensors of all rows")

        return self._changed(extended_value)

    def _changed(self, change: Callable[[Any], Any]) -> Self:
        """Return these targets with `change` applied to all values per token, without `mtp_targets`."""
        values = {name: value for name in self._per_token if (value := getattr(self, name)) is not None}
        changed: dict[str, Any] = _mapped(change, values)
        return replace(self, **changed, valid_index=None, mtp_targets=())


@dataclass(frozen=True, eq=False)
class DistillTargets(Targets):
    """Targets, and the teachers' signals for the same rows.

    signals: the signals by the teachers' names; empty if no term needs a teacher. A `RoutedSignal` cannot be cut into
        rows or shifted for multi-token prediction.
    per_token: other tensors about the tokens to predict, in the labels' shape, by the names in `metrics.py`.
    document_T: the number of each row's document, for a discount. The rows of a document are contiguous.
    position_ids_BS: the positions at depth 0, for `shift_for_mtp`.
    """

    signals: Signals = field(default_factory=dict)
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    document_T: Tensor | None = None
    position_ids_BS: Tensor | None = None

    _per_token = (*Targets._per_token, "signals", "per_token", "document_T")


@dataclass(frozen=True, eq=False)
class PolicyTargets(Targets):
    """Tokens that a policy sampled, with the advantages and log-probabilities for `PolicyGradient`."""

    advantages_T: Tensor | None = None
    old_log_probs_T: Tensor | None = None
    reference_log_probs_T: Tensor | None = None

    _per_token = (*Targets._per_token, "advantages_T", "old_log_probs_T", "reference_log_probs_T")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("advantages_T", "old_log_probs_T"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing: expected a number for each of {len(self.labels_T)} tokens")


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return `change(value)`. If `value` is a mapping, apply `change` to each of its values instead."""
    if isinstance(value, Mapping):
        return {name: _mapped(change, entry) for name, entry in value.items()}
    return change(value)


@dataclass(frozen=True, eq=False)
class LogProbs:
    """The log-probability of each row's label (0 without a label) and the entropy of each row's distribution in nats.

    The two tensors are differentiable, and their dtype is at least float32. The class is not a tuple, because
    wrappers of models may convert the tensors in tuples.
    """

    log_probs_BS: Tensor
    entropy_BS: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.log_probs_BS, self.entropy_BS))


def hidden_states(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Tensor:
    """Return the hidden states [B, S, D] after the final norm, for serving and for teachers with a separate head."""
    return replicated_hidden(hidden_states, head)


def replicated_hidden(hidden_states: Tensor, head: OutputHead) -> Tensor:
    """Return hidden states for a computation that all ranks of a sharded vocabulary repeat, such as a value head.

    With sequence parallelism (`VocabShard.reduce_hidden_grad` False), the backward of the gather sums the gradients
    of these ranks. After a repeated computation, every rank already has the full gradient, so a hook divides it by
    the number of ranks.
    """
    shard = head.shard
    if shard is None or shard.is_alone or shard.reduce_hidden_grad:
        return hidden_states
    assert shard.group is not None
    ranks, part = shard.group.size(), hidden_states.view_as(hidden_states)
    if part.requires_grad:
        part.register_hook(lambda gradient: gradient / ranks)
    return part


def full_vocab(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> FullVocab:
    """Return the exact teacher signal, without gradients."""
    # keep the same tensor for a frozen weight, because `vocab.rows_of` exchanges rows between ranks once per tensor
    return FullVocab(hidden_states.detach().flatten(0, -2), detached(head))


def selected_log_probs(*, temperature: float = 1.0) -> OutputProcessor:
    """Return a processor that gives `LogProbs` [B, S] of the context's labels (`Targets`) and ignores the weights."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0) -> LogProbs:
        hidden_TD, labels_T = hidden_states.flatten(0, -2), context.at(depth).labels_T
        outputs = linear_log_probs(hidden_TD, head, labels_T, temperature=temperature)
        return LogProbs(*(values_T.view(hidden_states.shape[:-1]) for values_T in outputs))

    return process


def cross_entropy(
    *, label_smoothing: float = 0.0, z_loss: float = 0.0, normalizer: float | Tensor = 1.0
) -> OutputProcessor:
    """Return a processor that gives the `ObjectiveOutput` of cross-entropy with the context's labels (`Targets`).

    normalizer: the divisor of the sum over tokens; in training, the number of tokens with a non-zero weight in the
        whole step, over all processes.
    """

    def process(*, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0) -> ObjectiveOutput:
        targets = context.at(depth)
        terms = [CrossEntropy(targets.labels_T, 1.0, label_smoothing, z_loss)]
        return _objective(hidden_states, head, terms, targets, normalizer)

    return process


def policy_gradient(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_scale: float = 0.0,
    entropy_bonus: float = 0.0,
    temperature: float = 1.0,
    normalizer: float | Tensor = 1.0,
) -> OutputProcessor:
    """Return a processor for the clipped surrogate of PPO and GRPO (`PolicyGradient`), with `PolicyTargets`. It gives
    an `ObjectiveOutput`, whose loss includes −entropy_bonus · entropy. normalizer: see `cross_entropy`.
    """

    def process(
        *, hidden_states: Tensor, head: OutputHead, context: PolicyTargets, depth: int = 0
    ) -> ObjectiveOutput:
        if depth:
            raise ValueError(
                f"a policy gradient at depth {depth} of multi-token prediction: expected depth 0, from whose logits "
                "tokens are sampled; by_depth(policy_gradient(…), cross_entropy()) trains MTP depths"
            )
        assert context.advantages_T is not None
        assert context.old_log_probs_T is not None
        sampled = (context.labels_T, context.advantages_T, context.old_log_probs_T, context.reference_log_probs_T)
        policy = PolicyGradient(*sampled, clip_low, clip_high, kl_scale, temperature=temperature)
        terms = [policy, Entropy(-entropy_bonus, temperature)] if entropy_bonus else [policy]
        return _objective(hidden_states, head, terms, context, normalizer)

    return process


def _objective(
    hidden_states: Tensor, head: OutputHead, terms: Sequence[Term], targets: Targets, normalizer: float | Tensor
) -> ObjectiveOutput:
    return linear_objective(
        hidden_states.flatten(0, -2),
        head,
        terms,
        weights_T=targets.weights_T,
        normalizer=normalizer,
        valid_index=targets.valid_index,
    )


def by_depth(main: OutputProcessor, mtp_targets: OutputProcessor) -> OutputProcessor:
    """Return a processor that calls the processor `main` at depth 0 and the processor `mtp_targets` at MTP depths."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Any:
        chosen = mtp_targets if depth else main
        return chosen(hidden_states=hidden_states, head=head, context=context, depth=depth)

    return process
