"""The chunks of a pass: the number of rows of a tile of logits, the loop over the chunks, and the sums of the pass.

T tokens, C rows of a chunk.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stillhouse.objective.metric_keys import StatisticKeys, unique_names
from stillhouse.objective.signals import RowIndex
from stillhouse.objective.terms import Term
from stillhouse.objective.tile.logits_provider import LogitsProvider
from stillhouse.objective.tile.tile import TermResult, Tile
from stillhouse.objective.tile.tile_plan import Plan

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
    return math.ceil(tokens / math.ceil(tokens / rows)) if tokens else rows


def run_chunks(
    provider: LogitsProvider,
    terms: Sequence[Term],
    tokens: int,
    weights_T: Tensor | None,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> "Totals":
    """Add the gradient of the terms' loss on these rows to the provider's gradients, and return the sums.

    tokens: T. valid_index: the rows to compute (None: all). The other arguments are those of `linear_objective`.
    """
    totals = Totals(terms, tokens, provider)
    one = torch.ones(1, dtype=provider.dtype, device=provider.device)
    weights_T = one.expand(tokens) if weights_T is None else weights_T.to(provider.device, provider.dtype)
    plan = Plan(provider.scale, provider.softcap)
    for term in terms:
        term.request(plan)
    plan.close()
    size = chunk_tokens or tile_rows(provider, tokens if valid_index is None else len(valid_index))
    # over several ranks, the next chunk's products run while the collective of this chunk is under way
    in_flight = 0 if provider.shard is None or provider.shard.is_alone else 1
    started: deque[Tile] = deque()
    for number, rows in enumerate(chunks(tokens, valid_index, size)):
        started.append(_start(provider, plan, terms, rows, weights_T[rows], number % (in_flight + 1)))
        if len(started) > in_flight:
            _finish(provider, terms, started.popleft(), totals)
    while started:
        _finish(provider, terms, started.popleft(), totals)
    return totals


def _start(
    provider: LogitsProvider, plan: Plan, terms: Sequence[Term], rows: RowIndex, weights_C: Tensor, buffer: int
) -> Tile:
    # a term of scale 0 is only reported: its rows are computed, but the term adds nothing to the loss
    seen_C = counted_C = torch.zeros_like(weights_C, dtype=torch.bool)
    for term in terms:
        of_term_C = term.counted(rows, weights_C)
        seen_C = seen_C | of_term_C
        counted_C = counted_C | of_term_C if term.scale else counted_C
    tiles_CV = provider.tiles(rows, seen_C, plan.signals, buffer)
    vocabulary, shard, needs_gradient = provider.vocabulary, provider.shard, provider.needs_gradient
    tile = Tile(plan, rows, weights_C, counted_C, tiles_CV, vocabulary, shard, needs_gradient)
    tile.start()
    return tile


def _finish(provider: LogitsProvider, terms: Sequence[Term], tile: Tile, totals: "Totals") -> None:
    """Wait for the collective of a chunk, and add the chunk to the totals and gradients."""
    tile.wait()
    totals.sums["tokens"] += (tile.weights_C != 0).sum()
    totals.chunk_tokens = max(totals.chunk_tokens, len(tile.weights_C))
    for position, term in enumerate(terms):
        weights_C = tile.weights_C
        if term.weights_T is not None:
            weights_C = weights_C * tile.take(term.weights_T).to(provider.dtype)
        totals.add(position, tile.rows, weights_C, term.add_to(tile, weights_C * term.scale))
    if provider.needs_gradient:
        provider.pull_back(tile.rows, tile.counted_C, tile.gradient(provider.rounded_buffer(len(tile.counted_C))))


class Totals:
    """The sums of a pass, in float64, because a float32 running sum loses a digit every few hundred chunks. They are
    float32 on Apple's GPUs, which have no float64.
    """

    def __init__(self, terms: Sequence[Term], tokens: int, provider: LogitsProvider):
        self.names = unique_names(terms)
        self.keys = StatisticKeys(terms, self.names)
        self.scales = [term.scale for term in terms]
        self.per_token = {
            name: torch.zeros(tokens, dtype=provider.dtype, device=provider.device) for name in self.names
        }
        dtype = torch.float32 if provider.device.type == "mps" else torch.float64
        self.loss = torch.zeros((), dtype=dtype, device=provider.device)
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros_like(self.loss))
        self.chunk_tokens = 0

    def plus(self, other: "Totals") -> "Totals":
        """Add the totals of another pass, over other rows."""
        self.loss += other.loss
        self.chunk_tokens = max(self.chunk_tokens, other.chunk_tokens)
        for name, value in other.sums.items():
            self.sums[name] += value
        for name, value_T in other.per_token.items():
            self.per_token[name] = self.per_token[name] + value_T if name in self.per_token else value_T
        return self

    def add(self, position: int, rows: RowIndex, term_weights_C: Tensor, result: TermResult) -> None:
        """Add a term's result on a chunk. A row of weight 0 adds 0, even if its value is NaN."""
        is_zero_C = term_weights_C == 0
        value_C = result.value_C.masked_fill(is_zero_C, 0.0)
        value = (value_C.to(self.loss.dtype) * term_weights_C).sum()
        self.per_token[self.names[position]][rows] = value_C
        self.sums[self.names[position]] += value
        if self.scales[position]:  # a term of scale 0 is only reported; its value may be infinite
            self.loss += self.scales[position] * value
        for name, statistic_C in (result.statistics | result.parts).items():
            if key := self.keys.of(position, name):
                statistic_C = statistic_C.masked_fill(is_zero_C, 0.0)
                self.sums[key] += (statistic_C.to(self.loss.dtype) * term_weights_C).sum()
