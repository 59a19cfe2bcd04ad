"""Decoders with layers for multi-token prediction, and packed rows of short documents for them.

B rows, S tokens per row, N tokens of one document.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from kit.families import SHAPE, WINDOWED
from torch import Tensor

from stillhouse.models import Decoder
from stillhouse.models.mtp import MultiTokenDecoder

V = 251
_SHAPE: dict[str, Any] = {**SHAPE, "vocab_size": V, "moe_intermediate_size": 24, "num_experts_per_tok": 2}

_EXPERTS: dict[str, Any] = {**_SHAPE, "n_routed_experts": 4}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_GROUPS = {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_WINDOWS = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
MAKERS: dict[str, Callable[..., hf.PreTrainedConfig]] = {
    "glm4_moe": partial(hf.Glm4MoeConfig, **_EXPERTS, head_dim=16, use_qk_norm=True),
    "deepseek_v3": partial(hf.DeepseekV3Config, **_EXPERTS | _LATENT | _GROUPS),
    "mellum": partial(hf.MellumConfig, **_SHAPE | _WINDOWS, head_dim=16, num_experts=4, num_mtp_layers=1),
    # a family without MTP layers of its own; its second layer has a sliding window
    "qwen3": partial(hf.Qwen3Config, **_SHAPE, **WINDOWED, head_dim=16),
}
EACH_FAMILY = pytest.mark.parametrize(
    ("family", "depths"),
    [("glm4_moe", 2), ("deepseek_v3", 2), ("mellum", 1), ("qwen3", 2)],
    ids=lambda value: str(value),
)


def make(
    family: str = "glm4_moe", depths: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> MultiTokenDecoder:
    """Return a decoder whose norms have weights other than 1, so that a missing norm changes the result."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(MAKERS[family](**options))
        if dtype == torch.float64:  # the grouped product of experts does not support float64
            model.set_experts_implementation("eager")
        decoder = MultiTokenDecoder.new(Decoder(model.to(dtype).eval()), depths)
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return decoder


LENGTHS = ((7, 4), (2, 9))  # lengths of the documents in each row; the shortest one has no label


def documents(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (length,), generator=generator) for row in LENGTHS for length in row]


def packed(values: list[Tensor]) -> Tensor:
    """Concatenate values of the documents' tokens to packed rows [B, S, …]."""
    return torch.cat(values).view(len(LENGTHS), sum(LENGTHS[0]), *values[0].shape[1:])


def positions() -> Tensor:
    return packed([torch.arange(len(document_N)) for document_N in documents()])


def labels_of(ids_N: Tensor, masked: int = 2) -> Tensor:
    """Return the next token of each token; the first `masked` tokens are a prompt and have no label."""
    labels_N = torch.cat([ids_N[1:], torch.tensor([-1])])
    labels_N[:masked] = -1
    return labels_N
