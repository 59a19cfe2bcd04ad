"""Variable-length attention: packed documents lie in one row, and torch's flash kernel gets their borders.

It is used if the device, the dtype of the activations and the model allow it (`PackedAttention`). It is registered
with transformers' `AttentionInterface` under the name `VARLEN`, without a mask function. So transformers builds no
mask and never waits for the device. Only the documents' lengths determine which tokens a token sees. Inputs without
lengths, or with a bias or a mask, are refused.

T tokens of the row, N documents, M = N + 1 borders of documents, H heads of queries, G heads of keys and values, D
width of a head.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from stillhouse.display import name_list
from stillhouse.models.families import ModelFacts, text_config
from stillhouse.models.forward_modes import VARLEN, attention_name, autocast_dtype
from stillhouse.models.model_checks import typename

#: the names of the lengths among the arguments of a backbone, as transformers' flash attention calls them
VARLEN_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: the largest width of heads in the kernel, and the number of which the width must be a multiple
WIDEST, _MULTIPLE = 256, 8
#: devices of compute capability 8.6, 8.9 and 12.0 have no backward for widths above this number and below 225
_WIDEST_BACKWARD = 192
_DTYPES = (torch.bfloat16, torch.float16)
_OPTIONS = inspect.signature(varlen_attn).parameters
_MISSING = {"scale", "window_size"} - {*_OPTIONS}
#: the attention for inputs without lengths, for a model whose configuration requires variable-length attention
USUAL = "sdpa"
#: arguments of attention that change its scores in ways that the kernel does not know
_UNSUPPORTED = ("attention_mask", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class Activations:
    """The device and the dtype of a model's activations. dtype: the dtype of autocast; None is the weights' dtype."""

    device: torch.device
    dtype: torch.dtype | None = None


def activations_for(
    attention: str | None, device: torch.device, autocast: torch.dtype | None = None
) -> Activations | None:
    """Return the activations for `PackedAttention`. If the configuration names another attention than `VARLEN`,
    return None, so that the model keeps the named attention.
    """
    return Activations(device, autocast) if attention in (None, VARLEN) else None


def refusal(activations: Activations, dtype: torch.dtype) -> str | None:
    """Return the reason why variable-length attention cannot run with these activations, or None if it can.

    dtype: the dtype of the weights.
    """
    device, dtype = activations.device, activations.dtype or dtype
    if _MISSING:
        return f"in torch {torch.__version__}, it has no option {name_list(_MISSING)}"
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it needs activations in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"it needs a device of compute capability 8.0 or later, not {'.'.join(map(str, capability))}"
    return None


def refusal_of_model(model: PreTrainedModel) -> str | None:
    """Return the reason why a model cannot use variable-length attention, or None if it can."""
    config = text_config(model.config)
    if not type(model).__module__.startswith("transformers.models."):
        return "its code is not in transformers"
    if not model._can_set_attn_implementation():
        return "its attention cannot be replaced"
    if config is not model.config and text_part(model.config) is None:
        return "the language model's configuration is not a direct part of its configuration"
    facts = ModelFacts(config)
    if facts.is_heterogeneous or facts.mixes_tokens_by_score:
        return "its layers have different sizes or select tokens by scores, which the kernel does not support"
    if facts.caps_scores:
        return "it caps its attention scores"
    if facts.drops_scores:
        return "it has dropout in its attention"
    if facts.widest_head > WIDEST:
        return f"its heads have a width of {facts.widest_head}, and the kernel supports at most {WIDEST}"
    return None


def text_part(config: PreTrainedConfig) -> str | None:
    """Return the key under which `config` has the language model's configuration, or None without such a key."""
    text = text_config(config)
    keys = () if text is config else config.sub_configs
    return next((key for key in keys if getattr(config, key, None) is text), None)


def require_varlen(model: PreTrainedModel, activations: Activations | None = None) -> None:
    """Raise ValueError if a model cannot use variable-length attention. activations: by default, the model's own."""
    activations = activations or Activations(model.device, autocast_dtype(model))
    if reason := refusal_of_model(model) or refusal(activations, model.dtype):
        raise ValueError(
            f"attention '{VARLEN}' cannot be used for {typename(model)}, because {reason}: expected another "
            "attention, such as sdpa"
        )


def attend(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens_M: Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Return causal attention within each document, [T, H, D].

    window: the number of tokens that a token sees, including itself; None for all earlier tokens of its document.
    """
    if query_THD.dtype not in _DTYPES or not query_THD.is_cuda:
        raise ValueError(
            f"attention '{VARLEN}' got {query_THD.dtype} on {query_THD.device.type}: expected bfloat16 or float16 "
            "(as the dtype of the weights or of autocast) on a CUDA device, or another attention, such as sdpa"
        )
    # versions of torch without this option always accept fewer heads of keys than of queries
    grouped: Any = {"enable_gqa": query_THD.shape[1] != key_TGD.shape[1]} if "enable_gqa" in _OPTIONS else {}
    places = (cu_seqlens_M, cu_seqlens_M, longest, longest)
    size = (-1 if window is None else window - 1, 0)
    output_THD: Any = varlen_attn(query_THD, key_TGD, value_TGD, *places, scale=scale, window_size=size, **grouped)
    return output_THD


def attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within each document of one joined row (B = 1), [1, T, H, D], and None.

    This is the function that is registered with transformers' `AttentionInterface`. Raises ValueError for arguments
    that the kernel does not support.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            f"attention '{VARLEN}' got no lengths of documents: expected a Decoder's packed documents, with "
            "position_ids and without attention_mask, or another attention, such as sdpa"
        )
    assert (1, query_BHTD.shape[2]) == (len(query_BHTD), key_BGTD.shape[2]), "expected all rows joined to one"
    options["attention_mask"], window = attention_mask, options.get("sliding_window")
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    unsupported += ["dropout"] if dropout else []
    unsupported += [] if getattr(module, "is_causal", True) and is_causal is not False else ["is_causal=False"]
    # torch would compile this check for each layer number; the proof also runs the layers uncompiled, with this check
    if not torch.compiler.is_compiling():
        unsupported += _unsupported_windows(module, options)
    if unsupported:
        raise ValueError(
            f"attention '{VARLEN}' does not support {name_list(unsupported)}: expected another one, such as sdpa"
        )
    device, dtype = value_BGTD.device.type, value_BGTD.dtype
    if torch.is_autocast_enabled(device):  # rotary embeddings in float32 make queries and keys float32
        dtype = torch.get_autocast_dtype(device)
    query_THD, key_TGD, value_TGD = (
        heads[0].transpose(0, 1).to(dtype) for heads in (query_BHTD, key_BGTD, value_BGTD)
    )
    scale = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
    borders = (cu_seq_lens_q, max_length_q)
    return attend_padded(query_THD, key_TGD, value_TGD, *borders, scale=scale, window=window)[None], None


def attend_padded(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, cu_seqlens_M: Tensor, longest: int, **options: Any
) -> Tensor:
    """Return the result of `attend` for heads of any width up to `WIDEST`. Values may differ from keys in width."""
    width = -(-max(query_THD.shape[-1], value_TGD.shape[-1]) // _MULTIPLE) * _MULTIPLE
    if width > _WIDEST_BACKWARD:
        width = WIDEST
    query, key, value = (
        heads_TD if heads_TD.shape[-1] == width else pad(heads_TD, (0, width - heads_TD.shape[-1]))
        for heads_TD in (query_THD, key_TGD, value_TGD)
    )
    return attend(query, key, value, cu_seqlens_M, longest, **options)[..., : value_TGD.shape[-1]]


def _unsupported_windows(module: nn.Module, options: Mapping[str, Any]) -> list[str]:
    """Return descriptions of the differences between the windows in the configuration and those that a layer's
    attention gets. If a family has windows only in masks, its layers without a window report this, too: all pipeline
    stages must raise the error, because after an error on one stage, the other stages would wait forever.
    """
    config: Any = module.config
    types, window = getattr(config, "layer_types", None) or (), getattr(config, "sliding_window", None)
    expected = None
    if window is not None and (not types or any("sliding" in kind for kind in types)):
        if "sliding_window" not in options:
            return [f"windows of {window} tokens that are only in masks"]
        number = getattr(module, "layer_idx", None)
        expected = window if not types or number is None or "sliding" in types[number] else None
    return [] if options.get("sliding_window") == expected else ["another window than in the configuration"]


class PackedAttention:
    """Switches a model between its usual attention and variable-length attention, by the names of their functions.

    activations: the activations of the forward passes; if it is None, the model keeps its attention function.
    is_required: whether the configuration names variable-length attention. In this case, a ValueError is raised if
        this attention cannot be used.
    reason: why variable-length attention is not used on a GPU; None without `activations` or without a reason.
    """

    def __init__(self, model: PreTrainedModel, activations: Activations | None = None):
        self._model, name = model, attention_name(model)
        self.is_required = name == VARLEN
        self.reason: str | None = None
        self.usual, self.with_lengths = (USUAL if self.is_required else name), VARLEN
        self.is_possible = self.is_required
        if self.is_required:
            require_varlen(model, activations)
        elif activations is not None and name == USUAL:
            reason = refusal_of_model(model) or refusal(activations, model.dtype)
            self.is_possible = reason is None
            if activations.device.type == "cuda":  # users do not expect it on other devices
                self.reason = reason

    @property
    def reads_lengths(self) -> bool:
        return attention_name(self._model) == self.with_lengths

    def use(self, *, lengths: bool) -> None:
        if self.is_possible:
            self._model.config._attn_implementation = self._assigned(lengths)

    def _assigned(self, lengths: bool) -> Any:
        name, part = self.with_lengths if lengths else self.usual, text_part(self._model.config)
        # the attention of a vision tower does not change
        return name if part is None else {"": name, part: name}

    @property
    def in_words(self) -> str | None:
        """A sentence with the reason for the usual attention, or None if there is no reason."""
        sentence = f"attention {self.usual}, because variable-length attention cannot be used: {self.reason}"
        return None if self.reason is None or self.reads_lengths else sentence

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions that the model may use."""
        return (self.usual, self.with_lengths) if self.is_possible else (self.usual,)

    def rename(self, names: Mapping[str, str]) -> None:
        """Use other functions, which are registered under new names. names: the new name for each name in use."""
        reads_lengths = self.reads_lengths
        self.usual, self.with_lengths = names[self.usual], names.get(self.with_lengths, self.with_lengths)
        self._model.set_attn_implementation(self._assigned(reads_lengths))

    @contextmanager
    def without_lengths(self) -> Iterator[None]:
        """Within the block, use the usual attention, for inputs with a mask, with a cache, or without lengths."""
        reads_lengths = self.reads_lengths
        self.use(lengths=False)
        try:
            yield
        finally:
            self.use(lengths=reads_lengths)


AttentionInterface.register(VARLEN, attention)
