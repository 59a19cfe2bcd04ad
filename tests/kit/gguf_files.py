"""GGUF files: small models, written as llama.cpp's converter does, and real language models, from a registry.

`gguf_log_probs` says what a file means. It is llama.cpp's graph in float64: a third reading of a file, which shares
no code with ours and with that of transformers. T tokens, H heads, D dimensions of a head.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from kit.families import SHAPE
from kit.toy_tokenizer import toy_backend
from transformers import PreTrainedModel

from stillhouse.fetch import fetch

#: names of a layer's modules in transformers and in a file; Gemma 3 has two more norms
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_CONFIGS: dict[str, Any] = {
    "llama": hf.LlamaConfig,
    "qwen2": hf.Qwen2Config,
    "qwen3": hf.Qwen3Config,
    "gemma3": hf.Gemma3TextConfig,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},  # transformers does not read this setting
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 6, "sliding_window": 5},
}
_SPACE = "\u2581"
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def small_model(architecture: str, *, tied: bool = True, **options: Any) -> PreTrainedModel:
    """A small model of an architecture with a row for each token of `toy_backend`, in float32."""
    options = {**SHAPE, "vocab_size": 300, "tie_word_embeddings": tied, **_OPTIONS[architecture], **options}
    config = _CONFIGS[architecture](**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = hf.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases
                # other values than ones and zeros, to which 1 can be added without rounding
                parameter.data = ((parameter.data + 0.2 * torch.randn_like(parameter)) * 1024).round() / 1024
    return model.eval()


def write_gguf(
    path: Path,
    architecture: str = "llama",
    model: PreTrainedModel | None = None,
    *,
    rule: str = "gpt-2",
    left_out: Collection[str] = (),
    settings: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> PreTrainedModel:
    """Write a model as a GGUF, and return it.

    rule: `tokenizer.ggml.pre`. left_out: tensors that are not written. settings: further settings of the
    architecture; None leaves one out. metadata, tensors: further texts and tensors of the file.
    """
    model = model or small_model(architecture)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_settings(model, architecture) | dict(settings or {})).items():
        if value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    for key, text in {"tokenizer.chat_template": TEMPLATE, **(metadata or {})}.items():
        writer.add_string(key, text)
    (_add_gemma_tokenizer if architecture == "gemma3" else _add_tokenizer)(writer, model.config.vocab_size, rule)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            stored = _stored_name(name, architecture)
            if stored not in left_out:
                writer.add_tensor(stored, _stored_value(name, tensor.numpy(), model.config, architecture))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _settings(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    settings = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    return settings | ({"attention.sliding_window": config.sliding_window} if architecture == "gemma3" else {})


def _add_tokenizer(writer: Any, rows: int, rule: str) -> None:
    backend = toy_backend(vocabulary=rows)
    vocabulary = sorted(backend.get_vocab(), key=backend.token_to_id)
    merges = json.loads(backend.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if number < 6 else 1 for number in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    for add, number in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 0)):
        add(number)
    writer.add_add_bos_token(True)


def _add_gemma_tokenizer(writer: Any, rows: int, rule: str) -> None:
    """SentencePiece, with spaces in runs of spaces. Kinds: 1 normal, 3 control, 4 user-defined, 6 byte."""
    kinds = dict.fromkeys(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"), 3) | dict.fromkeys(("  ", "   "), 4)
    kinds |= {f"<0x{byte:02X}>": 6 for byte in range(256)} | dict.fromkeys(
        (_SPACE, _SPACE + "a", *"abcdefghilnost"), 1
    )
    kinds |= {f"<unused{number}>": 3 for number in range(rows - len(kinds))}
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([*kinds])
    writer.add_token_scores([-1.0] * rows)
    writer.add_token_types([*kinds.values()])
    for role, number in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(True)


def _stored_name(name: str, architecture: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _GLOBAL:
        return f"{_GLOBAL[module]}.{kind}"
    _, _, number, part = module.split(".", 3)
    names = _LAYER | (_GEMMA if architecture == "gemma3" else {})
    return f"blk.{number}.{names[part]}.{kind}"


def _stored_value(name: str, values: np.ndarray, config: Any, architecture: str) -> np.ndarray:
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + np.float32(1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture == "llama" and heads is not None:
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values


class _Graph:
    """The values of a file, in float64, and the operations of llama.cpp's graph."""

    def __init__(self, path: Path):
        reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = reader.fields["general.architecture"].contents()
        self._fields, self.is_gemma = reader.fields, self.architecture == "gemma3"
        self.epsilon = self.setting("attention.layer_norm_rms_epsilon")
        self.heads, self.groups = self.setting("attention.head_count"), self.setting("attention.head_count_kv")

    def setting(self, key: str) -> Any:
        return self._fields[f"{self.architecture}.{key}"].contents()

    def tensor(self, name: str) -> np.ndarray | None:
        found = self._tensors.get(name)
        return None if found is None else gguf.dequantize(found.data, found.tensor_type).astype(np.float64)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.tensor(name)
        return x if weight is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon) * weight

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        bias = self.tensor(f"{name}.bias")
        return x @ self.tensor(f"{name}.weight").T + (0 if bias is None else bias)

    def rope(self, x_THD: np.ndarray, base: float) -> np.ndarray:
        """Rotate neighbouring dimensions for the architecture llama, and halves of a head for the others."""
        width = x_THD.shape[-1]
        angle = np.arange(len(x_THD))[:, None, None] * base ** (-np.arange(0, width, 2) / width)
        cut = (np.s_[..., ::2], np.s_[..., 1::2])
        if self.architecture != "llama":
            cut = (np.s_[..., : width // 2], np.s_[..., width // 2 :])
        one, two = x_THD[cut[0]], x_THD[cut[1]]
        rotated = np.empty_like(x_THD)
        rotated[cut[0]] = one * np.cos(angle) - two * np.sin(angle)
        rotated[cut[1]] = two * np.cos(angle) + one * np.sin(angle)
        return rotated

    def attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        name, tokens = f"blk.{layer}.attn", len(x)
        is_local = self.is_gemma and (layer + 1) % 6 != 0
        base = 10000.0 if is_local else self.setting("rope.freq_base")
        q, k, v = (self.linear(x, f"{name}_{part}").reshape(tokens, count, -1)
                   for part, count in (("q", self.heads), ("k", self.groups), ("v", self.groups)))  # fmt: skip
        q, k = (self.rope(self.norm(part, f"{name}_{key}_norm.weight"), base) for key, part in (("q", q), ("k", k)))
        k, v = (np.repeat(part, self.heads // self.groups, axis=1) for part in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
        distance = np.arange(tokens)[:, None] - np.arange(tokens)
        visible = (distance >= 0) & (distance < (self.setting("attention.sliding_window") if is_local else tokens))
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear(np.einsum("hts,shd->thd", weights, v).reshape(tokens, -1), f"{name}_output")

    def feed_forward(self, x: np.ndarray, layer: int) -> np.ndarray:
        gate = self.linear(x, f"blk.{layer}.ffn_gate")
        if self.is_gemma:
            gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return self.linear(gate * self.linear(x, f"blk.{layer}.ffn_up"), f"blk.{layer}.ffn_down")


def gguf_log_probs(path: Path, ids: Sequence[int]) -> np.ndarray:
    """The log-probabilities of the token after each token, by the values of a file. Shape (T, vocabulary)."""
    graph = _Graph(path)
    embedding = graph.tensor("token_embd.weight")
    x = embedding[list(ids)] * (np.sqrt(graph.setting("embedding_length")) if graph.is_gemma else 1)
    for layer in range(graph.setting("block_count")):
        name = f"blk.{layer}"
        out = graph.attention(graph.norm(x, f"{name}.attn_norm.weight"), layer)
        x = x + graph.norm(out, f"{name}.post_attention_norm.weight")
        out = graph.feed_forward(graph.norm(x, f"{name}.ffn_norm.weight"), layer)
        x = x + graph.norm(out, f"{name}.post_ffw_norm.weight")
    head = graph.tensor("output.weight")
    logits = graph.norm(x, "output_norm.weight") @ (embedding if head is None else head).T
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


#: the user's folder, before the tests set their own
_CACHE = Path(os.environ.get("STILLHOUSE_CACHE") or "~/.cache/stillhouse").expanduser()


@lru_cache
def _problem_or_folder(name: str) -> Path | str:
    try:
        return fetch(name, _CACHE)
    except OSError as error:  # only once in a process: the next test would wait again
        return f"no {name}: {str(error).splitlines()[0]}"


def real_model(name: str) -> Path:
    """The plain folder of a name of `stillhouse fetch`. Skips the test if the registry does not answer."""
    result = _problem_or_folder(name)
    if isinstance(result, str):
        pytest.skip(result)
    return result
