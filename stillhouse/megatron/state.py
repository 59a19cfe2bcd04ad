"""The state of `MegatronEngine` as named tensors, the same as those of `TorchEngine` (see `state_folder.py`).

A tensor of the full model consists of rectangular blocks on the processes (`weights.py`). DCP writes and reads such a
tensor by the protocol that `BlockTensor` implements. So a run may change its layout, and its engine, when it resumes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from stillhouse.engine.optimizer import empty_state
from stillhouse.engine.state_folder import AVERAGE, MOMENT, RANDOM, WEIGHT, read_in_place, require_fit, stored_tensors
from stillhouse.megatron.optimizer_shards import MOMENTS, TrainedParameter
from stillhouse.megatron.student import MegatronStudent
from stillhouse.megatron.weights import Block, local_blocks
from stillhouse.signals import WeightAverage


class BlockTensor(Tensor):
    """A tensor of the full model, without memory, of which this process has some blocks. DCP needs a tensor here.

    blocks: parts of parameters or moments, by their first element's place. offsets, region: the rectangle that the
    blocks fill, since a file has at most one part of a tensor; a copy, unless there is only one block.
    """

    blocks: dict[tuple[int, ...], Tensor]
    offsets: tuple[int, ...]
    region: Tensor

    @classmethod
    def without_blocks(cls, shape: Sequence[int]) -> "BlockTensor":
        tensor = torch.zeros(()).expand(tuple(shape)).as_subclass(cls)  # DCP allocates tensors on "meta"
        tensor.blocks = {}
        return tensor

    def include(self, block: Block, part: Tensor) -> None:
        """Add a block. A number in the index removes a dim, which the part gets again."""
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
    """trained: the student's parameters with the optimizer's shards. average: of the weights, if there is one.

    A kind is WEIGHT, AVERAGE or the name of a moment. Of each kind, one data rank writes a parameter's tensors.
    """

    student: MegatronStudent
    trained: Sequence[TrainedParameter]
    average: WeightAverage | None = None

    def tensors(self) -> dict[str, Any]:
        """Return this process's blocks and its random state, by name. The copy of a tied embedding is left out.

        A collective of all processes.
        """
        held, steps, averages = self._empty(), self._steps(), self._averages()
        for block, weight in self._buffers():
            held[f"{WEIGHT}{block.name}"].include(block, weight)
        for entry in self.trained:
            for kind in (WEIGHT, *MOMENTS) if steps else (WEIGHT,):
                full = entry.collect(entry.values(kind))
                if full is not None:
                    _include(held, entry, kind, full, copies=False)
            if entry.is_owner and averages:
                _include(held, entry, AVERAGE, averages[entry.parameter], copies=False)
        return _joined(held) | steps | self._random()

    def parameters_without_moments(self) -> list[str]:
        return [] if self._steps() else self.student.trained

    def read(self, folder: Path, without_moments: Sequence[str]) -> None:
        """Restore the weights, moments and random state that any layout of either engine wrote.

        Raises ValueError for the state of another model, or if parameters had no moments.
        """
        if without_moments:
            raise ValueError(
                f"{folder.parent}: '{without_moments[0]}' never had a gradient, so it has no moments there; "
                "expected a run in which all parameters are trained, with parallel.engine: megatron"
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
                full[entry.key, kind] = torch.zeros(entry.parameter.shape, device=entry.parameter.device)
                _include(wanted, entry, kind, full[entry.key, kind], copies=True)
        for block, buffer in self._buffers():
            wanted[f"{WEIGHT}{block.name}"].include(block, buffer)
        here = _joined(wanted)
        random = {name: value for name, value in self._random().items() if name in stored}
        read_in_place(folder, here | steps | random)
        for tensor in here.values():
            tensor.spread()
        self._restore(full, _only_value(map(float, steps.values())))
        for name, value in random.items():
            torch.set_rng_state(value) if name.startswith(f"{RANDOM}cpu") else torch.cuda.set_rng_state(value)

    def not_finite(self) -> list[str]:
        """Return the first element that is not finite of each of this process's weights and moments."""
        return [
            _name_of_element(entry, int(places[0]))
            for entry in self.trained
            for kind in (WEIGHT, *(moment for moment in MOMENTS if moment in entry.state))
            if len(places := (~entry.values(kind).isfinite()).nonzero())
        ]

    def bytes_to_write(self, *, all_moments: bool = False) -> int:
        """As `TorchState.bytes_to_write`."""
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
        """Return all tensors of the full model that a checkpoint has, without blocks."""
        shapes = self.student.shapes
        tensors = {f"{WEIGHT}{name}": BlockTensor.without_blocks(shapes[name]) for name in self.student.saved}
        for name in self.student.trained:
            for kind in self._kinds:
                tensors[_key(kind, name)] = BlockTensor.without_blocks(shapes[name])
        return tensors

    @property
    def _kinds(self) -> tuple[str, ...]:
        return WEIGHT, *MOMENTS, *[AVERAGE] * (self.average is not None)

    @torch.no_grad()
    def _restore(self, full: Mapping[tuple[Any, str], Tensor], step: float) -> None:
        averages = self._averages()
        for entry in self.trained:
            for kind in self._kinds:
                tensor = entry.spread(full.get((entry.key, kind)))
                if kind == WEIGHT:
                    entry.parameter.copy_(tensor)
                if kind == AVERAGE:
                    averages[entry.parameter].copy_(tensor)
                elif entry.optimizer is not None:
                    entry.values(kind).copy_(entry.on_rank(tensor))
            if entry.optimizer is not None:
                entry.state["step"].fill_(step)

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
        """Return the number of steps that each parameter's moments are of; nothing before the first step.

        created: the state was created here, also on ranks that have no element of a parameter.
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
    """Return the tensors of which this process has blocks, with their regions."""
    held = {name: tensor for name, tensor in tensors.items() if tensor.blocks}
    for tensor in held.values():
        tensor.join()
    return held


def _key(kind: str, name: str) -> str:
    """Return the name of a tensor in the state's folder."""
    return f"{kind}{name}" if kind in (WEIGHT, AVERAGE) else f"{MOMENT}{name}.{kind}"


def _include(
    held: Mapping[str, BlockTensor], entry: TrainedParameter, kind: str, full: Tensor, *, copies: bool
) -> None:
    """Add the blocks of a parameter's tensor. copies: also those of a tied weight's copy."""
    for block in entry.blocks:
        if copies or not block.is_copy:
            held[_key(kind, block.name)].include(block, full[block.local])


def _name_of_element(entry: TrainedParameter, number: int) -> str:
    """Return the tensor of the full model that has one of this rank's elements of a parameter."""
    element = torch.unravel_index(torch.tensor(entry.elements.start + number), entry.parameter.shape)
    for block in entry.blocks:
        local: Any = block.local
        if all(part.start <= int(index) < part.stop for part, index in zip(local, element, strict=True)):
            return block.name
    return entry.key[1]


def _only_value(steps: Iterable[float]) -> float:
    values = {*steps}
    if len(values) != 1:
        raise ValueError(f"the moments are of {sorted(values)} steps: expected one number for all parameters")
    return values.pop()
