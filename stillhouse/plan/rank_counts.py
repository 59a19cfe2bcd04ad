"""What the dry run of one rank has counted, as plain values that processes exchange as JSON. Needs no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: names of the ranks whose steps are run: those of the stages that differ
FIRST, INNER, LAST = "first", "inner", "last"


@dataclass(frozen=True)
class LayoutSize:
    """The layout of a plan. degrees: by axis. stages: of the pipeline, over all ranks. schedule: of the pipeline.
    last_rank: the pipeline's rank that has the last stage.
    """

    degrees: Mapping[str, int]
    stages: int
    schedule: str
    last_rank: int

    @property
    def ranks(self) -> int:
        axes = ("pipeline", "replicate", "fsdp", "context", "tensor")
        product = 1
        for axis in axes:
            product *= self.degrees[axis]
        return product

    def __str__(self) -> str:
        parts = [f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1]
        schedule = f", {self.schedule}" if self.degrees["pipeline"] > 1 else ""
        return (" × ".join(parts) or "one process") + schedule


@dataclass(frozen=True)
class RankCounts:
    """A steady step of one rank.

    micro_batches: of this rank in the step. tokens: of the step, over all ranks.
    model_operations: floating-point operations of the step over all ranks, without recomputation and attention.
    kernels: launches. waits: how often the host waits for the device, by place. pageable: copies that wait because
    the host's memory is not pinned, by place.
    products: floating-point operations of matrix products and attention, by dtype. traffic: bytes of other kernels.
    messages, sent: number and bytes of collectives, by axis and operation.
    peak: bytes at the largest use of memory, by purpose.
    """

    rank: int
    layout: LayoutSize
    micro_batches: int
    tokens: int
    model_operations: float
    kernels: int
    waits: Mapping[str, int]
    pageable: Mapping[str, int]
    products: Mapping[str, float]
    traffic: float
    messages: Mapping[str, int]
    sent: Mapping[str, float]
    peak: Mapping[str, int]

    @property
    def memory(self) -> int:
        return sum(self.peak.values())

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RankCounts":
        return cls(**{**values, "layout": LayoutSize(**values["layout"])})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def planned_ranks(layout: LayoutSize) -> dict[str, int]:
    """Return the ranks to run, by name: of the first, an inner and the last stage.

    All other ranks have the layers of one of these stages, or one layer more or less than an inner one. Within a
    stage, the first rank has the largest shards.
    """
    pipeline, per_stage = layout.degrees["pipeline"], layout.ranks // layout.degrees["pipeline"]
    numbers = {FIRST: 0, LAST: layout.last_rank}
    if pipeline > 2:
        numbers[INNER] = next(n for n in range(pipeline // 2, pipeline) if n not in numbers.values())
    ranks: dict[str, int] = {}
    for name in (FIRST, INNER, LAST):
        if name in numbers and numbers[name] * per_stage not in ranks.values():
            ranks[name] = numbers[name] * per_stage
    return ranks
