"""Where each parameter of Megatron-Core's model lies in the tensors of the full model: names and rules by family.

The names of the full model are those of `Decoder.state_dict()`. Megatron-Core stores the rows of queries, keys and
values by query group, gate and up projection in one tensor, and one tensor per expert; transformers stores the
experts of a layer in one tensor. A shard of the vocabulary may end with padding rows, which are in no tensor of the
full model.

V vocabulary, D width, F width of a feed-forward network, E experts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron.core import parallel_state
from torch import nn
from transformers import PreTrainedConfig

from stillhouse.megatron.model_config import head_width

#: the part of a tensor in each dim; a number removes the dim
Index = tuple[slice | int, ...]
#: (part of the parameter, name in the full model, part of the full tensor)
Piece = tuple[Index, str, Index]


@dataclass(frozen=True)
class Shard:
    """The rank of a process among the `size` processes that share a tensor."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Place:
    """This process's place on Megatron-Core's axes."""

    stage: int = 0
    tensor: Shard = field(default_factory=Shard)
    expert: Shard = field(default_factory=Shard)

    @classmethod
    def current(cls) -> "Place":
        """Read the place from Megatron-Core's process groups."""
        groups = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
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
        real = real_rows(shape[0], shard, config)
        if real:
            yield _rows(0, real, shape), self.name, _rows(start, start + real, shape)


@dataclass(frozen=True)
class ExpertRow:
    """A bias of one expert, a matrix with one row, which is a row of the full tensor."""

    name: str

    def pieces(self, shape: Sequence[int], shard: Shard, config: PreTrainedConfig) -> Iterator[Piece]:
        yield (0, slice(0, shape[1])), self.name, (slice(0, shape[1]),)


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
#: the parameters of an expert, which is never cut, have a * for its number
_EXPERTS: dict[str, Rule] = {
    "mlp.router.weight": Whole("mlp.gate.weight"),
    "mlp.experts.*.linear_fc1.weight": Whole("mlp.experts.gate_up_proj"),
    "mlp.experts.*.linear_fc2.weight": Whole("mlp.experts.down_proj"),
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
#: Gemma 2 and 3 have four norms in a layer; the names of the second and third differ in meaning from those of other
#: families
_GEMMA: dict[str, Rule] = {
    "self_attention.linear_proj.post_norm.weight": Whole("post_attention_layernorm.weight"),
    "pre_mlp_layernorm.weight": Whole("pre_feedforward_layernorm.weight"),
    "mlp.linear_fc2.post_norm.weight": Whole("post_feedforward_layernorm.weight"),
}
_GPT_OSS: dict[str, Rule] = {
    "self_attention.linear_proj.bias": Whole("self_attn.o_proj.bias"),
    "self_attention.core_attention.softmax_offset": Rows(("self_attn.sinks",)),
    "mlp.router.weight": Whole("mlp.router.weight"),
    "mlp.router.bias": Whole("mlp.router.bias"),
    "mlp.experts.*.linear_fc1.weight_IO": Whole("mlp.experts.gate_up_proj"),
    "mlp.experts.*.linear_fc1.shift_1O": ExpertRow("mlp.experts.gate_up_proj_bias"),
    "mlp.experts.*.linear_fc2.weight_IO": Whole("mlp.experts.down_proj"),
    "mlp.experts.*.linear_fc2.shift_1O": ExpertRow("mlp.experts.down_proj_bias"),
}
#: by transformers' model type
NAMES: dict[str, Mapping[str, Rule]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": _DENSE | _EXPERTS,
    "deepseek_v3": _DENSE | _EXPERTS | _LATENT,
    "gpt_oss": _DENSE | _GPT_OSS,
    "gemma2": _DENSE | _GEMMA,
    "gemma3_text": _DENSE | _GEMMA,
}

#: the parameters of an MTP layer beside those of its transformer layer
_MTP: Mapping[str, Rule] = {
    "enorm.weight": Whole("enorm.weight"),
    "hnorm.weight": Whole("hnorm.weight"),
    "eh_proj.weight": Rows(("eh_proj.weight",)),
    "final_layernorm.weight": Whole("post_norm.weight"),
}

_EMBEDDING, _HEAD = "backbone.embed_tokens.weight", "head.linear.weight"
_LAYER = re.compile(r"(?:decoder|mtp)\.layers\.(\d+)\.(?:mtp_model_layer\.)?(.+)")
#: a module for each expert, or a tensor for each expert in one module of Transformer Engine
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<module>\d+)\.)?(?P<name>linear_fc[12]\.(?:weight_IO|shift_1O|weight))(?P<tensor>\d*)"
)


def parameter_pieces(
    chunk: nn.Module, parameter: str, shape: Sequence[int], config: PreTrainedConfig, place: Place
) -> Iterator[Piece]:
    """Yield the pieces of a chunk's parameter. Raises ValueError for a parameter that the family's names lack."""
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
    rule = {**_MTP, **NAMES[config.model_type]}.get(name)
    if rule is None or in_layer is None:
        raise ValueError(f"parameter '{parameter}' of Megatron-Core has no name in a {config.model_type} model")
    if parameter.startswith("mtp."):
        prefix = f"mtp.layers.{in_layer[1]}." + "mtp_block." * (name not in _MTP)
    else:
        # Megatron-Core counts the layers of all stages from 1
        layer = chunk.get_submodule(f"decoder.layers.{in_layer[1]}").layer_number - 1  # type: ignore[operator]
        prefix = f"backbone.layers.{layer}."
    for local, relative, index in rule.pieces(shape, place.tensor, config):
        if expert is not None:
            first = place.expert.rank * config.num_local_experts // place.expert.size
            index = (first + int(expert["module"] or expert["tensor"]), *index)
        yield local, f"{prefix}{relative}", index


def _rows(start: int, stop: int, shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of rows of a tensor of this shape."""
    return slice(start, stop), *(slice(0, size) for size in shape[1:])


def real_rows(rows: int, shard: Shard, config: PreTrainedConfig) -> int:
    """Return how many of a vocabulary shard's rows are not padding."""
    return max(0, min(rows, config.vocab_size - shard.rank * rows))
