"""The loop over the chunks of a pass, and the work on a chunk's rows between its kernels and collectives.

On a GPU, the statistics, terms and sums of a chunk would be hundreds of small kernels, so they run as two compiled
functions, `row_masks` and `finish_rows`. To compile them, the terms' own Python code runs once, on symbolic tensors
and on terms that are rebuilt from a `TermLayout`, which describes the terms of a pass without their tensors.
Micro-batches with equal layouts use the same compiled functions.

C rows of a chunk of T tokens, K sums, N terms, R ranks, X numbers of a row.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stillhouse.objective.head import ALIGNED
from stillhouse.objective.metrics import Totals
from stillhouse.objective.row_temperatures import RowTemperatures
from stillhouse.objective.signals import RowIndex, Signal
from stillhouse.objective.terms import Term
from stillhouse.objective.tile.compiled import ROW_DEVICES, traced
from stillhouse.objective.tile.logits_provider import LogitsProvider
from stillhouse.objective.tile.tile import Tile
from stillhouse.objective.tile.tile_plan import TilePlan
from stillhouse.objective.vocab import VocabShard

#: memory budget of one tile of logits, in bytes; a tile is float32, or float64 for float64 inputs. A pass keeps one
#: tile for the student and one for each dense teacher, and twice as many with vocabulary shards (for two chunks).
#: Mixtures of teachers need at least one tile more (`LogitsProvider._mixture_logits`)
TILE_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
#: minimum and maximum rows of a tile. The minimum overrides `TILE_BYTES`: with fewer rows, matrix products are slow
#: and, on a GPU, adding to the weight's gradient is bandwidth-bound. More rows than the maximum gain nothing
TILE_ROWS = {"cpu": (64, 512), "cuda": (1024, 4096)}


def chunks(tokens: int, valid_index: Tensor | None, size: int) -> Iterator[RowIndex]:
    """Yield the rows of each chunk. Without rows, yield one empty chunk, so that all metrics exist."""
    if valid_index is not None:
        yield from valid_index.split(size)
    else:
        yield from (slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size))


def tile_rows(provider: LogitsProvider, tokens: int) -> int:
    """Return the number of rows of a tile. It fits the memory budget and gives chunks of about equal size."""
    device = provider.device.type if provider.device.type in TILE_BYTES else "cpu"
    fewest, most = TILE_ROWS[device]
    # with vocabulary shards, every rank must get the same number of rows
    columns = provider.vocabulary if provider.shard is None else provider.shard.most_rows
    rows = min(most, max(fewest, TILE_BYTES[device] // (columns * provider.dtype.itemsize)))
    if not tokens:
        return rows
    # compiled functions copy inputs whose address is not a multiple of 16 bytes, so chunks begin at such addresses
    unit = 1 if device == "cpu" else ALIGNED
    return math.ceil(tokens / math.ceil(tokens / (rows // unit * unit)) / unit) * unit


def run_chunks(
    provider: LogitsProvider,
    terms: Sequence[Term],
    tokens: int,
    weights_T: Tensor | None,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> Totals:
    """Add the gradient of the terms' loss to the provider's gradients, and return the totals of the pass.

    tokens: T.
    valid_index: the rows to compute, or None for all rows.

    For the other arguments, see `linear_objective`.
    """
    totals = Totals(terms, tokens, provider.dtype, provider.device)
    one = torch.ones(1, dtype=provider.dtype, device=provider.device)
    weights_T = one.expand(tokens) if weights_T is None else weights_T.to(provider.device, provider.dtype)
    plan = requested_plan(terms, provider.scale, provider.softcap)
    work = None
    # a term of another package can contain code that cannot be compiled
    packages = {type(term).__module__.partition(".")[0] for term in terms}
    if provider.device.type in ROW_DEVICES and packages <= {__name__.partition(".")[0]}:
        work = ChunkWork(terms, plan, provider, weights_T, valid_index)
    size = chunk_tokens or tile_rows(provider, tokens if valid_index is None else len(valid_index))
    # over several ranks, the next chunk's products run while the collective of this chunk is under way
    in_flight = 0 if provider.shard is None or provider.shard.is_alone else 1
    started: deque[Tile] = deque()
    for number, rows in enumerate(chunks(tokens, valid_index, size)):
        taken: dict[Tensor, Tensor] = {}
        if work is None:
            weights_C = weights_T[rows]
            seen_C, counted_C = masks(terms, rows, weights_C)
        else:
            weights_C, taken, seen_C, counted_C = work.start(slice(number * size, (number + 1) * size))
        tiles_CV = provider.tiles(rows, seen_C, plan.signals, number % (in_flight + 1))
        options = provider.vocabulary, provider.shard, provider.needs_gradient
        tile = Tile(plan, rows, weights_C, counted_C, tiles_CV, *options, taken)
        for term in terms:
            term.check(tile)
        tile.start()
        started.append(tile)
        if len(started) > in_flight:
            _finish(provider, terms, started.popleft(), totals, work)
    while started:
        _finish(provider, terms, started.popleft(), totals, work)
    if work is not None:
        work.add_to(totals)
    return totals


def _finish(
    provider: LogitsProvider, terms: Sequence[Term], tile: Tile, totals: Totals, work: "ChunkWork | None"
) -> None:
    """Wait for the collective of a chunk, and add the chunk to the totals and gradients."""
    totals.chunk_tokens = max(totals.chunk_tokens, len(tile.weights_C))
    if work is None:
        tile.read(*tile.gathered_sums())
        totals.add_tile(terms, tile)
    else:
        work.finish(tile)
    if provider.needs_gradient:
        provider.pull_back(tile.rows, tile.counted_C, tile.gradient(provider.rounded_buffer(len(tile.counted_C))))


class ChunkWork:
    """The compiled work on the rows of a pass's chunks. All sums are one tensor, to launch few kernels per chunk."""

    def __init__(
        self, terms: Sequence[Term], plan: TilePlan, provider: LogitsProvider, weights_T: Tensor, index: Tensor | None
    ):
        """index: the rows of the pass, or None for all rows."""
        self._layout, self._per_token = term_layout(terms, plan, provider)
        chosen = [tensor if index is None else tensor[index] for tensor in (weights_T, *self._per_token)]
        # functions are compiled for the strides of their inputs, so all inputs are contiguous
        self._tensors = [tensor.contiguous() for tensor in chosen]
        self._tokens = len(weights_T)
        self._sums_K: Tensor | None = None
        self._values_NT = torch.empty(0)

    def start(self, chunk: slice) -> tuple[Tensor, dict[Tensor, Tensor], Tensor, Tensor]:
        """Return the weights, the tensors of the terms and the two `masks` of a chunk of the pass's rows."""
        tensors = [tensor[chunk] for tensor in self._tensors]
        seen_C, *counted = traced(row_masks, self._layout, tensors, [])
        return tensors[0], dict(zip(self._per_token, tensors[1:], strict=True)), seen_C, (counted or [seen_C])[0]

    def finish(self, tile: Tile) -> None:
        """Add the terms' values on a chunk to the sums, and their gradient to the tile."""
        # the rows are the first dim of every tensor
        tensors = [sums_RCX.transpose(0, 1) for sums_RCX in tile.gathered_sums()]
        tensors += [tile.weights_C, tile.counted_C, *tile.taken.values(), *tile.tiles_CV]
        sums_K, values_NC, *gradients = traced(finish_rows, self._layout, tensors, tile.tiles_CV)
        if self._sums_K is None:
            self._sums_K = sums_K
            self._values_NT = values_NC.new_zeros(len(values_NC), self._tokens)
        else:
            self._sums_K += sums_K
        self._values_NT[:, tile.rows] = values_NC
        if gradients:
            tile.set_gradient(*gradients)

    def add_to(self, totals: Totals) -> None:
        """Add the sums of all chunks. There is at least one chunk."""
        assert self._sums_K is not None
        totals.loss += self._sums_K[0]
        for key, value in zip(self._layout.keys, self._sums_K[1:], strict=True):
            totals.sums[key] += value
        for name, values_T in zip(totals.names, self._values_NT, strict=True):
            totals.per_token[name] += values_T


def masks(terms: Sequence[Term], rows: RowIndex, weights_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return two masks [C]: the rows that at least one term reads, and the rows that count in the loss.

    If no term has the scale 0, the two masks are the same tensor.
    """
    # a term of scale 0 is only reported: its rows are computed, but the term adds nothing to the loss
    seen_C = counted_C = torch.zeros_like(weights_C, dtype=torch.bool)
    for term in terms:
        term_rows_C = term.counted(rows, weights_C)
        seen_C = seen_C | term_rows_C
        counted_C = counted_C | term_rows_C if term.scale else counted_C
    return seen_C, seen_C if all(term.scale for term in terms) else counted_C


def row_masks(layout: "TermLayout", weights_C: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `masks`, without the second mask if it is the same tensor as the first."""
    seen_C, counted_C = masks(layout.build(tensors), slice(None), weights_C)
    return (seen_C,) if counted_C is seen_C else (seen_C, counted_C)


def finish_rows(layout: "TermLayout", gathered_CRX: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the sums [K], the first of which is the loss, and the terms' values [N, C].

    If a gradient is needed, also return the normalizers and coefficients [C, X], and the tensors of
    `Tile.gradient_at_ids`. gathered_CRX: the raw sums of all ranks. tensors: the normalized sums, if the plan has a
    second sweep; the weights; the mask of counted rows; the tensors of the terms; the tiles.
    """
    at = len(tensors) - layout.tensors - layout.tiles
    gathered = [gathered_CRX, *tensors[: at - 2]]
    weights_C, counted_C = tensors[at - 2 : at]
    terms, tiles_CV = layout.build(tensors[at : at + layout.tensors]), list(tensors[at + layout.tensors :])
    plan = requested_plan(terms, layout.scale, layout.softcap)
    shard = VocabShard(layout.first, layout.first + tiles_CV[0].shape[1], None)
    tile = Tile(plan, slice(None), weights_C, counted_C, tiles_CV, layout.vocabulary, shard, layout.needs_gradient)
    tile.read(*(sums_CRX.transpose(0, 1) for sums_CRX in gathered))
    totals = Totals(terms, weights_C.shape[0], layout.dtype, weights_C.device)
    totals.add_tile(terms, tile)
    layout.keys[:] = totals.sums
    stacked = torch.stack([totals.loss, *totals.sums.values()]), torch.stack(list(totals.per_token.values()))
    if not layout.needs_gradient:
        return stacked
    rows_CX = tile.gradient_rows()
    return *stacked, rows_CX, *tile.gradient_at_ids(rows_CX, layout.rounded)


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in the list of the terms' tensors. shape: the shape of one row."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Object:
    """A term, a signal or `RowTemperatures`. number: identifies the object, which several terms can share."""

    number: int
    kind: type
    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class TermLayout:
    """All properties on which the compiled code of a pass's terms depends. Equal layouts give the same code.

    tensors: how many tensors the terms have.
    tiles: how many tiles a chunk has.
    first: the first id of the vocabulary on this rank.
    dtype, rounded: the dtypes of the logits and of their gradient.
    keys: the keys of the sums that `finish_rows` returns. `finish_rows` sets them.
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


#: maps each layout to the first layout that is equal to it; functions are compiled only for this first layout
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


# not inside `build`: a recursive inner function refers to itself, and keeps tensors until garbage collection
def _with_tensors(entry: Any, tensors: Sequence[Tensor], built: dict[int, Any]) -> Any:
    """Return an entry of a layout with its tensors. built: the objects by number."""
    if isinstance(entry, _Slot):
        return tensors[entry.number]
    if isinstance(entry, tuple):
        return tuple(_with_tensors(member, tensors, built) for member in entry)
    if not isinstance(entry, _Object):
        return entry
    if entry.number not in built:
        # `__post_init__` is not called, because it has already checked the term of the whole pass
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
    if isinstance(value, Signal) and value in plan.signals:  # terms read a dense signal's tile, not its tensors
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
