"""The predicted time of a step, from the counts of its ranks and a device. `docs/plan.md` has the formula.

time of a rank = max(products + traffic, launches) + exposed messages
time of a step = the slowest rank's, divided by 1 − the bubble's share
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from stillhouse.plan.devices import LATENCY, LAUNCH, LINKS, NETWORK_LATENCY, PRODUCTS, TRAFFIC, Device
from stillhouse.plan.rank_counts import LayoutSize, RankCounts

#: which share of its bytes a rank sends to other ranks of a group of many: all of them, or twice
_PASSES = {"allreduce": 2.0, "all_reduce": 2.0}
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")
#: the axes whose messages FSDP runs beside computation
_OVERLAPPED = frozenset(("shard", "replicate"))
#: the time of a schedule's bubble, relative to the time of one micro-batch on a stage, for each further stage
_BUBBLES = {"interleaved": 1 / 2, "zero_bubble": 1 / 6, "zbv": 0.0}


@dataclass(frozen=True)
class RankTime:
    """Predicted seconds of a rank in a step.

    network: of messages that wait for nothing else to do. overlapped: of FSDP's messages, as if nothing hid them.
    exposed: of all messages that computation does not hide.
    """

    products: float
    traffic: float
    launches: float
    overlapped: float
    exposed: float

    @property
    def computing(self) -> float:
        return max(self.products + self.traffic, self.launches)

    @property
    def seconds(self) -> float:
        return self.computing + self.exposed

    @property
    def bound(self) -> str:
        """The resource that takes most of the time."""
        if self.launches > self.products + self.traffic and self.launches > self.exposed:
            return "launches"
        parts = {"compute": self.products, "memory": self.traffic, "network": self.exposed}
        return max(parts, key=lambda name: parts[name])

    def as_json(self) -> dict[str, float | str]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "seconds": self.seconds,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class Prediction:
    """The predicted step. times: of the ranks, by name. slowest: the name of the rank on which all others wait.
    bubble: the share of the step in which a rank of the pipeline waits. model_share: of the peak, by the operations
    of the model without recomputation (MFU).
    """

    times: Mapping[str, RankTime]
    slowest: str
    bubble: float
    seconds: float
    tokens_per_second: float
    model_share: float


def predict(ranks: Mapping[str, RankCounts], device: Device, gpus_per_node: int) -> Prediction:
    """Predict the time of a step from its ranks' counts, by name."""
    times = {name: rank_time(rank, device, gpus_per_node) for name, rank in ranks.items()}
    slowest = max(times, key=lambda name: times[name].seconds)
    rank = ranks[slowest]
    bubble = bubble_share(rank.layout, rank.micro_batches)
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
    for key in rank.sent:
        axis, operation = key.split(" ", 1)
        seconds = message_seconds(rank, axis, operation, device, gpus_per_node)
        if _is_overlapped(key):
            overlapped += seconds
        else:
            other += seconds
    computing = max(products + traffic, launches)
    # the first gather of a step and its last reduction have nothing beside them: about one of all messages
    messages = max(1, sum(count for key, count in rank.messages.items() if _is_overlapped(key)))
    exposed = other + max(overlapped / messages, overlapped - computing)
    return RankTime(products, traffic, launches, overlapped, exposed)


def message_seconds(rank: RankCounts, axis: str, operation: str, device: Device, gpus_per_node: int) -> float:
    """Return the seconds of all messages of a kind, if nothing else uses the links."""
    key = f"{axis} {operation}"
    size, stride = _extent(axis, rank.layout)
    is_local = size * stride <= gpus_per_node
    latency = rank.messages[key] * (LATENCY if is_local else NETWORK_LATENCY)
    if operation in _POINT_TO_POINT:
        speed = device.nvlink if is_local else device.network
        return latency + rank.sent[key] / (speed * LINKS)
    # every machine has as many links to the network as devices; a group uses those of its own ranks there
    groups_per_machine = max(1, gpus_per_node // stride)
    speed = device.nvlink if is_local else min(device.nvlink, device.network * groups_per_machine)
    others = (size - 1) / size if size > 1 else 0.0
    return latency + _passes(operation) * others * rank.sent[key] / (speed * LINKS)


def _is_overlapped(key: str) -> bool:
    """Whether FSDP sends these messages. A group may be that of several axes, such as shard/data."""
    return not _OVERLAPPED.isdisjoint(key.split(" ", 1)[0].split("/"))


def _passes(operation: str) -> float:
    return next((passes for name, passes in _PASSES.items() if operation.startswith(name)), 1.0)


def _extent(axis: str, layout: LayoutSize) -> tuple[int, int]:
    """Return the number of ranks of a group along an axis, and the distance between neighbours."""
    degrees = layout.degrees
    shard = degrees["fsdp"] * degrees["context"]
    experts = max(degrees["expert"], degrees["tensor"])
    strides = {
        "tensor": (degrees["tensor"], 1),
        "expert": (experts, 1),
        "context": (degrees["context"], degrees["tensor"]),
        "shard": (shard, degrees["tensor"]),
        "data": (degrees["fsdp"] * degrees["replicate"], degrees["tensor"] * degrees["context"]),
        "replicate": (degrees["replicate"], shard * degrees["tensor"]),
        "pipeline": (degrees["pipeline"], layout.ranks // degrees["pipeline"]),
    }
    return strides.get(axis.partition("/")[0], (layout.ranks, 1))


def bubble_share(layout: LayoutSize, micro_batches: int) -> float:
    """Return the share of a step in which a rank of the pipeline waits for the others, if all stages are equal."""
    further = layout.degrees["pipeline"] - 1
    idle = further * _BUBBLES.get(layout.schedule, 1.0)
    return idle / (micro_batches + idle)
