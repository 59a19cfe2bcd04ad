"""The chunks of a pass: the number of rows of a tile of logits, and the loop over the chunks.

T tokens, C rows of a chunk.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stillhouse.objective.head import ALIGNED
from stillhouse.objective.signals import RowIndex
from stillhouse.objective.terms import Term
from stillhouse.objective.tile.compiled import ROW_DEVICES
from stillhouse.objective.tile.compiled_chunk import ChunkWork, masks
from stillhouse.objective.tile.logits_provider import LogitsProvider
from stillhouse.objective.tile.metric_sums import Totals
from stillhouse.objective.tile.term_layout import requested
from stillhouse.objective.tile.tile import Tile

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
    """Return the rows of a tile that fit the memory budget, chosen so that all chunks have about the same size."""
    device = provider.device.type if provider.device.type in TILE_BYTES else "cpu"
    fewest, most = TILE_ROWS[device]
    # over shards, every rank must get the same number
    columns = provider.vocabulary if provider.shard is None else provider.shard.most_rows
    rows = min(most, max(fewest, TILE_BYTES[device] // (columns * provider.dtype.itemsize)))
    if device == "cpu" or not tokens:
        return math.ceil(tokens / math.ceil(tokens / rows)) if tokens else rows
    # compiled functions copy inputs whose address is not a multiple of 16 bytes
    rows = rows // ALIGNED * ALIGNED
    return math.ceil(tokens / math.ceil(tokens / rows) / ALIGNED) * ALIGNED


def run_chunks(
    provider: LogitsProvider,
    terms: Sequence[Term],
    tokens: int,
    weights_T: Tensor | None,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> Totals:
    """Add the gradient of the terms' loss on these rows to the provider's gradients, and return the sums.

    tokens: T. valid_index: the rows to compute (None: all). The other arguments are those of `linear_objective`.
    """
    totals = Totals(terms, tokens, provider.dtype, provider.device)
    one = torch.ones(1, dtype=provider.dtype, device=provider.device)
    weights_T = one.expand(tokens) if weights_T is None else weights_T.to(provider.device, provider.dtype)
    plan = requested(terms, provider.scale, provider.softcap)
    work = None
    if provider.device.type in ROW_DEVICES and all(map(_is_of_this_package, terms)):
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
            weights_C, taken = work.taken(number * size, (number + 1) * size)
            seen_C, counted_C = work.masks(weights_C, taken)
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
        work.totals.add_to(totals)
    return totals


def _finish(
    provider: LogitsProvider, terms: Sequence[Term], tile: Tile, totals: Totals, work: ChunkWork | None
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


def _is_of_this_package(term: Term) -> bool:
    """A term of a user may contain anything, and its code may do what cannot be compiled."""
    return type(term).__module__.partition(".")[0] == __name__.partition(".")[0]
