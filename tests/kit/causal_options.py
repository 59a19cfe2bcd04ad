"""The options of the tiny models of `kit.causal_families`: sizes by one rule, what a family needs beyond it, and the
families that are left out.
"""

from typing import Any

VOCABULARY = 251
SPECIAL = 230  # the token ids from here on can stand for an image or another input
EXPERTS = 4

#: name of a size in a configuration → its value, in every family that has the name
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # width and depth
    "hidden_size": 32,
    "d_model": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "initializer_range": 0.1,
    "init_std": 0.1,
    "embedding_initializer_range": 0.1,
    # attention
    "num_attention_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "sliding_window_size": 5,
    "attention_window_size": 5,
    "window_size": 5,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "index_n_heads": 16,  # with few heads, many scores are exactly 0, and the length of a row decides between them
    "index_head_dim": 8,
    "index_topk": 4,
    "query_pre_attn_scalar": 8,
    "floor_scale": 4,
    "log_scaling_n_floor": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rel_extent": 4,
    # feed-forward layers
    "intermediate_size": 48,
    "ffn_dim": 48,
    "mlp_dim": 48,
    "n_inner": 48,
    "block_multiple_of": 8,
    "ffn_round_up_to_multiple_of": 8,
    # experts
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "router_hidden_size": 8,
    "share_expert_dim": 24,
    # state-space layers, linear attention and convolutions
    "state_size": 8,
    "ssm_state_size": 8,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "n_groups": 1,
    "mamba_chunk_size": 4,
    "chunk_size": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    # several streams of hidden states
    "hc_mult": 2,
    # layers for multi-token prediction are not part of the model
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    # vision towers
    "image_size": 8,
    "patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "projector_hidden_size": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "projection_hidden_size": 32,
    "alignment_intermediate_size": 48,
    "text_hidden_size": 32,
    "position_embedding_size": 16,
    "max_source_positions": 16,
    "num_mel_bins": 8,
    "num_patches": 16,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "output_channels": 8,
    "vision_output_dim": 32,
    "output_dim": 32,
    "conv_channels": 8,
    "downsample_hidden_size": 8,
}

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}  # one key head per query head
_DENSE_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_FULL_SLIDING = {"layer_types": ["full_attention", "sliding_attention"]}
_SLIDING_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_MAMBA_ATTENTION = {"layer_types": ["linear_attention", "full_attention"]}
_USES_WINDOW = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
_GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "per_layer_config": {
        1: {"head_dim": 16, "num_key_value_heads": 1},
        3: {"head_dim": 16, "num_key_value_heads": 1},
    },
}
_GEMMA4_PER_LAYER = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY}
_DOTS3: dict[str, Any] = (
    _LATENT
    | {"shared_experts_intermediate_size": 24}
    | {
        f"swa_{name}": 8
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    | {"swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
)
_COMPASS = _FULL_SLIDING | {"rope_parameters": {"full_attention": None, "sliding_attention": _ROPE}}
_MINIMAX3: dict[str, Any] = {
    **_DENSE_SPARSE,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "dense_intermediate_size": 48,
}
_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}}
_QWEN4: dict[str, Any] = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "ple_embed_dim": 16,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 40,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
}

#: model type → what its configuration needs beyond the rule
MORE: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT | {"gated_norm_rank": 4},
    "bailing_hybrid": _LATENT,
    "bamba": {"attn_layer_indices": [1]},
    "biogpt": {"max_position_embeddings": 126},
    "cohere2_moe": _DENSE_SPARSE,
    "cohere_compass_text": _COMPASS,
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | _DENSE_SPARSE,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "moe_intermediate_size": 8,
        "index_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 8,
        "partial_rotary_factor": 0.5,
    },
    "dots1": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "dots3_note_text": _DOTS3,
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4": {"text_config": _GEMMA4 | _GEMMA4_PER_LAYER},
    "gemma4_text": _GEMMA4 | _GEMMA4_PER_LAYER,
    "gemma4_unified_text": _GEMMA4,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT | {"indexer_types": ["full", "shared"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA_ATTENTION,
    "hrm_text": {"H_cycles": 1, "L_cycles": 2, "L_bp_cycles": [2], "num_hidden_layers": 1},
    "hy_v4": _LATENT | {"indexer_types": ["full", "shared"]},
    "inkling_text": _DENSE_SPARSE,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 2},
    "kimi_linear": _LATENT,
    "laguna": _FULL_SLIDING | {"num_attention_heads_per_layer": [4, 2]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {
        "text_config": {
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 5,
            "no_rope_layers": [1, 0],
        }
    },
    "llama4_text": {
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 5,
        "no_rope_layers": [1, 0],
    },
    "longcat_flash": _LATENT | {"zero_expert_num": 2, "expert_ffn_hidden_size": 24, "num_layers": 1},
    "mamba2": {"num_heads": 8},
    "mellum": _FULL_SLIDING | _DENSE_SPARSE,
    "minicpm3": _LATENT,
    "minimax": {"block_size": 4},
    "minimax_m3_vl_text": _MINIMAX3,
    "ministral": _SLIDING_FULL,
    "nemotron_h": {"moe_shared_expert_intermediate_size": 24, "mamba_num_heads": 8},
    "phi4_multimodal": {
        "vision_config": {"crop_size": 8},
        "audio_config": {"num_blocks": 1, "left_chunk": 2, "chunk_size": -1, "input_size": 8, "bias_max_distance": 8}
        | {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
    },
    "qwen2": _USES_WINDOW,
    "qwen2_moe": _USES_WINDOW,
    "qwen3": _USES_WINDOW,
    "qwen3_moe": {"use_sliding_window": True},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "smollm3": _USES_WINDOW | {"no_rope_layers": [1, 0]},
    "youtu": _LATENT,
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "adapter_rank": 4},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"]},
} | {
    # with a vision tower
    "chameleon": {
        "vocabulary_map": {"<image>": 249},
        "vq_config": {"base_channels": 32, "embed_dim": 8, "latent_channels": 8}
        | {"num_embeddings": 16, "resolution": 16, "channel_multiplier": [1, 2], "num_res_blocks": 1},
    },
    "cohere_compass": {"text_config": _COMPASS},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "feature_size": 8},
    },
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [24, 12]} | _MROPE},
    "gemma4_unified": {
        "text_config": _GEMMA4,
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 16},
    },
    "glm46v": {"text_config": _MROPE},
    "glm4v": {"text_config": _MROPE},
    "glm4v_moe": {"text_config": _MROPE | {"head_dim": 16}},
    "glm5_next": {
        "text_config": _LATENT | {"qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 2},
        "vision_config": {"projection_intermediate_size": 48},
    },
    "glm_ocr": {"text_config": {"head_dim": 16, "rope_parameters": _ROPE | {"mrope_section": [2, 2, 4]}}},
    "glmga": {"text_config": _MROPE},
    "idefics2": {"perceiver_config": {"resampler_n_latents": 4, "resampler_n_heads": 2, "resampler_head_dim": 8}},
    "inkling2": {"vision_config": {"projection_hidden_dim": 32, "posemb_grid_size": 4}},
    "kimi_k25": {"text_config": _LATENT},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "minimax_m3_vl": {"text_config": _MINIMAX3},
    "mistral4": _LATENT,
    "mistral_large4": {"text_config": _LATENT},
    "paddleocr_vl": {"text_config": _MROPE},
    "qwen2_5_vl": {"text_config": _MROPE | _USES_WINDOW},
    "qwen2_vl": {"text_config": _MROPE | _USES_WINDOW, "vision_config": {"embed_dim": 32}},
    "qwen3_vl": {"text_config": _MROPE},
    "qwen3_vl_moe": {"text_config": _MROPE},
    "step3p7": {"text_config": _FULL_SLIDING},
}


def _because(reason: str, model_types: str) -> dict[str, str]:
    return dict.fromkeys(model_types.split(), reason)


#: model type → why it is left out
LEFT_OUT: dict[str, str] = {
    **_because(
        "an encoder that can also be a decoder",
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod",
    ),
    **_because(
        "the decoder of a model with an encoder",
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper",
    ),
    **_because("audio codes after a text encoder", "musicgen musicgen_melody"),
    **_because("drafts from the hidden states of another model", "gemma4_assistant gemma4_unified_assistant"),
    "blt": "bytes, in patches that a second model chooses",
    "cpmant": "not causal: its relative positions are seen from both sides",
    "gemma3n": "its vision tower needs the package timm; the language model is gemma3n_text",
    "reformer": "not causal where it sorts tokens by hashes",
    "xlnet": "not causal: trained on permutations",
}
