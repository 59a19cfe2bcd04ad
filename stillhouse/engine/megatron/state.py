"""The state of `MegatronEngine` as named tensors, the same as those of `TorchEngine` (see `state_folder.py`).

    state = MegatronState(student, optimizer)
    write_state(folder, state.tensors(), student.ranks)       each process writes its own blocks

A tensor of the full model consists of rectangular blocks on the processes (`weights.py`). DCP writes and reads such a
tensor by the protocol that `BlockTensor` implements. So a run may change its layout, and its engine, when it resumes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from stillhouse.engine.megatron.student import MegatronStudent
from stillhouse.engine.megatron.weights import Block, local_blocks
from stillhouse.engine.optimizer import empty_state
from stillhouse.engine.state_folder import AVERAGE, MOMENT, RANDOM, WEIGHT, read_in_place, require_fit, stored_tensors
from stillhouse.signals.weight_average import WeightAverage

MOMENTS = ("exp_avg", "exp_avg_sq")


class BlockTensor(Tensor):
    """A tensor of the full model, without memory, of which this process has some blocks. DCP needs a tensor here.

    blocks: parts of parameters or moments, by their first element's place. offsets, region: the rectangle that the
    blocks fill, since a file has at most one part of a tensor; a copy, unless there is only one block.
    """

    blocks: dict[tuple[int, ...], Tensor]
    offsets: tuple[int, ...]
    region: Tensor

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> "BlockTensor":
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
        shape = [max(of_dim) - start for of_dim, start in zip(ends, self.offsets, strict=True)]
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

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.region.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.region)
        data = TensorWriteData(self._chunk, properties, torch.Size(self.shape))
        return [WriteItem(MetadataIndex(name, self._chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.region


@dataclass(frozen=True)
class MegatronState:
    """optimizer: Megatron-Core's, whose parts are AdamW of torch. average: of the weights, if there is one."""

    student: MegatronStudent
    optimizer: Any
    average: WeightAverage | None = None

    def tensors(self) -> dict[str, Any]:
        """Return this process's blocks and its random state, by name. The copy of a tied embedding is left out."""
        held = _joined(self._blocks(copies=False))
        return held | self._steps() | self._random()

    def parameters_without_moments(self) -> list[str]:
        return [] if self._steps() else self._trained()

    def read(self, folder: Path, without_moments: Sequence[str]) -> None:
        """Restore the weights, moments and random state that any layout of either engine wrote.

        Raises ValueError for the state of another model, or if parameters had no moments.
        """
        if without_moments:
            raise ValueError(
                f"{folder.parent}: '{without_moments[0]}' never had a gradient, so it has no moments there; "
                "expected a run in which all parameters are trained, with parallel.engine: megatron"
            )
        for part, parameter in self._parameters():
            part.state[parameter] = empty_state(part, parameter)
        stored, wanted, steps = stored_tensors(folder), self._blocks(copies=True), self._steps()
        require_fit(folder.parent, stored, wanted | steps, is_complete=True)
        here = _joined(wanted)
        random = {name: value for name, value in self._random().items() if name in stored}
        read_in_place(folder, here | steps | random)
        for tensor in here.values():
            tensor.spread()
        for part, parameter in self._parameters():
            part.state[parameter]["step"].fill_(_only_value(steps))
        for name, value in random.items():
            torch.set_rng_state(value) if name.startswith(f"{RANDOM}cpu") else torch.cuda.set_rng_state(value)

    def bytes_to_write(self) -> int:
        """As `TorchState.bytes_to_write`."""
        tensors = self._blocks(copies=False)
        names = [
            name
            for name, tensor in tensors.items()
            if not all(bool(part.isfinite().all()) for part in tensor.blocks.values())
        ]
        names = sorted({name for of_rank in self.student.ranks.gather(names) for name in of_rank})
        if names:
            raise ValueError(
                f"'{names[0]}' is not finite after the update, so no checkpoint of it is written. The last "
                "checkpoint is intact. The usual remedy is a run in another folder with a lower train.learning_rate"
            )
        weights = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
        return sum(
            prod(tensor.shape) * tensor.dtype.itemsize for held in (tensors, weights) for tensor in held.values()
        )

    def element_count(self) -> int:
        """Return the number of elements in the weights and moments of all processes."""
        return sum(prod(tensor.shape) for tensor in (self._blocks(copies=False) | self._steps()).values())

    def _blocks(self, *, copies: bool) -> dict[str, BlockTensor]:
        """Return all tensors of the full model with this process's blocks. copies: those of tied weights, too."""
        shapes = self.student.shapes
        names = [f"{WEIGHT}{name}" for name in shapes]
        names += [f"{MOMENT}{name}.{moment}" for name in self._trained() for moment in MOMENTS]
        if self.average is not None:
            names += [f"{AVERAGE}{name}" for name in self._trained()]
        tensors: dict[str, BlockTensor] = {}
        for key in names:
            name = key.removeprefix(WEIGHT).removeprefix(MOMENT).removeprefix(AVERAGE)
            shape = shapes[name] if name in shapes else shapes[name.rpartition(".")[0]]
            tensors[key] = BlockTensor.of_shape(shape)
        states = {parameter: part.state.get(parameter, {}) for part, parameter in self._parameters()}
        for block, weight in self._local(lambda parameter: parameter.detach()):
            if copies or not block.is_copy:
                tensors[f"{WEIGHT}{block.name}"].include(block, weight)
        for moment in MOMENTS:
            for block, value in self._local(lambda parameter, key=moment: states.get(parameter, {}).get(key)):
                if copies or not block.is_copy:
                    tensors[f"{MOMENT}{block.name}.{moment}"].include(block, value)
        averages = self._averages()
        for block, value in self._local(averages.get):
            if copies or not block.is_copy:
                tensors[f"{AVERAGE}{block.name}"].include(block, value)
        return tensors

    def _averages(self) -> dict[Tensor, Tensor]:
        """Return the averages by their parameters."""
        of_names = {} if self.average is None else self.average.tensors
        named = self.student.named_parameters()
        return {parameter: of_names[name] for name, parameter in named if name in of_names}

    def _local(self, value: Any) -> Iterator[tuple[Block, Tensor]]:
        chunks = self.student.student
        return local_blocks(chunks.models, chunks.table, value)

    def _parameters(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        """Yield each parameter with the part of the optimizer that trains it."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.param_groups:
                for parameter in group["params"]:
                    yield part.optimizer, parameter

    def _trained(self) -> list[str]:
        """Return the names of the trained parameters. The corrections of router scores are not trained."""
        return [name for name in self.student.shapes if not name.endswith("e_score_correction_bias")]

    def _steps(self) -> dict[str, Any]:
        """Return the number of steps that each parameter's moments are of; nothing before the first step."""
        part, parameter = next(self._parameters())
        if parameter not in part.state:
            return {}
        return {f"{MOMENT}{name}.step": part.state[parameter]["step"].clone() for name in self._trained()}

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


def _only_value(steps: Mapping[str, Tensor]) -> float:
    """Raises ValueError if parameters made different numbers of steps."""
    values = {float(step) for step in steps.values()}
    if len(values) != 1:
        raise ValueError(f"the moments are of {sorted(values)} steps: expected one number for all parameters")
    return values.pop()
