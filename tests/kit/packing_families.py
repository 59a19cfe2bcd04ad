"""Small models of families whose packed documents see each other, and of some that come close to a refusal.

All have the family's usual initialisation, at which a leak is smallest.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA_NET: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_LATENT: dict[str, Any] = {
    **SHAPE,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}

#: model type → options of its configuration. Documents in one row see each other
LEAKING: dict[str, dict[str, Any]] = {
    "gpt_oss": {**SHAPE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_next": {**SHAPE, **_DELTA_NET, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**SHAPE, **_DELTA_NET},
    "nemotron_h": {
        **SHAPE,
        "layers_block_type": ["mamba", "attention"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "granitemoehybrid": {
        **SHAPE,
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "bamba": {**SHAPE, **_MAMBA, "attn_layer_indices": [1]},
    "zamba2": {
        **SHAPE,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "num_mem_blocks": 1,
        "chunk_size": 8,
    },
    "jamba": {
        **SHAPE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2": {**SHAPE, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "opt": {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon_h1": {**SHAPE, **_MAMBA, "mamba_d_ssm": 64},
}
#: the same, of families that separate documents: earlier thresholds in half precision refused them at times
SEPARATING: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": _LATENT,
    "gemma3n_text": {
        **SHAPE,
        "intermediate_size": [48, 48],
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 251,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "deepseek_v32": {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
    "gemma4_text": {
        **SHAPE,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 251,
    },
}
#: the same, of a family whose windows can be longer than the documents of the proof
WINDOWED: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        **SHAPE,
        **_EXPERTS,
        "head_dim": 8,
        "n_routed_experts": 4,
        "q_lora_rank": 16,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    }
}
PACKING: dict[str, dict[str, Any]] = LEAKING | SEPARATING | WINDOWED

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def build_packing(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Return a small model of the family in eval mode. The global random state does not change."""
    config = AutoConfig.for_model(family, **{**PACKING[family], **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).to(dtype).eval()
