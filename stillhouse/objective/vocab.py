"""Vocabulary shards: which rows of an output head live on this rank.

The only file of the objective that knows torch.distributed.
"""

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabShard:
    """Rows `start:stop` of the whole vocabulary are here; `group` holds the ranks that hold the others.

    Explicit, never re-derived: DTensor's ceil split and a balanced split disagree (10 rows over 4 ranks are
    3, 3, 3, 1 or 3, 3, 2, 2).

    `reduce_hidden_grad`: sum the gradient of the hidden states over the group here (True), or leave it to the
    layer below, which sums it anyway under sequence parallelism (False).
    """

    start: int
    stop: int
    group: ProcessGroup | None
    reduce_hidden_grad: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard({self.start}, {self.stop}): expected 0 ≤ start ≤ stop")


def require_whole_vocabulary(shard: VocabShard | None, rows: int) -> None:
    """Refuse a head that holds a part of the vocabulary: its objective would be a part of the loss, silently."""
    if shard is None or (shard.start == 0 and shard.stop == rows and _alone(shard)):
        return
    raise NotImplementedError(
        f"the head holds rows {shard.start}:{shard.stop} of a vocabulary over several ranks; "
        "this version computes objectives on one rank's whole vocabulary only: gather the head"
    )


def _alone(shard: VocabShard) -> bool:
    return shard.group is None or shard.group.size() == 1
