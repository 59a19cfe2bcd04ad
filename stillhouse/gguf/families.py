"""What llama.cpp changes in a family when it writes a GGUF: names, values of tensors, names of settings.

The tables are those of llama.cpp's own converter (`convert_hf_to_gguf.py`). They are a second source beside the
tables of transformers, which reads the file, so that a mistake in one of them is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

#: names of tensors outside of layers, and of modules inside of a layer
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
#: settings of every family, without the name of the architecture: the key of config.json
_SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",  # all dimensions of a head are rotated
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
#: settings that a file may leave out; llama.cpp and transformers then use the same defaults
OPTIONAL = {"attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"}
OPTIONAL |= {"vocab_size"}


@dataclass(frozen=True)
class Family:
    """An architecture of GGUF files.

    model_type: the model type of its configuration in transformers.
    layer: names of the modules of a layer. settings: see `_SETTINGS`.
    added_to_norms: what llama.cpp adds to the weights of norms. interleaved: whether it interleaves the halves of
        the heads in the rows of query and key, because its rotary embedding rotates neighbouring dimensions.
    fixed: values that the file cannot state, with which llama.cpp computes.
    """

    model_type: str
    layer: Mapping[str, str]
    settings: Mapping[str, str]
    added_to_norms: float = 0.0
    interleaved: bool = False
    fixed: Mapping[str, Any] | None = None

    def target(self, tensor: str) -> str | None:
        """The name in transformers of a tensor; None if the family has no such tensor."""
        module, _, kind = tensor.rpartition(".")
        parts = module.split(".", 2)
        if module in _GLOBAL:
            return f"{_GLOBAL[module]}.{kind}"
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in self.layer:
            return f"model.layers.{int(parts[1])}.{self.layer[parts[2]]}.{kind}"
        return None

    def value(self, name: str, array: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
        """Undo llama.cpp's change of a tensor. name: the name in transformers."""
        if self.added_to_norms and name.endswith("norm.weight"):
            return array - np.float32(self.added_to_norms)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        module = name.rpartition(".")[0].rpartition(".")[2]
        if self.interleaved and module in heads:
            halves = array.reshape(heads[module], -1, 2, *array.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        return array


_LLAMA = Family("llama", _LAYER, _SETTINGS, interleaved=True)
_QWEN2 = Family("qwen2", _LAYER, _SETTINGS)
_QWEN3 = Family("qwen3", _LAYER | _QK_NORMS, _SETTINGS)
_GEMMA3 = Family(
    "gemma3_text",
    {
        **_LAYER,
        **_QK_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    _SETTINGS | {"attention.sliding_window": "sliding_window"},
    added_to_norms=1.0,
    fixed={"query_pre_attn_scalar": "head_dim", "local rope_theta": 10000.0, "layers between global layers": 6},
)
#: the families that can be proven, by `general.architecture` of a file
FAMILIES = {"llama": _LLAMA, "qwen2": _QWEN2, "qwen3": _QWEN3, "gemma3": _GEMMA3}


def setting(config: PreTrainedConfig, key: str) -> Any:
    """The value of a configuration for a key of `Family.settings` or `Family.fixed`."""
    rope = config.rope_parameters
    if key == "rope_theta":
        return rope.get("full_attention", rope)["rope_theta"]
    if key == "local rope_theta":
        return rope["sliding_attention"]["rope_theta"]
    if key == "layers between global layers":
        return 6 if list(config.layer_types) == layer_types(config.num_hidden_layers) else 0
    if key == "head_dim":
        return getattr(config, key, None) or config.hidden_size // config.num_attention_heads
    return getattr(config, key)


def layer_types(layers: int) -> list[str]:
    """The layers of Gemma 3: each sixth layer attends to all tokens."""
    return ["sliding_attention" if number % 6 else "full_attention" for number in range(1, layers + 1)]
