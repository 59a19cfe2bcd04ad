"""Converts a transformers model's configuration, and `parallel.megatron`, to Megatron-Core's configuration.

The conversion is exact or refused: a setting that Megatron-Core does not compute in the same way raises ValueError
with the configuration's key. Users may choose settings for memory, communication and speed. Settings that would
change the model, the loss or the dtypes are refused. Three further groups of settings are refused: CUDA graphs of a
whole step, because the rows' lengths and the loss's divisor differ between steps; settings that need another schedule
or buffers of Megatron's trainer; and settings for gradients in the output layer, because this layer is not called.

C half of the width of a head.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, get_type_hints

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stillhouse.megatron.families import Family, UnsupportedModelError, head_width, not_exact, require_family

#: settings that must have this value if they are present; some families are exempt (`_require_exact`)
_ONLY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
    "rope_interleave": True,
}
#: the types of rotary embeddings whose frequencies do not depend on the number of tokens
_ROTARY = ("default", "linear", "llama3", "yarn")

_TRANSFORMER_FIELDS = """distribute_saved_activations
recompute_granularity recompute_method recompute_num_layers recompute_modules
deallocate_pipeline_outputs overlap_p2p_comm batch_p2p_comm batch_p2p_sync moe_token_dispatcher_type
moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_shared_expert_overlap moe_grouped_gemm
moe_permute_fusion moe_router_fusion apply_rope_fusion bias_activation_fusion bias_dropout_fusion"""
_TRANSFORMER = frozenset(_TRANSFORMER_FIELDS.split())
#: fields of DistributedDataParallelConfig
_DATA_PARALLEL = frozenset(("overlap_grad_reduce", "bucket_size", "pad_buckets_for_high_nccl_busbw"))
#: the settings with which backward recomputes each layer
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def transformer_config(
    config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, depths: int = 0, **options: Any
) -> TransformerConfig:
    """Return Megatron-Core's configuration of a model.

    dtype: the dtype of the weights and of the hidden states that pipeline stages send.
    depths: the number of MTP layers.
    options: fields of `TransformerConfig` for the layout, memory and speed.

    Raises UnsupportedModelError, naming the key, for a setting that Megatron-Core does not compute as transformers
    does. Raises ValueError for options that the model or the loss determines or that Megatron-Core refuses.
    """
    family = require_family(config)
    _require_exact(config, family)
    # the engine has already divided the loss, and Megatron-Core must not add another loss
    determined = _model_fields(config, family) | {
        "calculate_per_token_loss": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "mtp_num_layers": depths or None,
    }
    if depths:
        _require_mtp(config, depths, determined)
    kind = MLATransformerConfig if family.latent else TransformerConfig
    names = {field.name for field in fields(kind)}
    for name in options:
        if name not in names or name in determined:
            reason = "the model or the loss determines it" if name in determined else "there is no such field"
            raise ValueError(f"{name}={options[name]!r}: {reason}; expected another field of TransformerConfig")
    # Transformer Engine supports neither norms of projections' outputs (Gemma) nor the experts' weights of gpt-oss
    uses_engine = HAVE_TE and not family.gemma and not family.gpt_oss
    defaults: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": torch.float32 if options.get("fp32_residual_connection") else dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "moe_token_dispatcher_type": "alltoall",
        "transformer_impl": "transformer_engine" if uses_engine else "local",
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        # gloo has no batched sends and receives
        "batch_p2p_comm": torch.cuda.is_available(),
        # weights are allocated without values, because their values are loaded later
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,
    }
    settings = defaults | options
    _require_even_shards(config, family, settings)
    with refused_settings():
        return kind(**determined, **settings)


def rotary_frequencies(config: PreTrainedConfig, layer_type: str = "full_attention") -> tuple[Tensor, float]:
    """Return the rotary embedding's inverse frequencies [C] in float32, and the factor of rotated queries and keys.

    layer_type: selects the embedding in families that have different rotary embeddings for their layer types.
    """
    by_type = "full_attention" in config.rope_parameters
    rotary = config.rope_parameters[layer_type] if by_type else config.rope_parameters
    width = head_width(config)
    if rotary["rope_type"] == "default":
        return 1.0 / rotary["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0
    scaled = ROPE_INIT_FUNCTIONS[rotary["rope_type"]]
    frequencies_C, factor = scaled(config, layer_type=layer_type) if by_type else scaled(config)
    return frequencies_C, float(factor)


def _model_fields(config: PreTrainedConfig, family: Family) -> dict[str, Any]:
    values = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.intermediate_size,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "gated_linear_unit": True,
        "activation_func": partial(F.gelu, approximate="tanh") if family.gemma else F.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "layernorm_zero_centered_gamma": family.gemma,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # transformers computes the softmax of attention in float32
        "attention_softmax_in_fp32": True,
    }
    values |= _latent_fields(config) if family.latent else _attention_fields(config)
    if family.experts is not None:
        values |= family.experts(config) | {
            "num_moe_experts": config.num_local_experts,
            "moe_ffn_hidden_size": int(getattr(config, "moe_intermediate_size", config.intermediate_size)),
            "moe_router_topk": config.num_experts_per_tok,
        }
    return values


def _attention_fields(config: PreTrainedConfig) -> dict[str, Any]:
    layer_types = getattr(config, "layer_types", None)
    factors = {rotary_frequencies(config, layer_type)[1] for layer_type in set(layer_types or ["full_attention"])}
    if len(factors) > 1:
        raise not_exact(config, "rope_parameters", config.rope_parameters, "one attention_factor for all layers")
    (factor,) = factors
    # the whole head is rotated, so the factor of queries and keys can be moved to the scale of their products
    scale = factor**2 / getattr(config, "query_pre_attn_scalar", head_width(config)) ** 0.5
    fields: dict[str, Any] = {
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_width(config),
        "softmax_scale": scale,
    }
    window = getattr(config, "sliding_window", None)
    has_window = [window is not None and layer_type == "sliding_attention" for layer_type in layer_types or ()]
    if window is not None and (any(has_window) or layer_types is None):
        # in transformers, the window includes the token itself
        fields["window_size"] = (window - 1, 0)
        fields["window_attn_skip_freq"] = [int(is_window) for is_window in has_window] or None
    return fields


def _latent_fields(config: PreTrainedConfig) -> dict[str, Any]:
    rotary = config.rope_parameters
    _, factor = rotary_frequencies(config)
    if factor != 1.0:
        raise not_exact(config, "rope_parameters", rotary, "equal mscale and mscale_all_dim, or no attention_factor")
    if config.q_lora_rank is None:  # Megatron-Core would normalize the input of the queries' projection
        raise not_exact(config, "q_lora_rank", None, "a number")
    if config.rms_norm_eps != 1e-6:  # transformers' norms of latent vectors ignore the configuration
        raise not_exact(config, "rms_norm_eps", config.rms_norm_eps, "1e-06")
    if config.num_key_value_heads != config.num_attention_heads:
        raise not_exact(config, "num_key_value_heads", config.num_key_value_heads, f"{config.num_attention_heads}")
    is_scaled = rotary["rope_type"] != "default"
    return {
        "multi_latent_attention": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        # the frequencies are replaced after construction; these two numbers scale the products of queries and keys
        "rope_type": "rope",
        "rotary_scaling_factor": rotary["factor"] if is_scaled else 1.0,
        "mscale_all_dim": rotary.get("mscale_all_dim", 0.0) if is_scaled else 0.0,
    }


def _require_exact(config: PreTrainedConfig, family: Family) -> None:
    for key, value in _ONLY.items():
        if (family.softcap and key.endswith("_softcapping")) or (family.gpt_oss and key == "attention_bias"):
            continue
        if getattr(config, key, None) not in (value, None):
            raise not_exact(config, key, getattr(config, key), repr(value))
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise not_exact(config, "layer_types", sorted(unknown), "full_attention or sliding_attention")
    rotary_config = config.rope_parameters  # for all layers, or for each layer type
    for rotary in [rotary_config] if "rope_type" in rotary_config else rotary_config.values():
        if rotary["rope_type"] not in _ROTARY:
            expected = f"one of {', '.join(_ROTARY)}"
            raise not_exact(config, "rope_parameters.rope_type", rotary["rope_type"], expected)
        part = rotary.get("partial_rotary_factor", 1.0)
        if part != 1.0:
            raise not_exact(config, "rope_parameters.partial_rotary_factor", part, "1.0")


def _require_mtp(config: PreTrainedConfig, depths: int, determined: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError if transformers' MTP layers differ from the last layer, because Megatron-Core
    builds MTP layers with the spec of the last layer.
    """
    if determined.get("window_size") is not None:
        # Megatron-Core numbers MTP layers from 1, so MTP layers would have the windows of the first layers
        raise not_exact(config, "sliding_window", config.sliding_window, "a student without a window for student.mtp")
    is_sparse = determined.get("moe_layer_freq", [0])
    # transformers numbers MTP layers from 0, and Qwen3-MoE decides by a layer's number whether it is dense
    sparse_depths = is_sparse[:depths] if hasattr(config, "mlp_only_layers") else [is_sparse[-1]]
    if {*sparse_depths} != {is_sparse[-1]}:
        expected = f"the first {depths} layers to be like the last one, for student.mtp"
        raise not_exact(config, "mlp_only_layers", config.mlp_only_layers, expected)


def _require_even_shards(config: PreTrainedConfig, family: Family, options: Mapping[str, Any]) -> None:
    tensor = options.get("tensor_model_parallel_size", 1)
    if family.experts and tensor > 1 and not options.get("sequence_parallel", False):
        raise UnsupportedModelError(
            f"sequence_parallel=False with tensor_model_parallel_size={tensor} for a {config.model_type} model: "
            "Megatron-Core does not train experts this way; expected sequence_parallel=True (parallel.sequence: true)"
        )
    if family.gpt_oss and (options.get("expert_tensor_parallel_size") or tensor) > 1:
        raise UnsupportedModelError(
            f"tensor_model_parallel_size={tensor} for a {config.model_type} model without expert parallelism: "
            "experts with biases cannot be sharded; expected parallel.expert as a multiple of parallel.tensor"
        )
    pipeline = options.get("pipeline_model_parallel_size", 1)
    chunks = options.get("virtual_pipeline_model_parallel_size") or 1
    uneven = ("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage")
    sizes = {
        "num_attention_heads": (config.num_attention_heads, tensor, "tensor ranks"),
        "num_key_value_heads": (config.num_key_value_heads, tensor, "tensor ranks"),
        "intermediate_size": (config.intermediate_size, tensor, "tensor ranks"),
    }
    if not any(options.get(name) for name in (*uneven, "num_layers_in_last_pipeline_stage")):
        sizes["num_hidden_layers"] = (config.num_hidden_layers, pipeline * chunks, "pipeline stages")
    if family.experts:
        experts = options.get("expert_model_parallel_size", 1)
        sizes["num_local_experts"] = (config.num_local_experts, experts, "expert ranks")
    if family.latent:
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        sizes["kv_lora_rank + qk_rope_head_dim"] = (latent, tensor, "tensor ranks")
        sizes["q_lora_rank"] = (config.q_lora_rank, tensor, "tensor ranks")
    for key, (size, parts, what) in sizes.items():
        if size % parts:
            raise UnsupportedModelError(f"{key}={size} over {parts} {what}: expected a multiple of {parts}")


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options for TransformerConfig, and the options for DistributedDataParallelConfig. Raises ValueError,
    naming the key, for an option that is not supported, and for a value of a wrong type.
    """
    types = get_type_hints(MLATransformerConfig) | get_type_hints(DistributedDataParallelConfig)
    names = {field.name for kind in (MLATransformerConfig, DistributedDataParallelConfig) for field in fields(kind)}
    for name, value in options.items():
        if name not in names:
            raise ValueError(
                f"parallel.megatron.{name}: Megatron-Core has no such setting; expected a field of TransformerConfig "
                "or DistributedDataParallelConfig"
            )
        if name not in _TRANSFORMER | _DATA_PARALLEL:
            raise ValueError(
                f"parallel.megatron.{name}: the models or other keys determine it, or it is not supported here; "
                f"expected one of {', '.join(sorted(_TRANSFORMER | _DATA_PARALLEL))}"
            )
        try:
            TypeAdapter(types[name], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ValueError(f"parallel.megatron.{name}={value!r}: {reason[0].lower()}{reason[1:]}") from error
    if "layernorm" in (options.get("recompute_modules") or ()) and not HAVE_TE:
        raise ValueError(
            "parallel.megatron.recompute_modules: Megatron-Core needs Transformer Engine to recompute layernorm; "
            "expected other modules"
        )
    data_parallel = {name: value for name, value in options.items() if name in _DATA_PARALLEL}
    return {name: value for name, value in options.items() if name in _TRANSFORMER}, data_parallel


@contextmanager
def refused_settings() -> Iterator[None]:
    """Convert Megatron-Core's errors for settings that it refuses, and for missing libraries, to ValueError."""
    try:
        yield
    except (AssertionError, ImportError, ValueError) as error:
        raise ValueError(f"parallel.megatron: Megatron-Core refuses these settings: {error}") from error
