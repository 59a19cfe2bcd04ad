"""The terms of a pass without their tensors, so that a function that is compiled for one micro-batch fits the next.

T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stillhouse.objective.row_temperatures import RowTemperatures
from stillhouse.objective.signals import Signal
from stillhouse.objective.terms import Term
from stillhouse.objective.tile.logits_provider import LogitsProvider
from stillhouse.objective.tile.tile_plan import TilePlan


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in the list of tensors. shape: of one row."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Object:
    """A term, a signal or temperatures. number: the same object has the same number wherever it is used."""

    number: int
    kind: type
    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class TermLayout:
    """What the code of a pass's terms depends on, without tensors. Equal layouts compute the same of their tensors.

    tensors, tiles: the number of the terms' tensors, and of tiles.
    first: the first id of the vocabulary on this rank. dtype: of the logits. rounded: of the gradient of the logits.
    keys: of the sums that `chunks.finish_rows` returns, which it sets.
    """

    terms: tuple[_Object, ...]
    tensors: int
    tiles: int
    scale: float
    softcap: float | None
    vocabulary: int
    first: int
    needs_gradient: bool
    dtype: torch.dtype
    rounded: torch.dtype
    keys: list[str] = field(default_factory=list, compare=False)

    def build(self, tensors: Sequence[Tensor]) -> list[Term]:
        """Return the terms with these tensors."""
        built: dict[int, Any] = {}
        return [_with_tensors(term, tensors, built) for term in self.terms]


#: the first of all equal layouts, for which functions were compiled
_LAYOUTS: dict[TermLayout, TermLayout] = {}


def term_layout(terms: Sequence[Term], plan: TilePlan, provider: LogitsProvider) -> tuple[TermLayout, list[Tensor]]:
    """Return the layout of the terms and their tensors, which have one row per token."""
    numbers: dict[int, int] = {}
    slots: dict[Tensor, int] = {}  # a tensor as a key is compared by identity
    buffer_0V = provider.rounded_buffer(0)
    layout = TermLayout(
        tuple(_described(term, plan, numbers, slots) for term in terms),
        len(slots),
        plan.pointwise.tiles,
        provider.scale,
        provider.softcap,
        provider.vocabulary,
        provider.start,
        provider.needs_gradient,
        provider.dtype,
        provider.dtype if buffer_0V is None else buffer_0V.dtype,
    )
    return _LAYOUTS.setdefault(layout, layout), list(slots)


# functions that call themselves are not within others, where they would hold tensors until the garbage collector runs
def _with_tensors(entry: Any, tensors: Sequence[Tensor], built: dict[int, Any]) -> Any:
    """Return an entry of a layout with its tensors. built: the objects by number."""
    if isinstance(entry, _Slot):
        return tensors[entry.number]
    if isinstance(entry, tuple):
        return tuple(_with_tensors(member, tensors, built) for member in entry)
    if not isinstance(entry, _Object):
        return entry
    if entry.number not in built:
        # the checks of __post_init__ were made for the whole pass
        made: Any = object.__new__(entry.kind)
        built[entry.number] = made
        for name, value in entry.fields:
            object.__setattr__(made, name, _with_tensors(value, tensors, built))
    return built[entry.number]


def _described(value: Any, plan: TilePlan, numbers: dict[int, int], slots: dict[Tensor, int]) -> Any:
    if isinstance(value, Tensor):
        return _Slot(slots.setdefault(value, len(slots)), tuple(value.shape[1:]), value.dtype)
    if isinstance(value, tuple):
        return tuple(_described(member, plan, numbers, slots) for member in value)
    if not isinstance(value, Term | Signal | RowTemperatures):
        return value
    number = numbers.setdefault(id(value), len(numbers))
    if isinstance(value, Signal) and value in plan.signals:  # terms read a dense signal's tile, and not its tensors
        return _Object(number, Signal, ())
    entries = [(name, _described(entry, plan, numbers, slots)) for name, entry in vars(value).items()]
    return _Object(number, type(value), tuple(entries))


def requested_plan(terms: Sequence[Term], scale: float, softcap: float | None) -> TilePlan:
    """Return the plan of all quantities that the terms request."""
    plan = TilePlan(scale, softcap)
    for term in terms:
        term.request(plan)
    plan.close()
    return plan
