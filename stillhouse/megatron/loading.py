"""Reads the weights of a model into Megatron-Core's chunks. A process reads only what its chunks have.

A `ModelSource` loads weights into a decoder. So each chunk is loaded through a decoder that has the chunk's layers,
in shards that contain all blocks that this rank has of a tensor. A process never has more than its part of the model
and one further tensor: the chunk's memory is returned before the decoder's is allocated, whose tensors are freed one
by one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from stillhouse.config import ConfigError
from stillhouse.megatron.weights import Block, WeightTable, index_key, tensor_of
from stillhouse.models import Decoder, ProofError
from stillhouse.models.checkpoint_names import save_as
from stillhouse.models.dtensors import local, shard_slices
from stillhouse.parallel import Mesh, ModelSource
from stillhouse.parallel.backbone_cut import require_cuttable
from stillhouse.parallel.stages import keep_layers

#: what a source raises for weights that cannot be read or are wrong, on the ranks that need them
LOAD_ERRORS = (ProofError, ConfigError, ValueError, OSError)
#: the number of a chunk, and the name of a parameter in it
Key = tuple[int, str]


def load_from_source(
    chunks: Sequence[Any], table: WeightTable, source: ModelSource, decoder: Decoder, mesh: Mesh
) -> dict[Key, Tensor]:
    """Load the weights of this rank's chunks. A collective of all ranks of the mesh.

    decoder: the full model without values, which transformers saves under the names of the files from now on.
    Returns the parameters that `copy_tensors` has rounded.
    Raises one of `LOAD_ERRORS` on all ranks, for example for weights that are missing or not finite.
    """
    meshes = [axis for axis in (mesh.weights["tensor"], mesh.experts["expert"]) if axis.size() > 1]
    shared, unrounded = decoder.shared_names(), dict[Key, Tensor]()
    with mesh.ranks.all_raise(*LOAD_ERRORS):
        for number, chunk in enumerate(chunks):
            chunk_table, part = table.in_chunk(number), source.build()
            if not (chunk.pre_process and chunk.post_process):
                first_layer = chunk.decoder.layers[0].layer_number - 1  # Megatron-Core counts from 1
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

    tensors: each with its name. Raises ValueError for a tensor of another shape, and if one is missing.
    Returns the parameters with a gradient whose dtype rounds a value, with the values as they are, in the tensors'
    dtype.
    """
    blocks: defaultdict[str, list[Block]] = defaultdict(list)
    for block in table.blocks:
        blocks[block.name].append(block)
    unrounded: dict[Key, Tensor] = {}
    untouched = {key: tensor_of(chunks[key[0]], key[1]) for key in table.shapes}
    for name, tensor in tensors:
        place = shard_slices(tensor)
        for block in blocks.pop(name, ()):
            key = block.chunk, block.parameter
            if (parameter := untouched.pop(key, None)) is not None:
                _allocate_zeros(parameter)
            target = tensor_of(chunks[block.chunk], block.parameter)[block.local]
            within = tuple(
                part - shard.start
                if isinstance(part, int)
                else slice(part.start - shard.start, part.stop - shard.start)
                for part, shard in zip(block.index, place, strict=True)
            )
            source = local(tensor)[within]
            if source.shape != target.shape:
                raise ValueError(
                    f"tensor '{name}' has shape {tuple(tensor.shape)}: parameter '{block.parameter}' needs "
                    f"its part {block.index} with shape {tuple(target.shape)}"
                )
            target.copy_(source)
            whole = tensor_of(chunks[block.chunk], block.parameter)
            if whole.requires_grad and key not in unrounded and not torch.equal(target.to(source), source):
                unrounded[key] = whole.to(source)
            if key in unrounded:
                unrounded[key][block.local] = source
    for name, (block, *_) in blocks.items():
        raise ValueError(f"there is no tensor '{name}', and parameter '{block.parameter}' needs it")
    for parameter in untouched.values():  # shards of the vocabulary that have only padding rows
        _allocate_zeros(parameter)
    return unrounded


def _allocate_zeros(parameter: Tensor) -> None:
    """Fill a parameter with zeros, after allocating its memory if that has been returned."""
    storage = parameter.untyped_storage()
    if not storage.nbytes():  # otherwise it may also have other parameters
        storage.resize_(parameter.numel() * parameter.element_size())
    parameter.zero_()


def _freed_after_use(decoder: Decoder, shared: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the decoder's tensors under their names in the full model, and free the memory of each afterwards."""
    for name, tensor in decoder.state_dict().items():
        yield shared.get(name, name), tensor  # the last stage of a pipeline has its own copy of a tied head
        storage = local(tensor).untyped_storage()
        if storage.resizable():  # not pages of a file, which the system frees itself
            storage.resize_(0)


def _shard(
    decoder: Decoder, blocks: Sequence[Block], shared: Mapping[str, str], meshes: Sequence[DeviceMesh]
) -> None:
    """Replace each parameter of a decoder on the meta device by the smallest shard that has all blocks of it.

    shared: the names of tied weights in the full model, each with the name in the blocks. meshes: of one axis each.
    """
    bounds: defaultdict[str, list[tuple[tuple[int, int], ...]]] = defaultdict(list)
    for block in blocks:
        bounds[block.name].append(index_key(block.index))
    tied = decoder.shared_names()
    for name, parameter in list(decoder.named_parameters()):
        by_dim = [[*zip(*bounds_of, strict=True)] for bounds_of in zip(*bounds[shared.get(name, name)], strict=True)]
        region = [(min(starts), max(stops)) for starts, stops in by_dim]
        shard = _smallest_shard(parameter.detach(), region, meshes)
        module, _, leaf = name.rpartition(".")
        setattr(decoder.get_submodule(module), leaf, nn.Parameter(shard, parameter.requires_grad))
    decoder.share(tied)


def _smallest_shard(tensor: Tensor, region: Sequence[tuple[int, int]], meshes: Sequence[DeviceMesh]) -> Tensor:
    """Return the smallest shard of a tensor that has a region; the whole tensor if no shard along one axis has it.

    region: start and stop in each dim; empty if this rank needs nothing of the tensor.
    """
    shards = [tensor]
    for dim, (start, stop) in enumerate(region):
        for mesh in meshes if stop - start < tensor.shape[dim] else ():
            shard = distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)
            place = shard_slices(shard)[dim]
            if place.start <= start and stop <= place.stop:
                shards.append(shard)
    return min(shards, key=lambda shard: local(shard).numel())
