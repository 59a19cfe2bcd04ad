"""Maps the parameters of this rank's GPTModels to the tensors of the full model, in rectangular blocks.

table = weight_table(chunks, config, Place.current())
require_full_coverage(table, shapes)                # a collective: each element exactly once over all ranks
for block, gradient in local_blocks(chunks, table, lambda parameter: parameter.main_grad):
    full[block.name][block.index] = gradient
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import PreTrainedConfig

from stillhouse.megatron.families import (
    MTP_NAMES,
    Index,
    Piece,
    PieceRule,
    Shard,
    real_rows,
    require_family,
    vocabulary,
    whole_tensor,
)

_EMBEDDING, _HEAD = "backbone.embed_tokens.weight", "head.linear.weight"
_LAYER = re.compile(r"(?:decoder|mtp)\.layers\.(\d+)\.(?:mtp_model_layer\.)?(.+)")
#: a module for each expert, or a tensor for each expert in one module of Transformer Engine
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<module>\d+)\.)?(?P<name>linear_fc[12]\.(?:weight_IO|shift_1O|weight))(?P<tensor>\d*)"
)


@dataclass(frozen=True)
class Place:
    """This process's place on Megatron-Core's axes."""

    stage: int = 0
    tensor: Shard = field(default_factory=Shard)
    expert: Shard = field(default_factory=Shard)

    @classmethod
    def current(cls) -> "Place":
        """Read the place from Megatron-Core's process groups."""
        groups = (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_model_parallel_group())
        shards = (Shard(group.rank(), group.size()) for group in groups)
        return cls(parallel_state.get_pipeline_model_parallel_rank(), *shards)


@dataclass(frozen=True)
class Block:
    """A rectangle of one parameter of this rank, and the same rectangle of a tensor of the full model.

    chunk: the number of the model chunk. is_copy: whether this is the last stage's copy of the embedding, as its tied
    head or for MTP layers, so that the block counts only on the first stage.
    """

    chunk: int
    parameter: str
    local: Index
    name: str
    index: Index
    is_copy: bool = False


@dataclass(frozen=True)
class WeightTable:
    """All blocks of this rank.

    stage: this rank's pipeline coordinate. shapes: the shape of each (chunk, parameter) without vocabulary padding.
    """

    stage: int
    blocks: tuple[Block, ...]
    shapes: Mapping[tuple[int, str], tuple[int, ...]]

    def in_chunk(self, number: int) -> "WeightTable":
        """Return the blocks of one chunk."""
        shapes = {key: shape for key, shape in self.shapes.items() if key[0] == number}
        return replace(self, blocks=tuple(block for block in self.blocks if block.chunk == number), shapes=shapes)


def weight_table(chunks: Sequence[nn.Module], config: PreTrainedConfig, place: Place) -> WeightTable:
    """Return the blocks of this rank's chunks. Raises ValueError for a parameter that the family's names lack."""
    blocks: list[Block] = []
    shapes: dict[tuple[int, str], tuple[int, ...]] = {}
    for number, chunk in enumerate(chunks):
        # a checkpoint also contains the corrections of router scores, which are buffers
        buffers = (named for named in chunk.named_buffers() if named[0].endswith(".expert_bias"))
        for parameter, tensor in (*chunk.named_parameters(), *buffers):
            shape = tuple(tensor.shape)
            is_head = parameter == "output_layer.weight" and bool(config.tie_word_embeddings)
            is_copy = is_head or (parameter == "embedding.word_embeddings.weight" and not chunk.pre_process)
            for local, name, index in _pieces(chunk, parameter, shape, config, place):
                blocks.append(Block(number, parameter, local, name, index, is_copy))
            if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
                shape = (real_rows(shape[0], place.tensor, config), *shape[1:])
            shapes[number, parameter] = shape
    return WeightTable(place.stage, tuple(blocks), shapes)


def _pieces(
    chunk: nn.Module, parameter: str, shape: Sequence[int], config: PreTrainedConfig, place: Place
) -> Iterator[Piece]:
    """Yield the pieces of a chunk's parameter."""
    outside: dict[str, PieceRule] = {
        "embedding.word_embeddings.weight": vocabulary(_EMBEDDING),
        "output_layer.weight": vocabulary(_EMBEDDING if config.tie_word_embeddings else _HEAD),
        "decoder.final_layernorm.weight": whole_tensor("backbone.norm.weight"),
    }
    if parameter in outside:
        yield from outside[parameter](shape, place.tensor, config)
        return
    in_layer = _LAYER.fullmatch(parameter)
    name = parameter if in_layer is None else in_layer[2]
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        name = f"mlp.experts.*.{expert['name']}"
    rule = {**MTP_NAMES, **require_family(config).names}.get(name)
    if rule is None or in_layer is None:
        raise ValueError(f"parameter '{parameter}' of Megatron-Core has no name in a {config.model_type} model")
    if parameter.startswith("mtp."):
        prefix = f"mtp.layers.{in_layer[1]}." + "mtp_block." * (name not in MTP_NAMES)
    else:
        # Megatron-Core counts the layers of all stages from 1
        layer = chunk.get_submodule(f"decoder.layers.{in_layer[1]}").layer_number - 1  # type: ignore[operator]
        prefix = f"backbone.layers.{layer}."
    for local, relative, index in rule(shape, place.tensor, config):
        if expert is not None:
            first = place.expert.rank * config.num_local_experts // place.expert.size
            index = (first + int(expert["module"] or expert["tensor"]), *index)
        yield local, f"{prefix}{relative}", index


def require_coverage(tables: Sequence[WeightTable], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless the tables of all ranks cover each element of each tensor exactly once.

    shapes: of all tensors of the full model. The blocks must also cover each element of each parameter once, except
    for vocabulary padding. Ranks of one pipeline stage may have the same blocks, because they are replicas.
    """
    for rank, table in enumerate(tables):
        regions_of_parameter: dict[tuple[int, str], list[Index]] = {key: [] for key in table.shapes}
        for block in table.blocks:
            regions_of_parameter[block.chunk, block.parameter].append(block.local)
        for (chunk, parameter), regions in regions_of_parameter.items():
            what = f"parameter '{parameter}' in chunk {chunk} of rank {rank}"
            _require_partition(what, table.shapes[chunk, parameter], regions)
    counts: Counter[tuple[str, int, tuple[Any, ...], bool]] = Counter()
    indices: dict[tuple[Any, ...], Index] = {}
    for table in tables:
        counts |= Counter((block.name, table.stage, index_key(block.index), block.is_copy) for block in table.blocks)
        indices |= {index_key(block.index): block.index for block in table.blocks}
    regions_of: dict[tuple[str, bool], list[Index]] = {(name, False): [] for name in shapes}
    for (name, _, key, is_copy), count in counts.items():
        if name not in shapes:
            raise ValueError(f"tensor '{name}' of Megatron-Core's model is absent in the full model")
        regions_of.setdefault((name, is_copy), []).extend(count * [indices[key]])
    for (name, is_copy), regions in regions_of.items():
        _require_partition(f"tensor '{name}'" + " of the last stage's copy" * is_copy, tuple(shapes[name]), regions)


def require_full_coverage(table: WeightTable, shapes: Mapping[str, Sequence[int]]) -> None:
    """Like `require_coverage`, for this rank's table and those of all other ranks. A collective of all ranks."""
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, table)
    require_coverage(tables, shapes)


def local_blocks(
    chunks: Sequence[nn.Module], table: WeightTable, value: Callable[[Tensor], Tensor | None]
) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block with its part of a parameter's value, a view.

    value: returns a tensor of the parameter's shape, or None to leave the parameter out. A family with corrections of
    router scores has buffers among its parameters, which have no gradient.
    """
    for block in table.blocks:
        tensor = value(tensor_of(chunks[block.chunk], block.parameter))
        if tensor is not None:
            yield block, tensor[block.local]


def gather(
    chunks: Sequence[nn.Module],
    table: WeightTable,
    shapes: Mapping[str, Sequence[int]],
    value: Callable[[Tensor], Tensor | None],
) -> dict[str, Tensor]:
    """Return the full tensors on every rank, for models that fit into the memory of one process.

    A collective of all ranks. Raises ValueError if replicas of a block differ.
    """
    local = [(block.name, block.index, part.detach()) for block, part in local_blocks(chunks, table, value)]
    rank_parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rank_parts, local)
    full: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, index, part in (entry for parts in rank_parts for entry in parts):
        tensor = full.setdefault(name, part.new_full(tuple(shapes[name]), torch.nan))
        key = name, index_key(index)
        if key in seen and not torch.equal(tensor[index], part):
            raise ValueError(f"tensor '{name}': the copies of its part {index} differ between ranks")
        seen.add(key)
        tensor[index] = part
    return full


def tensor_of(chunk: nn.Module, name: str) -> Tensor:
    module, _, leaf = name.rpartition(".")
    return getattr(chunk.get_submodule(module), leaf)


def index_key(index: Index) -> tuple[tuple[int, int], ...]:
    """Return the start and stop in each dim. A slice cannot be hashed before Python 3.12."""
    return tuple((part, part + 1) if isinstance(part, int) else (part.start, part.stop) for part in index)


def _require_partition(what: str, shape: Sequence[int], regions: Iterable[Index]) -> None:
    """Raise ValueError unless each element of the shape is in exactly one region.

    The regions' borders divide the tensor into cells, so that its size does not matter.
    """
    bounds = [index_key(region) for region in regions]
    borders = [
        sorted({0, size, *(bound for region in bounds for bound in region[dim])}) for dim, size in enumerate(shape)
    ]
    counts = torch.zeros([len(border) - 1 for border in borders], dtype=torch.int64)
    for region in bounds:
        cells = (
            slice(bisect_left(border, start), bisect_left(border, stop))
            for border, (start, stop) in zip(borders, region, strict=True)
        )
        counts[tuple(cells)] += 1
    inside = tuple(slice(0, bisect_left(border, size)) for border, size in zip(borders, shape, strict=True))
    if int(counts.sum()) != int(counts[inside].sum()):
        raise ValueError(f"{what} of shape {tuple(shape)}: a block is outside; expected blocks within the shape")
    for cell in (counts[inside] != 1).nonzero().tolist():
        element = tuple(border[number] for border, number in zip(borders, cell, strict=True))
        raise ValueError(
            f"{what} of shape {tuple(shape)}: element {element} is in {int(counts[tuple(cell)])} blocks; expected "
            "exactly one"
        )
