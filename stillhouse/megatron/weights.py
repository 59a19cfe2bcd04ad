"""Maps the parameters of this rank's GPTModels to rectangular blocks of the full model's tensors, and loads them.

table = weight_table(chunks, config, Place.current())
require_coverage(from_all_ranks(table), shapes)     # a collective: each element exactly once over all ranks
for block, gradient in local_blocks(chunks, table, lambda parameter: parameter.main_grad):
    full[block.name][block.index] = gradient

A `ModelSource` loads weights into a decoder. So each chunk is loaded through a decoder that has the chunk's layers.
The decoder's tensors are sharded; a shard contains all blocks that this rank has of a tensor. A process never has
more in memory than its part of the model and one more tensor: the chunk's memory is freed before the decoder's memory
is allocated, and each tensor of the decoder is freed when it has been copied.
"""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import distribute_tensor
from transformers import PreTrainedConfig

from stillhouse.config import ConfigError
from stillhouse.megatron.families import (
    MTP_NAMES,
    Index,
    Piece,
    PieceRule,
    Shard,
    ShardedParameter,
    real_rows,
    require_family,
    vocabulary,
    whole_tensor,
)
from stillhouse.models import Decoder, ProofError
from stillhouse.models.checkpoint_names import save_as
from stillhouse.models.dtensors import local, shard_slices
from stillhouse.parallel import Mesh, ModelSource
from stillhouse.parallel.backbone_cut import require_cuttable
from stillhouse.parallel.stages import keep_layers

#: the errors that a source raises for weights that cannot be read or are wrong, on the ranks that need them
LOAD_ERRORS = (ProofError, ConfigError, ValueError, OSError)
#: the number of a chunk, and the name of a parameter in it
Key = tuple[int, str]

_EMBEDDING, _HEAD = "backbone.embed_tokens.weight", "head.linear.weight"
_LAYER = re.compile(r"(?:decoder|mtp)\.layers\.(\d+)\.(?:mtp_model_layer\.)?(.+)")
#: an expert's parameter: there is a module per expert, or a Transformer Engine module with a tensor per expert
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

    is_copy: whether the parameter is the last stage's copy of the embedding, for a tied head or MTP layers. The first
    stage has the same block, and only that block is saved.
    """

    chunk: int
    parameter: str
    local: Index
    name: str
    index: Index
    is_copy: bool = False

    @property
    def key(self) -> Key:
        return self.chunk, self.parameter


@dataclass(frozen=True)
class WeightTable:
    """All blocks of this rank.

    stage: the rank's pipeline coordinate.
    shapes: the parameters' shapes without padding of the vocabulary.
    """

    stage: int
    blocks: tuple[Block, ...]
    shapes: Mapping[Key, tuple[int, ...]]

    def part(self, keys: Iterable[Key]) -> "WeightTable":
        """Return the blocks of these parameters."""
        shapes = {key: self.shapes[key] for key in keys}
        return replace(self, blocks=tuple(block for block in self.blocks if block.key in shapes), shapes=shapes)

    def by_parameter(self) -> dict[Key, list[Block]]:
        """Return the blocks of each parameter. A vocabulary shard that has only padding rows has no block."""
        blocks: dict[Key, list[Block]] = {key: [] for key in self.shapes}
        for block in self.blocks:
            blocks[block.key].append(block)
        return blocks


def weight_table(chunks: Sequence[nn.Module], config: PreTrainedConfig, place: Place) -> WeightTable:
    """Return the blocks of this rank's chunks. Raises ValueError if a parameter is not among the family's names."""
    blocks: list[Block] = []
    shapes: dict[Key, tuple[int, ...]] = {}
    for number, chunk in enumerate(chunks):
        # a checkpoint also contains the corrections of router scores, which are buffers
        buffers = (named for named in chunk.named_buffers() if named[0].endswith(".expert_bias"))
        for parameter, tensor in (*chunk.named_parameters(), *buffers):
            shape = tuple(tensor.shape)
            is_head = parameter == "output_layer.weight" and bool(config.tie_word_embeddings)
            is_copy = is_head or (parameter == "embedding.word_embeddings.weight" and not chunk.pre_process)
            for region, name, index in _pieces(chunk, parameter, shape, config, place):
                blocks.append(Block(number, parameter, region, name, index, is_copy))
            if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
                shape = (real_rows(shape[0], place.tensor, config), *shape[1:])
            shapes[number, parameter] = shape
    return WeightTable(place.stage, tuple(blocks), shapes)


def _pieces(
    chunk: nn.Module, parameter: str, shape: Sequence[int], config: PreTrainedConfig, place: Place
) -> Iterator[Piece]:
    outside: dict[str, PieceRule] = {
        "embedding.word_embeddings.weight": (vocabulary, _EMBEDDING),
        "output_layer.weight": (vocabulary, _EMBEDDING if config.tie_word_embeddings else _HEAD),
        "decoder.final_layernorm.weight": (whole_tensor, "backbone.norm.weight"),
    }
    if parameter in outside:
        pieces, *names = outside[parameter]
        yield from pieces(ShardedParameter(names, shape, place.tensor, config))
        return
    in_layer = _LAYER.fullmatch(parameter)
    name = parameter if in_layer is None else in_layer[2]
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        name = f"mlp.experts.*.{expert['name']}"
    rule = {**MTP_NAMES, **require_family(config).names}.get(name)
    if rule is None or in_layer is None:
        raise ValueError(f"parameter '{parameter}' of Megatron-Core is unknown in a {config.model_type} model")
    if parameter.startswith("mtp."):
        prefix = f"mtp.layers.{in_layer[1]}.{'' if name in MTP_NAMES else 'mtp_block.'}"
    else:
        # Megatron-Core numbers the layers of all stages from 1
        layer = chunk.get_submodule(f"decoder.layers.{in_layer[1]}").layer_number - 1  # type: ignore[operator]
        prefix = f"backbone.layers.{layer}."
    pieces, *names = rule
    for region, relative, index in pieces(ShardedParameter(names, shape, place.tensor, config)):
        if expert is not None:
            first = place.expert.rank * config.num_local_experts // place.expert.size
            index = (first + int(expert["module"] or expert["tensor"]), *index)
        yield region, f"{prefix}{relative}", index


def require_coverage(tables: Sequence[WeightTable], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless the tables of all ranks cover each element of each tensor exactly once.

    Each table must also cover each element of its rank's parameters once, except vocabulary padding. Equal blocks of
    ranks of one stage count once, because these ranks are replicas.

    shapes: the shapes of all tensors of the full model
    """
    for rank, table in enumerate(tables):
        for key, blocks in table.by_parameter().items():
            what = f"parameter '{key[1]}' in chunk {key[0]} of rank {rank}"
            _require_partition(what, table.shapes[key], [block.local for block in blocks])
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
        what = f"tensor '{name}' of the last stage's copy" if is_copy else f"tensor '{name}'"
        _require_partition(what, tuple(shapes[name]), regions)


def from_all_ranks(item: Any) -> list[Any]:
    """Return the objects of all ranks, by rank. A collective of all ranks."""
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, item)
    return objects


def local_blocks(
    chunks: Sequence[nn.Module], table: WeightTable, value: Callable[[Tensor], Tensor | None]
) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block with a view of its part of a value.

    value: returns a tensor with the shape of the given parameter or buffer, or None to omit its blocks.
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
    """Return the full tensors on every rank. A collective of all ranks.

    value: see `local_blocks`.

    Raises ValueError if replicas of a block differ.
    """
    parts_here = [(block.name, block.index, part.detach()) for block, part in local_blocks(chunks, table, value)]
    full: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, index, part in (entry for parts in from_all_ranks(parts_here) for entry in parts):
        tensor = full.setdefault(name, part.new_full(tuple(shapes[name]), torch.nan))
        key = name, index_key(index)
        if key in seen and not torch.equal(tensor[index], part):
            raise ValueError(f"tensor '{name}': the copies of its part {index} differ between ranks")
        seen.add(key)
        tensor[index] = part
    return full


def tensor_of(chunk: nn.Module, name: str) -> Tensor:
    """Return a parameter or a buffer."""
    module, _, leaf = name.rpartition(".")
    return getattr(chunk.get_submodule(module), leaf)


def index_key(index: Index) -> tuple[tuple[int, int], ...]:
    """Return the start and stop in each dim. A slice cannot be hashed before Python 3.12."""
    return tuple((part, part + 1) if isinstance(part, int) else (part.start, part.stop) for part in index)


def _require_partition(what: str, shape: Sequence[int], regions: Iterable[Index]) -> None:
    """Raise ValueError unless each element of the shape is in exactly one region.

    The regions' borders divide the tensor into cells, so the cost does not depend on the tensor's size.
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


def load_from_source(
    chunks: Sequence[Any], table: WeightTable, source: ModelSource, decoder: Decoder, mesh: Mesh
) -> dict[Key, Tensor]:
    """Load the weights of this rank's chunks. A collective of all ranks.

    decoder: the full model without values. After the call, transformers saves it under the source's tensor names.

    Returns the unrounded values of rounded weights. Raises one of `LOAD_ERRORS` on all ranks, for example for weights
    that are missing or not finite.
    """
    meshes = [axis for axis in (mesh.weights["tensor"], mesh.experts["expert"]) if axis.size() > 1]
    shared, unrounded = decoder.shared_names(), dict[Key, Tensor]()
    with mesh.ranks.all_raise(*LOAD_ERRORS):
        for number, chunk in enumerate(chunks):
            chunk_table, part = table.part(key for key in table.shapes if key[0] == number), source.build()
            if not (chunk.pre_process and chunk.post_process):
                first_layer = chunk.decoder.layers[0].layer_number - 1  # Megatron-Core numbers layers from 1
                layers = range(first_layer, first_layer + len(chunk.decoder.layers))
                cut = require_cuttable(part.config)
                keep_layers(part, cut, layers, first=chunk.pre_process, last=chunk.post_process)
            if source.load_weights is not None:
                _shard(part, chunk_table.blocks, shared, meshes)
                for _, parameter in chunk_table.shapes:
                    tensor_of(chunk, parameter).untyped_storage().resize_(0)
                source.load_weights(part)
            unrounded |= copy_tensors(chunks, chunk_table, _freed_after_use(part, shared))
            save_as(decoder.pretrained, part.pretrained)
    return unrounded


@torch.no_grad()
def copy_tensors(
    chunks: Sequence[nn.Module], table: WeightTable, tensors: Iterable[tuple[str, Tensor]]
) -> dict[Key, Tensor]:
    """Copy tensors of the full model, or shards of them, into the parameters. Padding rows become zero.

    Returns the unrounded values of each trained parameter whose dtype rounds a value. Raises ValueError for a tensor
    that is missing or has another shape.
    """
    blocks: defaultdict[str, list[Block]] = defaultdict(list)
    for block in table.blocks:
        blocks[block.name].append(block)
    unrounded: dict[Key, Tensor] = {}
    untouched = {key: tensor_of(chunks[key[0]], key[1]) for key in table.shapes}
    for name, tensor in tensors:
        place = shard_slices(tensor)
        for block in blocks.pop(name, ()):
            if (parameter := untouched.pop(block.key, None)) is not None:
                _allocate_zeros(parameter)
            whole = tensor_of(chunks[block.chunk], block.parameter)
            target, within = whole[block.local], list[slice | int]()
            for part, shard in zip(block.index, place, strict=True):
                first = shard.start
                within.append(part - first if isinstance(part, int) else slice(part.start - first, part.stop - first))
            source = local(tensor)[tuple(within)]
            if source.shape != target.shape:
                raise ValueError(
                    f"tensor '{name}' has shape {tuple(tensor.shape)}: parameter '{block.parameter}' needs "
                    f"its part {block.index} with shape {tuple(target.shape)}"
                )
            target.copy_(source)
            if whole.requires_grad and block.key not in unrounded and not torch.equal(target.to(source), source):
                unrounded[block.key] = whole.to(source)
            if block.key in unrounded:
                unrounded[block.key][block.local] = source
    for name, (block, *_) in blocks.items():
        raise ValueError(f"there is no tensor '{name}', but parameter '{block.parameter}' needs it")
    for parameter in untouched.values():  # vocabulary shards that have only padding rows
        _allocate_zeros(parameter)
    return unrounded


def _allocate_zeros(parameter: Tensor) -> None:
    storage = parameter.untyped_storage()
    if not storage.nbytes():  # a storage with memory may belong to several parameters, so it is not resized
        storage.resize_(parameter.numel() * parameter.element_size())
    parameter.zero_()


def _freed_after_use(decoder: Decoder, shared: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the decoder's tensors under their names in the full model, and free the memory of each afterwards."""
    for name, tensor in decoder.state_dict().items():
        yield shared.get(name, name), tensor  # the last stage of a pipeline has its own copy of a tied head
        storage = local(tensor).untyped_storage()
        if storage.resizable():  # the memory of a mapped file is not resizable; the system frees it
            storage.resize_(0)


def _shard(
    decoder: Decoder, blocks: Sequence[Block], shared: Mapping[str, str], meshes: Sequence[DeviceMesh]
) -> None:
    """Replace each parameter of a decoder on the meta device by the smallest shard that has all of its blocks.

    shared: the names of tied weights in the full model, with their names in the blocks. meshes: meshes of one axis.
    """
    bounds: defaultdict[str, list[tuple[tuple[int, int], ...]]] = defaultdict(list)
    for block in blocks:
        bounds[block.name].append(index_key(block.index))
    tied = decoder.shared_names()
    for name, parameter in list(decoder.named_parameters()):
        whole = parameter.detach()
        # a tensor stays whole if this rank needs no part of it, or if no shard along one axis contains its blocks
        shards = [whole]
        for dim, bounds_of in enumerate(zip(*bounds[shared.get(name, name)], strict=True)):
            start, stop = min(first for first, _ in bounds_of), max(last for _, last in bounds_of)
            for mesh in meshes if stop - start < whole.shape[dim] else ():
                shard = distribute_tensor(whole, mesh, [dtensor.Shard(dim)], src_data_rank=None)
                place = shard_slices(shard)[dim]
                if place.start <= start and stop <= place.stop:
                    shards.append(shard)
        module, _, leaf = name.rpartition(".")
        smallest = min(shards, key=lambda shard: local(shard).numel())
        setattr(decoder.get_submodule(module), leaf, nn.Parameter(smallest, parameter.requires_grad))
    decoder.share(tied)
