"""The state of `MegatronEngine` as named tensors. `TorchEngine` has the same tensors (see `state_folder.py`).

A tensor of the full model consists of rectangular blocks on the processes (`weights.py`). DCP writes and reads such a
tensor by the protocol that `BlockTensor` implements. So a run may change its layout, and its engine, when it resumes.

Megatron-Core's distributed optimizer shards the float32 weights, moments and gradients: each data rank has a range of
a parameter's elements, which may begin or end within a row. So each parameter is collected, one at a time, on one
rank, its owner. `trained_parameters` chooses the owners so that all data ranks of a group collect about the same
number of elements. `collect` and `spread` are collectives of the data ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from stillhouse.engine.optimizer import empty_state
from stillhouse.engine.state_folder import AVERAGE, MOMENT, RANDOM, WEIGHT, read_in_place, require_fit, stored_tensors
from stillhouse.megatron.chunks import Chunks
from stillhouse.megatron.student import MegatronStudent
from stillhouse.megatron.weights import Block, Key, index_key, local_blocks
from stillhouse.signals import WeightAverage

#: the names of AdamW's moments
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter of a chunk, and the part of the parameter that this data rank has.

    group: the data ranks that share the parameter.
    owner: the rank in the group on which the parameter is collected.
    elements: the range of this rank's elements in the flattened parameter.
    optimizer: the optimizer of these elements; None if this rank has no elements.
    master: the weights of these elements in float32.
    """

    key: Key
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
        """The optimizer's state of this rank's elements. It is empty before the first step."""
        return {} if self.optimizer is None else self.optimizer.state[self.master]

    def values(self, kind: str) -> Tensor:
        """Return this rank's elements of the moment `kind`, or of the float32 weight if `kind` is no moment."""
        empty = self.master.new_empty(0)
        return self.state.get(kind, empty) if kind in MOMENTS else self.master.detach()

    def collect(self, values: Tensor, *, everywhere: bool = False) -> Tensor | None:
        """Return the full tensor in float32 on the owner (on all ranks with `everywhere`), and None on other ranks.

        values: this rank's elements.
        """
        full = torch.zeros(self.parameter.numel(), dtype=torch.float32, device=values.device)
        full[self.elements] = values
        bits = full.view(torch.int32)  # a sum of integers and zeros keeps all bits; a sum of floats would lose -0.0
        if everywhere:
            dist.all_reduce(bits, group=self.group)
        elif self.group.size() > 1:
            dist.reduce(bits, group_dst=self.owner, group=self.group)
        return full.view(self.parameter.shape) if everywhere or self.is_owner else None

    def spread(self, full: Tensor | None) -> Tensor:
        """Return the owner's full tensor on all ranks."""
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
    keys = {parameter: key for key, parameter in chunks.named_parameters()}
    blocks = chunks.table.by_parameter()
    # the parameters with the data ranks that share them
    groups: dict[nn.Parameter, dist.ProcessGroup] = {
        parameter: buffer.data_parallel_group
        for wrapped in chunks.wrapped
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers)
        for parameter in buffer.params
    }
    tensors = {
        parameter: (group, next((block.name for block in blocks[keys[parameter]]), keys[parameter][1]))
        for parameter, group in groups.items()
    }
    # choose owners, from the largest tensor to the smallest: the owner is the rank with the fewest elements so far
    sizes: defaultdict[tuple[dist.ProcessGroup, str], int] = defaultdict(int)
    for parameter, tensor in tensors.items():
        sizes[tensor] += parameter.numel()
    loads: dict[dist.ProcessGroup, list[int]] = {group: [0] * group.size() for group, _ in sizes}
    owners: dict[tuple[dist.ProcessGroup, str], int] = {}
    for (group, name), size in sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0][1])):
        owners[group, name] = loads[group].index(min(loads[group]))
        loads[group][owners[group, name]] += size
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]
    part_of = {parameter: part for part in parts for parameter in part.model_param_gbuf_map}
    entries = []
    for parameter, group in groups.items():
        # the three values for a parameter without elements on this rank
        elements, optimizer, master = slice(0, 0), None, torch.empty(0, device=parameter.device)
        if (part := part_of.get(parameter)) is not None:
            param_group, number = part.model_param_group_index_map[parameter]
            span = part._get_model_param_range_map(parameter)["param"]
            elements, optimizer = slice(span.start, span.end), part.optimizer
            master = optimizer.param_groups[param_group]["params"][number]
        key, owner = keys[parameter], owners[tensors[parameter]]
        entries.append(TrainedParameter(key, blocks[key], parameter, group, owner, elements, optimizer, master))
    return entries


def require_partition(entries: Sequence[TrainedParameter]) -> None:
    """Raise ValueError unless each element of a parameter is on exactly one data rank. A collective of data ranks."""
    groups: defaultdict[dist.ProcessGroup, list[TrainedParameter]] = defaultdict(list)
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


class BlockTensor(Tensor):
    """A tensor of the full model for DCP, with a shape but without storage. This process has some blocks of it.

    blocks: parts of parameters or moments, by the indices of their first elements in the full tensor.
    offsets: the indices of the region's first element.
    region: the rectangle that the blocks fill, as one tensor, because a file has at most one part of a tensor. It is
        a copy if there are several blocks.
    """

    blocks: dict[tuple[int, ...], Tensor]
    offsets: tuple[int, ...]
    region: Tensor

    @classmethod
    def without_blocks(cls, shape: Sequence[int]) -> "BlockTensor":
        tensor = torch.zeros(()).expand(tuple(shape)).as_subclass(cls)  # DCP would allocate "meta"
        tensor.blocks = {}
        return tensor

    def include(self, block: Block, part: Tensor) -> None:
        """Add a block. If a number in the index removed a dim, the part gets this dim again."""
        for dim, entry in enumerate(block.index):
            if isinstance(entry, int):
                part = part.unsqueeze(dim)
        self.blocks[tuple(entry if isinstance(entry, int) else entry.start for entry in block.index)] = part

    def join(self) -> None:
        """Copy the blocks to the region. Raises ValueError unless they fill a rectangle."""
        self.offsets = tuple(map(min, zip(*self.blocks, strict=True)))
        ends = zip(*(map(sum, zip(at, part.shape, strict=True)) for at, part in self.blocks.items()), strict=True)
        shape = [max(dim_ends) - start for dim_ends, start in zip(ends, self.offsets, strict=True)]
        if prod(shape) != sum(part.numel() for part in self.blocks.values()):
            raise ValueError(f"the blocks of a tensor of shape {tuple(self.shape)} do not fill a rectangle")
        first = next(iter(self.blocks.values()))
        self.region = first if len(self.blocks) == 1 else first.new_empty(shape)
        if len(self.blocks) > 1:
            for place, part in self._places():
                place.copy_(part)

    def spread(self) -> None:
        """Copy the region to the blocks."""
        if len(self.blocks) > 1:
            for place, part in self._places():
                part.copy_(place)

    def _places(self) -> Iterator[tuple[Tensor, Tensor]]:
        for at, part in self.blocks.items():
            starts = [start - first for start, first in zip(at, self.offsets, strict=True)]
            yield self.region[tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))], part

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        [chunk] = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.region), torch.Size(self.shape))
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.offsets), self.region.shape)]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.region


@dataclass(frozen=True)
class MegatronState:
    """The state of an engine. Its tensors have the kinds WEIGHT and AVERAGE, and a kind for each moment. For each
    parameter, one data rank writes the tensors of all kinds.
    """

    student: MegatronStudent
    trained: Sequence[TrainedParameter]
    average: WeightAverage | None = None

    def tensors(self) -> dict[str, Any]:
        """Return this process's blocks, step numbers and random states, by name. A collective of all processes."""
        held, steps, averages = self._empty(), self._steps(), self._averages()
        for block, weight in self._buffers():
            held[f"{WEIGHT}{block.name}"].include(block, weight)
        for entry in self.trained:
            full = {kind: entry.collect(entry.values(kind)) for kind in ((WEIGHT, *MOMENTS) if steps else (WEIGHT,))}
            if entry.is_owner and averages:
                full[AVERAGE] = averages[entry.parameter]
            for kind, tensor in full.items():
                for block in entry.blocks:
                    if tensor is not None and not block.is_copy:
                        held[_key(kind, block.name)].include(block, tensor[block.local])
        return _joined(held) | steps | self._random()

    def parameters_without_moments(self) -> list[str]:
        return [] if self._steps() else self.student.trained

    @torch.no_grad()
    def read(self, folder: Path, without_moments: Sequence[str]) -> None:
        """Restore weights, moments and random states, which either engine may have written under any layout.

        Raises ValueError for the state of another model, or if parameters had no moments.
        """
        if without_moments:
            raise ValueError(
                f"{folder.parent}: '{without_moments[0]}' never had a gradient, so the state has no moments of it; "
                "expected a run in which all parameters are trained, or parallel.engine: torch"
            )
        for entry in self.trained:
            if entry.optimizer is not None:
                entry.optimizer.state[entry.master] = empty_state(entry.optimizer, entry.master)
        stored, wanted, steps = stored_tensors(folder), self._empty(), self._steps(created=True)
        require_fit(folder.parent, stored, wanted | steps, is_complete=True)
        # the full tensors of the parameters that this rank collects
        full: dict[tuple[Any, str], Tensor] = {}
        for entry in self.trained:
            for kind in self._kinds if entry.is_owner else ():
                tensor = full[entry.key, kind] = torch.zeros(entry.parameter.shape, device=entry.parameter.device)
                for block in entry.blocks:
                    wanted[_key(kind, block.name)].include(block, tensor[block.local])
        for block, buffer in self._buffers():
            wanted[f"{WEIGHT}{block.name}"].include(block, buffer)
        here = _joined(wanted)
        random = {name: value for name, value in self._random().items() if name in stored}
        read_in_place(folder, here | steps | random)
        for block_tensor in here.values():
            block_tensor.spread()
        step = _only_value(map(float, steps.values()))
        averages = self._averages()
        for entry in self.trained:
            for kind in self._kinds:
                spread = entry.spread(full.get((entry.key, kind)))
                if kind == WEIGHT:
                    entry.parameter.copy_(spread)
                if kind == AVERAGE:
                    averages[entry.parameter].copy_(spread)
                elif entry.optimizer is not None:
                    entry.values(kind).copy_(entry.on_rank(spread))
            if entry.optimizer is not None:
                entry.state["step"].fill_(step)
        for name, value in random.items():
            torch.set_rng_state(value) if name.startswith(f"{RANDOM}cpu") else torch.cuda.set_rng_state(value)

    def not_finite(self) -> list[str]:
        """Return the names of this process's tensors whose weights or moments have an element that is not finite."""
        names = []
        for entry in self.trained:
            for kind in (WEIGHT, *(moment for moment in MOMENTS if moment in entry.state)):
                if len(places := (~entry.values(kind).isfinite()).nonzero()):
                    first = torch.tensor(entry.elements.start + int(places[0]))
                    element = torch.unravel_index(first, entry.parameter.shape)
                    names.append(entry.key[1])  # this name stays for padding, which is in no block
                    for block in entry.blocks:
                        bounds = zip(index_key(block.local), element, strict=True)
                        if all(start <= at < stop for (start, stop), at in bounds):
                            names[-1] = block.name
        return names

    def bytes_to_write(self, *, all_moments: bool = False) -> int:
        """Return the size in bytes that all processes write: all tensors, and the weights again for the student's
        folder. all_moments: whether to count moments that do not exist yet.
        """
        weights = sum(prod(self.student.shapes[name]) for name in self.student.saved)
        later = len(MOMENTS) * sum(prod(self.student.shapes[name]) for name in self.student.trained)
        missing = later if all_moments and not self._steps() else 0
        return torch.float32.itemsize * (self.element_count() + weights + missing)

    def element_count(self) -> int:
        """Return the number of elements in the weights and moments of all processes."""
        student, steps = self.student, self._steps()
        copies = len(MOMENTS) * bool(steps) + (self.average is not None)
        trained_count = copies * sum(prod(student.shapes[name]) for name in student.trained)
        return sum(prod(student.shapes[name]) for name in student.saved) + trained_count + len(steps)

    def _empty(self) -> dict[str, BlockTensor]:
        """Return all tensors of a checkpoint, without blocks."""
        shapes = self.student.shapes
        tensors = {f"{WEIGHT}{name}": BlockTensor.without_blocks(shapes[name]) for name in self.student.saved}
        for name in self.student.trained:
            for kind in self._kinds:
                tensors[_key(kind, name)] = BlockTensor.without_blocks(shapes[name])
        return tensors

    @property
    def _kinds(self) -> tuple[str, ...]:
        return WEIGHT, *MOMENTS, *[AVERAGE] * (self.average is not None)

    def _averages(self) -> dict[nn.Parameter, Tensor]:
        """Return the averages by their parameters. Each data rank has all of them."""
        averages = {} if self.average is None else self.average.tensors
        named = self.student.named_parameters()
        return {parameter: averages[name] for name, parameter in named if name in averages}

    def _buffers(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield the blocks that are not trained: corrections of router scores. Each data rank has all of them."""
        chunks = self.student.student
        return local_blocks(chunks.models, chunks.table, lambda one: None if isinstance(one, nn.Parameter) else one)

    def _steps(self, *, created: bool = False) -> dict[str, Any]:
        """Return the step number of each parameter's moments. Before the first step, the result is empty.

        created: whether this process has just created the moments. In this case, the result is not empty.
        """
        here = [float(entry.state["step"]) for entry in self.trained if "step" in entry.state]
        steps = {step for rank_steps in self.student.ranks.gather(sorted({*here})) for step in rank_steps}
        if not steps and not created:
            return {}
        step = torch.tensor(_only_value(steps))
        return {f"{MOMENT}{name}.step": step.clone() for name in self.student.trained}

    def _random(self) -> dict[str, Tensor]:
        """Return the states of the random generators, with equal names on the tensor ranks (see `TorchState`)."""
        ranks, device = self.student.ranks, self.student.device
        rank = ranks.rank - self.student.mesh.coordinate("tensor")
        states = {f"{RANDOM}cpu.{rank}": torch.get_rng_state()}
        if device.type == "cuda":
            states[f"{RANDOM}cuda.{rank}"] = torch.cuda.get_rng_state(device)
        return states


def _joined(tensors: Mapping[str, BlockTensor]) -> dict[str, BlockTensor]:
    """Return the tensors of which this process has blocks, with their regions filled."""
    held = {name: tensor for name, tensor in tensors.items() if tensor.blocks}
    for tensor in held.values():
        tensor.join()
    return held


def _key(kind: str, name: str) -> str:
    return f"{kind}{name}" if kind in (WEIGHT, AVERAGE) else f"{MOMENT}{name}.{kind}"


def _only_value(steps: Iterable[float]) -> float:
    values = {*steps}
    if len(values) != 1:
        raise ValueError(f"the moments have the step numbers {sorted(values)}: expected one for all parameters")
    return values.pop()
