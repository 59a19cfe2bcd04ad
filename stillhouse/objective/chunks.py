"""How many tokens a pass computes at a time: the rows of a tile of logits, by a memory budget.

T tokens, C rows of a chunk.
"""

import math
from collections.abc import Iterator

from torch import Tensor

from stillhouse.objective.signals import RowIndex
from stillhouse.objective.source import Source

#: memory budget of one tile of logits, in bytes; a tile is float32, or float64 for float64 inputs. A pass keeps one
#: tile for the student and one for each dense teacher, and over vocabulary shards twice as many (for two chunks).
#: Mixtures of teachers need at least one more (`Source._mixture_logits`)
TILE_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
#: the fewest and the most rows of a tile. The minimum overrides `TILE_BYTES`: with fewer rows, matrix products are
#: slow and, on a GPU, adding to the weight's gradient is bandwidth-bound. More rows than the maximum gain nothing
TILE_ROWS = {"cpu": (64, 512), "cuda": (1024, 4096)}


def chunks(tokens: int, valid_index: Tensor | None, size: int) -> Iterator[RowIndex]:
    """Yield at least one chunk, which may be empty: so a micro-batch without a valid row has all metrics, too."""
    if valid_index is not None:
        yield from valid_index.split(size)
    else:
        yield from (slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size))


def tile_rows(source: Source, tokens: int) -> int:
    """Return the rows of a tile by the memory budget; the tokens are spread evenly over the chunks."""
    device = source.device.type if source.device.type in TILE_BYTES else "cpu"
    fewest, most = TILE_ROWS[device]
    # over shards, every rank must get the same number
    columns = source.vocabulary if source.shard is None else source.shard.most_rows
    rows = min(most, max(fewest, TILE_BYTES[device] // (columns * source.dtype.itemsize)))
    return math.ceil(tokens / math.ceil(tokens / rows)) if tokens else rows
