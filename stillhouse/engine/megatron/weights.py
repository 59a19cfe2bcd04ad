"""Maps the parameters of this rank's GPTModels to the tensors of the full model, in rectangular blocks.

    table = weight_table(chunks, config, Place.current())
    require_full_coverage(table, shapes)                # a collective: each element exactly once over all ranks
    load(chunks, table, tensors)                        # tensors: a name of the full model -> its tensor
    for block, gradient in local_blocks(chunks, table, lambda parameter: parameter.main_grad):
        full[block.name][block.index] = gradient

The names are those of `Decoder.state_dict()`, so that both engines have the same checkpoints and exports. The table
serves weights, gradients and moments, because blocks are only copied. Megatron-Core stores the rows of queries, keys
and values by query group, gate and up projection in one tensor, and one tensor per expert; transformers stores the
experts of a layer in one tensor. A shard of the vocabulary may end with padding rows, which no block contains.

V vocabulary, D width, F width of a feed-forward network, E experts.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import PreTrainedConfig

from stillhouse.engine.megatron.model_config import head_width, require_family

#: the part of a tensor in each dim; a number removes the dim
Index = tuple[slice | int, ...]
#: (part of the parameter, name in the full model, part of the full tensor)
Piece = tuple[Index, str, Index]


@dataclass(frozen=True)
class Block:
    """A rectangle of one parameter of this rank, and the same rectangle of a tensor of the full model.

    chunk: the number of the model chunk. is_copy: whether this is the last stage's copy of a tied embedding, so that
    the block counts only on the first stage.
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


@dataclass(frozen=True)
class Shard:
    """The rank of a process among the `size` processes that share a tensor."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Place:
    """This process's place on Megatron-Core's axes. expert_tensor: the shard of each expert's weights."""

    stage: int = 0
    tensor: Shard = field(default_factory=Shard)
    expert: Shard = field(default_factory=Shard)
    expert_tensor: Shard = field(default_factory=Shard)

    @classmethod
    def current(cls) -> "Place":
        """Read the place from Megatron-Core's process groups."""
        groups = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        )
        shards = (Shard(group.rank(), group.size()) for group in groups)
        return cls(parallel_state.get_pipeline_model_parallel_rank(), *shards)


class Rule(Protocol):
    """How a parameter's rectangles lie in tensors of the full model. shape: that of the parameter on this rank."""

    def pieces(self, shape: Sequence[int], shard: Shard, config: PreTrainedConfig) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class Whole:
    """Each rank has the full tensor."""

    name: str

    def pieces(self, shape: Sequence[int], shard: Shard, config: PreTrainedConfig) -> Iterator[Piece]:
        yield _rows(0, shape[0], shape), self.name, _rows(0, shape[0], shape)


@dataclass(frozen=True)
class Columns:
    """The full tensor is sharded along its second dim."""

    name: str

    def pieces(self, shape: Sequence[int], shard: Shard, config: PreTrainedConfig) -> Iterator[Piece]:
        rows, columns = shape
        index = slice(0, rows), slice(shard.rank * columns, (shard.rank + 1) * columns)
        yield _rows(0, rows, shape), self.name, index


@dataclass(frozen=True)
class Rows:
    """This rank's rows of each of the tensors, one tensor after the other."""

    names: tuple[str, ...]

    def pieces(self, shape: Sequence[int], shard: Shard, config: PreTrainedConfig) -> Iterator[Piece]:
        rows = shape[0] // len(self.names)
        for number, name in enumerate(self.names):
            local = _rows(number * rows, (number + 1) * rows, shape)
            yield local, name, _rows(shard.rank * rows, (shard.rank + 1) * rows, shape)


@dataclass(frozen=True)
class LatentRows:
    """This rank's rows of a projection to latent vectors; with Transformer Engine, each rank has all rows.

    sizes: the configuration's keys whose sum is the number of all rows.
    """

    name: str
    sizes: tuple[str, ...]

    def pieces(self, shape: Sequence[int], shard: Shard, config: PreTrainedConfig) -> Iterator[Piece]:
        has_all = shape[0] == sum(getattr(config, size) for size in self.sizes)
        return Rows((self.name,)).pieces(shape, Shard() if has_all else shard, config)


@dataclass(frozen=True)
class QueryGroups:
    """For each query group of this rank: the rows of its queries, of its key and of its value."""

    query: str
    key: str
    value: str

    def pieces(self, shape: Sequence[int], shard: Shard, config: PreTrainedConfig) -> Iterator[Piece]:
        width, groups = head_width(config), config.num_key_value_heads // shard.size
        queries = config.num_attention_heads // config.num_key_value_heads
        start = 0
        for group in range(shard.rank * groups, (shard.rank + 1) * groups):
            for name, heads in ((self.query, queries), (self.key, 1), (self.value, 1)):
                rows = heads * width
                yield (
                    _rows(start, start + rows, shape),
                    name,
                    _rows(group * rows, (group + 1) * rows, shape),
                )
                start += rows


@dataclass(frozen=True)
class Vocabulary:
    """The rows of the vocabulary are sharded; the last rows may be padding."""

    name: str

    def pieces(self, shape: Sequence[int], shard: Shard, config: PreTrainedConfig) -> Iterator[Piece]:
        start = shard.rank * shape[0]
        real = _real_rows(shape[0], shard, config)
        if real:
            yield _rows(0, real, shape), self.name, _rows(start, start + real, shape)


@dataclass(frozen=True)
class ExpertGateUp:
    """One expert's gate and up projection [2F, D], which are in one tensor [E, 2F, D] of the full model."""

    name: str

    def pieces(self, shape: Sequence[int], shard: Shard, config: PreTrainedConfig) -> Iterator[Piece]:
        rows = shape[0] // 2
        for number in range(2):
            start = (number * shard.size + shard.rank) * rows
            yield _rows(number * rows, (number + 1) * rows, shape), self.name, _rows(start, start + rows, shape)


#: the parameters of a layer, by Megatron-Core's names; names of the full model are relative to the layer.
#: Transformer Engine has the norms of a projection's input in the projection
_DENSE: dict[str, Rule] = {
    "input_layernorm.weight": Whole("input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": Whole("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": QueryGroups(
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
    ),
    "self_attention.linear_qkv.bias": QueryGroups(
        "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
    ),
    "self_attention.q_layernorm.weight": Whole("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": Whole("self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": Columns("self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": Whole("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": Whole("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": Rows(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": Columns("mlp.down_proj.weight"),
}
#: the parameters of an expert have a * for its number
_EXPERTS: dict[str, Rule] = {
    "mlp.router.weight": Whole("mlp.gate.weight"),
    "mlp.experts.*.linear_fc1.weight": ExpertGateUp("mlp.experts.gate_up_proj"),
    "mlp.experts.*.linear_fc2.weight": Columns("mlp.experts.down_proj"),
}
#: DeepSeek's latent attention, the correction of its router's scores, and its shared experts
_LATENT: dict[str, Rule] = {
    "self_attention.linear_q_down_proj.weight": LatentRows("self_attn.q_a_proj.weight", ("q_lora_rank",)),
    "self_attention.q_layernorm.weight": Whole("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": Whole("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": Rows(("self_attn.q_b_proj.weight",)),
    "self_attention.linear_kv_down_proj.weight": LatentRows(
        "self_attn.kv_a_proj_with_mqa.weight", ("kv_lora_rank", "qk_rope_head_dim")
    ),
    "self_attention.kv_layernorm.weight": Whole("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": Whole("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": Rows(("self_attn.kv_b_proj.weight",)),
    "mlp.router.expert_bias": Whole("mlp.gate.e_score_correction_bias"),
    "mlp.shared_experts.linear_fc1.weight": Rows(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
    ),
    "mlp.shared_experts.linear_fc2.weight": Columns("mlp.shared_experts.down_proj.weight"),
}
#: Gemma 3 has four norms in a layer; the names of the second and third differ in meaning from those of other families
_GEMMA: dict[str, Rule] = {
    "self_attention.linear_proj.post_norm.weight": Whole("post_attention_layernorm.weight"),
    "pre_mlp_layernorm.weight": Whole("pre_feedforward_layernorm.weight"),
    "mlp.linear_fc2.post_norm.weight": Whole("post_feedforward_layernorm.weight"),
}
#: by transformers' model type
NAMES: dict[str, Mapping[str, Rule]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": _DENSE | _EXPERTS,
    "deepseek_v3": _DENSE | _EXPERTS | _LATENT,
    "gemma3_text": _DENSE | _GEMMA,
}

_EMBEDDING, _HEAD = "backbone.embed_tokens.weight", "head.linear.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
#: a module for each expert, or a tensor for each expert in one module of Transformer Engine
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<module>\d+)\.)?(?P<name>linear_fc[12]\.weight)(?P<tensor>\d*)"
)


def weight_table(chunks: Sequence[nn.Module], config: PreTrainedConfig, place: Place) -> WeightTable:
    """Return the blocks of this rank's chunks. Raises ValueError for a parameter that the family's names lack."""
    require_family(config)
    blocks: list[Block] = []
    shapes: dict[tuple[int, str], tuple[int, ...]] = {}
    for number, chunk in enumerate(chunks):
        for parameter, tensor in _named_tensors(chunk):
            shape = tuple(tensor.shape)
            is_copy = parameter == "output_layer.weight" and bool(config.tie_word_embeddings)
            for local, name, index in _pieces(chunk, parameter, shape, config, place):
                blocks.append(Block(number, parameter, local, name, index, is_copy))
            if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
                shape = (_real_rows(shape[0], place.tensor, config), *shape[1:])
            shapes[number, parameter] = shape
    return WeightTable(place.stage, tuple(blocks), shapes)


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
        counts |= Counter((block.name, table.stage, _key(block.index), block.is_copy) for block in table.blocks)
        indices |= {_key(block.index): block.index for block in table.blocks}
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
        of_parameter = value(_tensor(chunks[block.chunk], block.parameter))
        if of_parameter is not None:
            yield block, of_parameter[block.local]


@torch.no_grad()
def load(chunks: Sequence[nn.Module], table: WeightTable, tensors: Callable[[str], Tensor]) -> None:
    """Copy the full model's tensors into the parameters. Padding rows of the vocabulary become zero.

    tensors: returns a tensor by its name; called once for each name. Raises ValueError for another shape.
    """
    for chunk, name in table.shapes:
        _tensor(chunks[chunk], name).zero_()
    targets = sorted(local_blocks(chunks, table, lambda parameter: parameter), key=lambda target: target[0].name)
    for name, of_name in groupby(targets, key=lambda target: target[0].name):
        tensor = tensors(name)
        for block, target in of_name:
            source = tensor[block.index]
            if source.shape != target.shape:
                raise ValueError(
                    f"tensor '{name}' has shape {tuple(tensor.shape)}: parameter '{block.parameter}' needs "
                    f"its part {block.index} with shape {tuple(target.shape)}"
                )
            target.copy_(source)


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
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, local)
    full: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, index, part in (entry for of_rank in of_ranks for entry in of_rank):
        tensor = full.setdefault(name, part.new_full(tuple(shapes[name]), torch.nan))
        key = name, _key(index)
        if key in seen and not torch.equal(tensor[index], part):
            raise ValueError(f"tensor '{name}': the copies of its part {index} differ between ranks")
        seen.add(key)
        tensor[index] = part
    return full


def _pieces(
    chunk: nn.Module, parameter: str, shape: Sequence[int], config: PreTrainedConfig, place: Place
) -> Iterator[Piece]:
    outside: dict[str, Rule] = {
        "embedding.word_embeddings.weight": Vocabulary(_EMBEDDING),
        "output_layer.weight": Vocabulary(_EMBEDDING if config.tie_word_embeddings else _HEAD),
        "decoder.final_layernorm.weight": Whole("backbone.norm.weight"),
    }
    if parameter in outside:
        yield from outside[parameter].pieces(shape, place.tensor, config)
        return
    in_layer = _LAYER.fullmatch(parameter)
    name = parameter if in_layer is None else in_layer[2]
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        name = f"mlp.experts.*.{expert['name']}"
    rule = NAMES[config.model_type].get(name)
    if rule is None or in_layer is None:
        raise ValueError(f"parameter '{parameter}' of Megatron-Core has no name in a {config.model_type} model")
    # Megatron-Core counts the layers of all stages from 1
    layer = chunk.get_submodule(f"decoder.layers.{in_layer[1]}").layer_number - 1  # type: ignore[operator]
    shard = place.tensor if expert is None else place.expert_tensor
    for local, relative, index in rule.pieces(shape, shard, config):
        if expert is not None:
            first = place.expert.rank * config.num_local_experts // place.expert.size
            index = (first + int(expert["module"] or expert["tensor"]), *index)
        yield local, f"backbone.layers.{layer}.{relative}", index


def _named_tensors(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the buffers that a checkpoint contains."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def _tensor(chunk: nn.Module, name: str) -> Tensor:
    module, _, leaf = name.rpartition(".")
    return getattr(chunk.get_submodule(module), leaf)


def _rows(start: int, stop: int, shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of rows of a tensor of this shape."""
    return slice(start, stop), *(slice(0, size) for size in shape[1:])


def _real_rows(rows: int, shard: Shard, config: PreTrainedConfig) -> int:
    """Return how many of a vocabulary shard's rows are not padding."""
    return max(0, min(rows, config.vocab_size - shard.rank * rows))


def _key(index: Index) -> tuple[tuple[int, int], ...]:
    """Return the start and stop in each dim. A slice cannot be hashed before Python 3.12."""
    return tuple((part, part + 1) if isinstance(part, int) else (part.start, part.stop) for part in index)


def _require_partition(what: str, shape: Sequence[int], regions: Iterable[Index]) -> None:
    """Raise ValueError unless each element of the shape is in exactly one region.

    The regions' borders divide the tensor into cells, so that its size does not matter.
    """
    bounds = [_key(region) for region in regions]
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
