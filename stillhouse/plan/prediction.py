"""Predicts the time of a step from its ranks' counts, without torch. `docs/plan.md` explains the formula.

time of a rank = max(products + traffic, launches) + exposed messages
time of a step = time of the slowest rank / (1 − share of the bubble)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from stillhouse.plan.devices import LATENCY, LAUNCH, LINKS, NETWORK_LATENCY, PRODUCTS, TRAFFIC, Device

#: names of the ranks whose steps are run, one for each kind of stage
FIRST, INNER, LAST = "first", "inner", "last"
#: for each operation, the number of times that a rank of a large group sends its bytes; 1 if it is not listed
_PASSES = {"allreduce": 2.0, "all_reduce": 2.0}
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")
#: the axes whose messages FSDP overlaps with computation
_OVERLAPPED = frozenset(("shard", "replicate"))
#: the time of a schedule's bubble for each pipeline rank after the first, as a multiple of a rank's time for one
#: micro-batch; 1 for schedules that are not listed
_BUBBLES = {"interleaved": 1 / 2, "zero_bubble": 1 / 6, "zbv": 0.0}


@dataclass(frozen=True)
class LayoutSize:
    """The layout of a plan.

    degrees: the degree of each axis.
    stages: the number of pipeline stages on all ranks.
    schedule: the pipeline's schedule.
    last_rank: the pipeline coordinate of the rank with the last stage.
    """

    degrees: Mapping[str, int]
    stages: int
    schedule: str
    last_rank: int

    @property
    def ranks(self) -> int:
        return prod(self.degrees[axis] for axis in ("pipeline", "replicate", "fsdp", "context", "tensor"))

    def __str__(self) -> str:
        parts = [f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1]
        schedule = f", {self.schedule}" if self.degrees["pipeline"] > 1 else ""
        return (" × ".join(parts) or "one process") + schedule


@dataclass(frozen=True)
class RankCounts:
    """The counts of one rank in a step after the first step.

    micro_batches: the number of this rank's micro-batches. tokens: the number of the step's tokens on all ranks.
    model_operations: floating-point operations of the step on all ranks, without recomputation and attention.
    kernels: the number of kernel launches. `StepCounts` explains waits, pageable, products and the fields after them.
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


def planned_ranks(layout: LayoutSize) -> dict[str, int]:
    """Return the ranks to run by name: one of the first stage, one of an inner stage and one of the last stage.

    Every other rank has as many layers as one of these ranks, or one layer more or less than the inner rank. Within a
    stage, the first rank has the largest shards.
    """
    pipeline, per_stage = layout.degrees["pipeline"], layout.ranks // layout.degrees["pipeline"]
    ranks = {FIRST: 0}
    if pipeline > 2:
        ranks[INNER] = next(n for n in range(pipeline // 2, pipeline) if n not in (0, layout.last_rank)) * per_stage
    if layout.last_rank:  # some schedules have the last stage on the first rank
        ranks[LAST] = layout.last_rank * per_stage
    return ranks


@dataclass(frozen=True)
class RankTime:
    """Predicted seconds of a rank in a step.

    overlapped: the time of FSDP's messages, including the time that computation hides.
    exposed: the time of all messages that computation does not hide.
    """

    products: float
    traffic: float
    launches: float
    overlapped: float
    exposed: float

    @property
    def seconds(self) -> float:
        return max(self.products + self.traffic, self.launches) + self.exposed

    @property
    def bound(self) -> str:
        """The resource that takes the largest part of the time."""
        if self.launches > self.products + self.traffic and self.launches > self.exposed:
            return "launches"
        parts = {"compute": self.products, "memory": self.traffic, "network": self.exposed}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step.

    times: the ranks' times by name.
    slowest: the name of the rank for which all others wait.
    bubble: the share of the step in which a rank of the pipeline waits.
    model_share: the model's operations without recomputation, as a share of the peak (MFU).
    """

    times: Mapping[str, RankTime]
    slowest: str
    bubble: float
    seconds: float
    tokens_per_second: float
    model_share: float


def predict(ranks: Mapping[str, RankCounts], device: Device, gpus_per_node: int) -> Prediction:
    """Predict the time of a step. ranks: the counts of its ranks, by the names of `planned_ranks`"""
    times = {name: rank_time(rank, device, gpus_per_node) for name, rank in ranks.items()}
    slowest = max(times, key=lambda name: times[name].seconds)
    rank = ranks[slowest]
    bubble = bubble_share(rank.layout.degrees["pipeline"], rank.layout.schedule, rank.micro_batches)
    seconds = times[slowest].seconds / (1 - bubble)
    peak = device.bfloat16 * rank.layout.ranks * seconds
    return Prediction(times, slowest, bubble, seconds, rank.tokens / seconds, rank.model_operations / peak)


def rank_time(rank: RankCounts, device: Device, gpus_per_node: int) -> RankTime:
    """Predict the time of one rank, without the pipeline's bubble."""
    products = sum(
        operations / ((device.float32 if dtype in ("float32", "float64") else device.bfloat16) * PRODUCTS)
        for dtype, operations in rank.products.items()
    )
    traffic = rank.traffic / (device.bandwidth * TRAFFIC)
    launches = rank.kernels * LAUNCH
    overlapped = other = 0.0
    overlapped_messages = 0
    for key in rank.sent:
        axis, operation = key.split(" ", 1)
        seconds = message_seconds(rank, axis, operation, device, gpus_per_node)
        if _OVERLAPPED.isdisjoint(axis.split("/")):  # a group may belong to several axes, such as shard/data
            other += seconds
        else:
            overlapped += seconds
            overlapped_messages += rank.messages[key]
    computing = max(products + traffic, launches)
    # computation does not hide a step's first gather and last reduction, whose time is about that of one message
    exposed = other + max(overlapped / max(1, overlapped_messages), overlapped - computing)
    return RankTime(products, traffic, launches, overlapped, exposed)


def message_seconds(rank: RankCounts, axis: str, operation: str, device: Device, gpus_per_node: int) -> float:
    """Return the seconds of all messages of an axis and an operation, if nothing else uses the links."""
    key, degrees = f"{axis} {operation}", rank.layout.degrees
    shard = degrees["fsdp"] * degrees["context"]
    extents = {  # the number of ranks of a group along an axis, and the distance between neighbouring ranks
        "tensor": (degrees["tensor"], 1),
        "expert": (max(degrees["expert"], degrees["tensor"]), 1),
        "context": (degrees["context"], degrees["tensor"]),
        "shard": (shard, degrees["tensor"]),
        "data": (degrees["fsdp"] * degrees["replicate"], degrees["tensor"] * degrees["context"]),
        "replicate": (degrees["replicate"], shard * degrees["tensor"]),
        "pipeline": (degrees["pipeline"], rank.layout.ranks // degrees["pipeline"]),
    }
    size, stride = extents.get(axis.partition("/")[0], (rank.layout.ranks, 1))
    is_local = size * stride <= gpus_per_node
    latency = rank.messages[key] * (LATENCY if is_local else NETWORK_LATENCY)
    if operation in _POINT_TO_POINT:
        speed = device.nvlink if is_local else device.network
        return latency + rank.sent[key] / (speed * LINKS)
    # every device has a link to the network; a group uses the links of its ranks in the machine
    groups_per_machine = max(1, gpus_per_node // stride)
    speed = device.nvlink if is_local else min(device.nvlink, device.network * groups_per_machine)
    others = (size - 1) / size if size > 1 else 0.0
    passes = next((passes for name, passes in _PASSES.items() if operation.startswith(name)), 1.0)
    return latency + passes * others * rank.sent[key] / (speed * LINKS)


def bubble_share(pipeline: int, schedule: str, micro_batches: int) -> float:
    """Return the share of a step in which a rank of the pipeline waits for the others, if all stages are equal."""
    idle = (pipeline - 1) * _BUBBLES.get(schedule, 1.0)
    return idle / (micro_batches + idle)
