"""Small models of every supported family, built from the real configuration classes.

Each has a few thousand parameters: two layers (three where layers differ) and an odd vocabulary of 251. The values
are chosen so that a mistake changes the result: weights are large, norms and biases are not ones and zeros,
attention is far from uniform, windows are shorter than the test sequences, softcaps are reached, and scales are
not 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf

WINDOW = 5  # tokens that a sliding-window layer sees
SOFTCAP = 3.0

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_GEMMA: dict[str, Any] = {
    **SHAPE,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "final_logit_softcapping": SOFTCAP,
}

#: family → its configuration; options: vocab_size, tie_word_embeddings
FAMILIES: dict[str, Callable[..., hf.PreTrainedConfig]] = {
    "llama": partial(hf.LlamaConfig, **SHAPE),
    "qwen3": partial(hf.Qwen3Config, **SHAPE, **WINDOWED, head_dim=16),
    "qwen3_moe": partial(
        hf.Qwen3MoeConfig,
        **SHAPE,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "gemma2": partial(hf.Gemma2Config, **_GEMMA, attn_logit_softcapping=4.0),
    "gemma3": partial(
        hf.Gemma3TextConfig,
        **{**_GEMMA, "num_hidden_layers": 3},
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "mistral": partial(hf.MistralConfig, **SHAPE, sliding_window=WINDOW),
    "phi3": partial(hf.Phi3Config, **SHAPE, sliding_window=WINDOW, resid_pdrop=0.1),
    "gpt2": partial(
        hf.GPT2Config,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "granite": partial(
        hf.GraniteConfig,
        **SHAPE,
        logits_scaling=3.0,
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.3,
    ),
    "cohere": partial(hf.CohereConfig, **SHAPE, logit_scale=0.4, use_qk_norm=True),
}


def build(
    family: str,
    *,
    tied: bool | None = None,
    seed: int = 0,
    vocab_size: int = 251,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
) -> hf.PreTrainedModel:
    """Return a small model of `family` in eval mode. The same seed gives the same weights in every dtype.

    `tied=None` stands for the family's default; `attention` is Hugging Face's `attn_implementation`. The global
    random state does not change.
    """
    options: dict[str, Any] = {"vocab_size": vocab_size}
    if tied is not None:
        options["tie_word_embeddings"] = tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](**options), attn_implementation=attention)
        if dtype == torch.float64:  # the grouped product of experts does not support float64
            model.set_experts_implementation("eager")
        for parameter in model.parameters():
            if parameter.ndim == 1:  # give norms and biases other values than ones and zeros
                parameter.data += 0.2 * torch.randn_like(parameter)
    return model.to(dtype).eval()
