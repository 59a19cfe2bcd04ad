"""The model families that Megatron-Core can run: how each family differs from Llama, and where its parameters lie.

A parameter of Megatron-Core consists of rectangles of tensors of the full model, which have the names in
`Decoder.state_dict()`. Megatron-Core sorts the rows of queries, keys and values by query group. It has gate and up
projection in one tensor, and one tensor per expert. Transformers has the experts of a layer in one tensor.

V vocabulary, D width, F width of a feed-forward network, E experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig


class UnsupportedModelError(ValueError):
    """Megatron-Core would not compute a model, or a model with this layout, as transformers does."""


#: an index of a part of a tensor: for each dim, a slice, or a number, which removes the dim
Index = tuple[slice | int, ...]
#: (part of the parameter, name in the full model, part of the full tensor)
Piece = tuple[Index, str, Index]


@dataclass(frozen=True)
class Shard:
    """A process's rank among the processes that share a tensor, and their number `size`."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter on this rank.

    names: the names of the parameter's tensors in the full model.
    shape: the parameter's shape on this rank.
    """

    names: Sequence[str]
    shape: Sequence[int]
    shard: Shard
    config: PreTrainedConfig

    def rows(self, start: int, stop: int) -> tuple[slice, ...]:
        """Return the index of the rows from `start` to `stop` in a tensor with the parameter's number of dims."""
        return slice(start, stop), *(slice(0, size) for size in self.shape[1:])


#: a function that yields the pieces of a parameter, followed by the `ShardedParameter.names` that the function gets
PieceRule = tuple[Any, ...]


def whole_tensor(parameter: ShardedParameter) -> Iterator[Piece]:
    """Yield the piece of a parameter that is a full tensor on each rank."""
    index = parameter.rows(0, parameter.shape[0])
    yield index, parameter.names[0], index


def columns(parameter: ShardedParameter) -> Iterator[Piece]:
    """Yield the piece of a parameter whose full tensor is sharded along its second dim."""
    (rows, count), rank = parameter.shape, parameter.shard.rank
    yield parameter.rows(0, rows), parameter.names[0], (slice(0, rows), slice(rank * count, (rank + 1) * count))


def rows(parameter: ShardedParameter) -> Iterator[Piece]:
    """Yield the pieces of a parameter that has this rank's rows of each tensor, one tensor after another."""
    count, rank = parameter.shape[0] // len(parameter.names), parameter.shard.rank
    for number, name in enumerate(parameter.names):
        local = parameter.rows(number * count, (number + 1) * count)
        yield local, name, parameter.rows(rank * count, (rank + 1) * count)


def latent_rows(parameter: ShardedParameter) -> Iterator[Piece]:
    """Return the piece of a projection to latent vectors: this rank's rows or, with Transformer Engine, all rows.

    `parameter.names`: the tensor's name, then configuration keys. The sum of their values is the number of all rows.
    """
    name, *sizes = parameter.names
    has_all = parameter.shape[0] == sum(getattr(parameter.config, size) for size in sizes)
    return rows(replace(parameter, names=[name], shard=Shard() if has_all else parameter.shard))


def query_groups(parameter: ShardedParameter) -> Iterator[Piece]:
    """Yield the pieces of a parameter that has the rows of the queries, the key and the value of each query group of
    this rank.
    """
    config, shard = parameter.config, parameter.shard
    width, groups = head_width(config), config.num_key_value_heads // shard.size
    heads = config.num_attention_heads // config.num_key_value_heads, 1, 1
    start = 0
    for group in range(shard.rank * groups, (shard.rank + 1) * groups):
        for name, count in zip(parameter.names, heads, strict=True):
            stop = start + count * width
            full = parameter.rows(group * count * width, (group + 1) * count * width)
            yield parameter.rows(start, stop), name, full
            start = stop


def vocabulary(parameter: ShardedParameter) -> Iterator[Piece]:
    """Yield the piece with this rank's vocabulary rows, without padding rows, which the full model does not have."""
    count = parameter.shape[0]
    start, real = parameter.shard.rank * count, real_rows(count, parameter.shard, parameter.config)
    if real:
        yield parameter.rows(0, real), parameter.names[0], parameter.rows(start, start + real)


def expert_row(parameter: ShardedParameter) -> Iterator[Piece]:
    """Yield the piece of an expert's bias, which is a matrix with one row here, and a row of the full tensor."""
    columns = slice(0, parameter.shape[1])
    yield (0, columns), parameter.names[0], (columns,)


def real_rows(rows: int, shard: Shard, config: PreTrainedConfig) -> int:
    """Return the number of rows of a vocabulary shard that are not padding."""
    return max(0, min(rows, config.vocab_size - shard.rank * rows))


def head_width(config: PreTrainedConfig) -> int:
    """Return the width of an attention head. It may differ from the hidden size divided by the number of heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


#: the parameters of a layer, by Megatron-Core's names. Names in the full model are relative to the layer. In
#: Transformer Engine, the norm of a projection's input is a part of the projection
_DENSE: dict[str, PieceRule] = {
    "input_layernorm.weight": (whole_tensor, "input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": (whole_tensor, "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": (query_groups, *(f"self_attn.{part}_proj.weight" for part in "qkv")),
    "self_attention.linear_qkv.bias": (query_groups, *(f"self_attn.{part}_proj.bias" for part in "qkv")),
    "self_attention.q_layernorm.weight": (whole_tensor, "self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": (whole_tensor, "self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": (columns, "self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": (whole_tensor, "post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": (whole_tensor, "post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": (rows, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": (columns, "mlp.down_proj.weight"),
}
#: the names of an expert's parameters have a * for the expert's number. An expert is never sharded
_EXPERTS: dict[str, PieceRule] = {
    "mlp.router.weight": (whole_tensor, "mlp.gate.weight"),
    "mlp.experts.*.linear_fc1.weight": (whole_tensor, "mlp.experts.gate_up_proj"),
    "mlp.experts.*.linear_fc2.weight": (whole_tensor, "mlp.experts.down_proj"),
}
#: DeepSeek's latent attention, the correction of its router's scores, and its shared experts
_LATENT: dict[str, PieceRule] = {
    "self_attention.linear_q_down_proj.weight": (latent_rows, "self_attn.q_a_proj.weight", "q_lora_rank"),
    "self_attention.q_layernorm.weight": (whole_tensor, "self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": (whole_tensor, "self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": (rows, "self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": (
        latent_rows,
        "self_attn.kv_a_proj_with_mqa.weight",
        "kv_lora_rank",
        "qk_rope_head_dim",
    ),
    "self_attention.kv_layernorm.weight": (whole_tensor, "self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": (whole_tensor, "self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": (rows, "self_attn.kv_b_proj.weight"),
    "mlp.router.expert_bias": (whole_tensor, "mlp.gate.e_score_correction_bias"),
    "mlp.shared_experts.linear_fc1.weight": (
        rows,
        *(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up")),
    ),
    "mlp.shared_experts.linear_fc2.weight": (columns, "mlp.shared_experts.down_proj.weight"),
}
#: Gemma 2 and 3 have four norms in a layer. The names of the second and third norm mean other norms in other families
_GEMMA: dict[str, PieceRule] = {
    "self_attention.linear_proj.post_norm.weight": (whole_tensor, "post_attention_layernorm.weight"),
    "pre_mlp_layernorm.weight": (whole_tensor, "pre_feedforward_layernorm.weight"),
    "mlp.linear_fc2.post_norm.weight": (whole_tensor, "post_feedforward_layernorm.weight"),
}
_GPT_OSS: dict[str, PieceRule] = {
    "self_attention.linear_proj.bias": (whole_tensor, "self_attn.o_proj.bias"),
    "self_attention.core_attention.softmax_offset": (rows, "self_attn.sinks"),
    "mlp.router.weight": (whole_tensor, "mlp.router.weight"),
    "mlp.router.bias": (whole_tensor, "mlp.router.bias"),
    "mlp.experts.*.linear_fc1.weight_IO": (whole_tensor, "mlp.experts.gate_up_proj"),
    "mlp.experts.*.linear_fc1.shift_1O": (expert_row, "mlp.experts.gate_up_proj_bias"),
    "mlp.experts.*.linear_fc2.weight_IO": (whole_tensor, "mlp.experts.down_proj"),
    "mlp.experts.*.linear_fc2.shift_1O": (expert_row, "mlp.experts.down_proj_bias"),
}
#: the parameters of an MTP layer outside its transformer layer
MTP_NAMES: dict[str, PieceRule] = {
    "enorm.weight": (whole_tensor, "enorm.weight"),
    "hnorm.weight": (whole_tensor, "hnorm.weight"),
    "eh_proj.weight": (rows, "eh_proj.weight"),
    "final_layernorm.weight": (whole_tensor, "post_norm.weight"),
}


@dataclass(frozen=True)
class Family:
    """The differences between a model family and Llama.

    names: the places of a layer's parameters in the full model, by Megatron-Core's names.
    qkv_bias: whether only the projections to queries, keys and values have a bias.
    qk_norm: whether the queries and keys of each head are normalized.
    experts: returns the fields of `TransformerConfig` for layers with experts. None if no layer has experts.
    latent: whether queries, keys and values are computed from latent vectors (multi-head latent attention).
    gemma: whether the layers are those of Gemma 2 and 3 (see `layers.py`).
    softcap: whether attention scores and logits may have a softcap.
    gpt_oss: whether projections, experts and routers have a bias, and each head an additional score (`layers.py`).
    """

    names: Mapping[str, PieceRule]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Callable[[PreTrainedConfig], dict[str, Any]] | None = None
    latent: bool = False
    gemma: bool = False
    softcap: bool = False
    gpt_oss: bool = False


def not_exact(config: PreTrainedConfig, key: str, value: Any, expected: str) -> UnsupportedModelError:
    """Return the error for a setting that Megatron-Core would not compute as transformers does."""
    return UnsupportedModelError(
        f"{key}={value!r} of a {config.model_type} model: Megatron-Core would not compute it as transformers does; "
        f"expected {expected}"
    )


def _qwen_experts(config: PreTrainedConfig) -> dict[str, Any]:
    sparse = [
        number not in config.mlp_only_layers and (number + 1) % config.decoder_sparse_step == 0
        for number in range(config.num_hidden_layers)
    ]
    if config.norm_topk_prob and config.num_experts_per_tok == 1:
        raise not_exact(config, "num_experts_per_tok", 1, "2 or more with norm_topk_prob=True")
    return {
        "moe_router_score_function": "softmax",
        # with norm_topk_prob, the normalized probabilities of the chosen experts are the softmax of their logits
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_layer_freq": [int(is_sparse) for is_sparse in sparse],
    }


def _deepseek_experts(config: PreTrainedConfig) -> dict[str, Any]:
    chosen, groups = config.num_experts_per_tok, config.topk_group
    if not config.norm_topk_prob or chosen == 1:
        raise not_exact(config, "norm_topk_prob", config.norm_topk_prob, "True, and num_experts_per_tok 2 or more")
    # transformers ranks a group of experts by its two best experts, Megatron-Core by its chosen // groups best ones
    if groups < config.n_group and chosen // groups != 2:
        raise not_exact(config, "topk_group", groups, f"{chosen // 2}, half of num_experts_per_tok={chosen}")
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_num_groups": config.n_group if groups < config.n_group else None,
        "moe_router_group_topk": groups if groups < config.n_group else None,
        # the correction of the scores is loaded, and does not change
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_intermediate_size": config.n_shared_experts * config.moe_intermediate_size,
        "moe_layer_freq": [int(number >= config.first_k_dense_replace) for number in range(config.num_hidden_layers)],
    }


def _gpt_oss_experts(config: PreTrainedConfig) -> dict[str, Any]:
    if config.num_experts_per_tok == 1:
        raise not_exact(config, "num_experts_per_tok", 1, "2 or more")
    if not config.attention_bias:
        raise not_exact(config, "attention_bias", config.attention_bias, "True")
    return {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "activation_func": lambda input_: input_ * torch.sigmoid(config.swiglu_alpha * input_),
        "activation_func_clamp_value": config.swiglu_limit,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "softmax_type": "learnable",
    }


#: the families by transformers' model types
FAMILIES = {
    "llama": Family(_DENSE),
    "mistral": Family(_DENSE),
    "qwen2": Family(_DENSE, qkv_bias=True),
    "qwen3": Family(_DENSE, qk_norm=True),
    "qwen3_moe": Family(_DENSE | _EXPERTS, qk_norm=True, experts=_qwen_experts),
    "deepseek_v3": Family(_DENSE | _EXPERTS | _LATENT, qk_norm=True, experts=_deepseek_experts, latent=True),
    "gpt_oss": Family(_DENSE | _GPT_OSS, experts=_gpt_oss_experts, gpt_oss=True),
    "gemma2": Family(_DENSE | _GEMMA, gemma=True, softcap=True),
    "gemma3_text": Family(_DENSE | _GEMMA, qk_norm=True, gemma=True),
}


def require_family(config: PreTrainedConfig) -> Family:
    """Return the model's family. Raises UnsupportedModelError for a model type that is not in `FAMILIES`."""
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type '{config.model_type}' has no conversion to Megatron-Core: expected {', '.join(FAMILIES)}"
        )
    return FAMILIES[config.model_type]
