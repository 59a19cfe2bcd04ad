"""The weights in float32, moments and gradients of a student, which Megatron-Core's distributed optimizer shards.

Each data rank has a range of the elements of a parameter, which does not respect the borders of rows. So one
parameter at a time is collected, on a rank that `trained_parameters` chooses, such that all data ranks of a group
have about the same number of elements. `collect` and `spread` are collectives of the data ranks.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stillhouse.megatron.chunks import Chunks
from stillhouse.megatron.weights import Block

#: the names of AdamW's moments
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter of a chunk, and what this data rank has of it.

    key: the number of the chunk and the name in it. blocks: its places in the full model. group: the data ranks that
    share the parameter. owner: the rank in the group on which it is collected. elements: the range of this rank's
    elements in the flattened parameter. optimizer: the optimizer of these elements. master: the elements in float32;
    without elements it is empty.
    """

    key: tuple[int, str]
    blocks: Sequence[Block]
    parameter: nn.Parameter
    group: dist.ProcessGroup
    owner: int
    elements: slice
    optimizer: torch.optim.Optimizer | None
    master: Tensor

    @property
    def is_owner(self) -> bool:
        return self.group.rank() == self.owner

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of the elements; empty before the first step."""
        return {} if self.optimizer is None else self.optimizer.state[self.master]

    def values(self, kind: str) -> Tensor:
        """Return this rank's elements of a moment of the optimizer by its name, otherwise of the float32 weight."""
        empty = self.master.new_empty(0)
        return self.state.get(kind, empty) if kind in MOMENTS else self.master.detach()

    @property
    def gradient(self) -> Tensor:
        """This rank's elements of the gradient, summed over the data ranks."""
        return self.parameter.main_grad.flatten()[self.elements]  # type: ignore[attr-defined]

    def collect(self, values: Tensor, *, everywhere: bool = False) -> Tensor | None:
        """Return the full tensor in float32 on the owner, or on all ranks; on other ranks None.

        values: the values of this rank's elements.
        """
        full = torch.zeros(self.parameter.numel(), dtype=torch.float32, device=values.device)
        full[self.elements] = values
        bits = full.view(torch.int32)  # a sum of integers with zeros keeps each bit, a sum of numbers loses -0.0
        if everywhere:
            dist.all_reduce(bits, group=self.group)
        elif self.group.size() > 1:
            dist.reduce(bits, group_dst=self.owner, group=self.group)
        return full.view(self.parameter.shape) if everywhere or self.is_owner else None

    def spread(self, full: Tensor | None) -> Tensor:
        """Return the full tensor of the owner on all ranks."""
        tensor = torch.empty(self.parameter.shape, device=self.master.device) if full is None else full
        dist.broadcast(tensor, group_src=self.owner, group=self.group)
        return tensor

    def on_rank(self, full: Tensor) -> Tensor:
        """Return this rank's elements of a full tensor."""
        return full.flatten()[self.elements]


def trained_parameters(chunks: Chunks, optimizer: Any) -> list[TrainedParameter]:
    """Return all trained parameters of this rank, in the same order on all data ranks of a group.

    Parameters with parts of one tensor of the full model, such as the experts of a layer, have one owner.
    """
    keys = {
        parameter: (number, name)
        for number, model in enumerate(chunks.models)
        for name, parameter in model.named_parameters()
    }
    blocks: defaultdict[tuple[int, str], list[Block]] = defaultdict(list)
    for block in chunks.table.blocks:
        blocks[block.chunk, block.parameter].append(block)
    # the parameters with the data ranks that share them
    groups: dict[nn.Parameter, dist.ProcessGroup] = {
        parameter: buffer.data_parallel_group
        for wrapped in chunks.wrapped
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers)
        for parameter in buffer.params
    }
    # a shard of the vocabulary that has only padding rows has no block
    tensors = {
        parameter: (group, next((block.name for block in blocks[keys[parameter]]), keys[parameter][1]))
        for parameter, group in groups.items()
    }
    owners = _owners(tensors)
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]
    part_of = {parameter: part for part in parts for parameter in part.model_param_gbuf_map}
    entries = []
    for parameter, group in groups.items():
        # without an element on this rank
        elements, optimizer, master = slice(0, 0), None, torch.empty(0, device=parameter.device)
        if (part := part_of.get(parameter)) is not None:
            param_group, number = part.model_param_group_index_map[parameter]
            span = part._get_model_param_range_map(parameter)["param"]
            elements, optimizer = slice(span.start, span.end), part.optimizer
            master = optimizer.param_groups[param_group]["params"][number]
        key, owner = keys[parameter], owners[tensors[parameter]]
        entries.append(TrainedParameter(key, blocks[key], parameter, group, owner, elements, optimizer, master))
    return entries


def _owners(
    tensors: Mapping[nn.Parameter, tuple[dist.ProcessGroup, str]],
) -> dict[tuple[dist.ProcessGroup, str], int]:
    """Return the owner of each tensor: of the largest tensors first, the rank with the fewest elements so far."""
    sizes: dict[tuple[dist.ProcessGroup, str], int] = defaultdict(int)
    for parameter, tensor in tensors.items():
        sizes[tensor] += parameter.numel()
    loads: dict[dist.ProcessGroup, list[int]] = {group: [0] * group.size() for group, _ in sizes}
    owners: dict[tuple[dist.ProcessGroup, str], int] = {}
    for (group, name), size in sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0][1])):
        owners[group, name] = loads[group].index(min(loads[group]))
        loads[group][owners[group, name]] += size
    return owners


def require_partition(entries: Sequence[TrainedParameter]) -> None:
    """Raise ValueError unless each element of each parameter is on exactly one data rank of its group.

    Otherwise `collect` would return wrong values. A collective of the data ranks.
    """
    groups: dict[dist.ProcessGroup, list[TrainedParameter]] = defaultdict(list)
    for entry in entries:
        groups[entry.group].append(entry)
    for group, members in groups.items():
        ranges: list[Any] = [None] * group.size()
        dist.all_gather_object(
            ranges, [(entry.elements.start, entry.elements.stop) for entry in members], group=group
        )
        for entry, *parts in zip(members, *ranges, strict=True):
            held = sorted(part for part in parts if part[0] < part[1])
            if [0, *(stop for _, stop in held)] != [*(start for start, _ in held), entry.parameter.numel()]:
                raise ValueError(
                    f"the data ranks have the elements {held} of parameter '{entry.key[1]}': expected each of its "
                    f"{entry.parameter.numel()} elements once"
                )
