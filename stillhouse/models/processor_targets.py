"""The contexts of output processors: the token to predict at each row of a micro-batch, and the data for its loss.

At depth 0, row t predicts labels_T[t]. At depth k of multi-token prediction, row t predicts the k-th token after that
token. Only `shift_for_mtp` shifts targets for multi-token prediction.

B rows of S tokens each, T = B·S tokens in the rows' order.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stillhouse.objective import Signal, Signals


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens to predict, and their weights.

    labels_T: of any shape, in the rows' order; a negative label means that there is no label.
    weights_T: of the same shape; None: 1 where there is a label, else 0.
    valid_index: the rows with a non-zero weight, if the caller knows them (see `linear_objective`).
    mtp_targets: the targets of depths 1, 2, … of multi-token prediction (see `shift_for_mtp`).
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
                f"depth {depth} of multi-token prediction with targets of {len(self.mtp_targets)} further depths: "
                f"expected targets.shift_for_mtp(position_ids, {depth})"
            )
        return self.mtp_targets[depth - 1] if depth else self

    def shift_for_mtp(self, position_ids_BS: Tensor, depths: int) -> Self:
        """Return these targets with `mtp_targets` for depths 1 to `depths`.

        At depth k, row t gets the values of row t + k if that row is in the same document, otherwise no label and
        weight 0. Call it on complete rows, and select context shards from the result with `rows`. position_ids_BS:
        [B, S], restarting at each document; [1, S] if all rows have the same positions.
        """
        tokens, shape_BS = len(self.labels_T), tuple(position_ids_BS.shape)
        rows, rest = divmod(tokens, shape_BS[1])
        if rest or shape_BS[0] not in (1, rows):
            raise ValueError(f"position_ids of shape {shape_BS} for {tokens} labels: expected [B, S], all rows whole")
        mtp_targets = []
        for index_T, exists_T in _shifted_rows(position_ids_BS.expand(rows, -1), depths):
            taken = self._taken(index_T)
            assert taken.weights_T is not None
            labels_T = taken.labels_T.masked_fill(~exists_T, -1)
            mtp_targets.append(replace(taken, labels_T=labels_T, weights_T=taken.weights_T.masked_fill(~exists_T, 0)))
        return replace(self, mtp_targets=tuple(mtp_targets))

    def rows(self, index_T: Tensor) -> Self:
        """Return the targets of the given rows at every depth, for a context shard."""
        mtp_targets = tuple(targets._taken(index_T) for targets in self.mtp_targets)
        return replace(self._taken(index_T), mtp_targets=mtp_targets)

    def extended(self, extend: Callable[[Tensor], Tensor], shape_BS: tuple[int, int]) -> Self:
        """Return these targets, of shape shape_BS, with the columns that `extend` appends to a tensor [B, S, …]."""

        def extended_value(value: Any) -> Any:
            if isinstance(value, Tensor):
                return extend(value.unflatten(0, shape_BS)).flatten(0, 1)
            if isinstance(value, Signal) and is_dataclass(value):
                values = {entry.name: getattr(value, entry.name) for entry in fields(value)}
                per_token = {name: entry for name, entry in values.items() if isinstance(entry, Tensor | Mapping)}
                return replace(value, **_mapped(extended_value, per_token))
            raise ValueError(f"{type(value).__name__} cannot be extended: expected a signal of all rows")

        return self._changed(extended_value)

    def _taken(self, index_T: Tensor) -> Self:
        return self._changed(lambda value: value.rows(index_T) if isinstance(value, Signal) else value[index_T])

    def _changed(self, change: Callable[[Any], Any]) -> Self:
        """Return these targets with `change` applied to all values per token, without `mtp_targets`."""
        values = {name: value for name in self._per_token if (value := getattr(self, name)) is not None}
        changed: dict[str, Any] = _mapped(change, values)
        return replace(self, **changed, valid_index=None, mtp_targets=())


@dataclass(frozen=True, eq=False)
class DistillTargets(Targets):
    """Targets, and the teachers' signals for the same rows.

    signals: by the teachers' names; empty if no term needs a teacher. A `RoutedSignal` cannot be cut into rows, nor
        shifted for multi-token prediction.
    per_token: other tensors about the tokens to predict, of the labels' shape, named as in `metrics.py`.
    document_T: the document of each row, of the labels' shape, for a discount; documents follow one another.
    position_ids_BS: the position ids of depth 0, for `shift_for_mtp`.
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
    """Return `change(value)`; for a mapping, a dict with `change` applied to each value."""
    if isinstance(value, Mapping):
        return {name: _mapped(change, entry) for name, entry in value.items()}
    return change(value)


def _shifted_rows(position_ids_BS: Tensor, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two tensors [T] for each depth k ≥ 1: the row k tokens later, and whether it is in the same document."""
    rows, tokens = position_ids_BS.shape
    document_BS = (position_ids_BS == 0).cumsum(1)
    column_S = torch.arange(tokens, device=position_ids_BS.device)
    starts_B1 = torch.arange(rows, device=position_ids_BS.device)[:, None] * tokens
    for depth in range(1, depths + 1):
        later_S = (column_S + depth).clamp(max=tokens - 1)
        same_BS = (document_BS[:, later_S] == document_BS) & (column_S + depth < tokens)
        yield (starts_B1 + later_S).flatten(), same_BS.flatten()
