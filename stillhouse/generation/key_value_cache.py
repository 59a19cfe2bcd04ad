"""A preallocated key-value cache for a full completion, so that no new token copies all earlier keys and values.

transformers' own cache copies the keys and values of every layer for each new token. For long completions, copying
takes longer than the model's computation. This cache is used only if all layers of a model have plain full attention;
a model with sliding windows or recurrent states keeps transformers' cache.

B completions, H heads, S tokens so far, W width of a head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """tokens: the number of preallocated tokens. More tokens are concatenated, as transformers' own layer does."""

    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, tokens: int):
        super().__init__()
        self._tokens = tokens
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_BHSW: Tensor, value_BHSW: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = self.get_seq_length()
        after = before + key_BHSW.shape[-2]
        if after > self._tokens:
            keys_and_values: tuple[Tensor, Tensor] = super().update(key_BHSW, value_BHSW, *args, **kwargs)
            return keys_and_values
        if not self.is_initialized:
            self.lazy_initialization(key_BHSW, value_BHSW)
            self._room = (self._empty_like(key_BHSW), self._empty_like(value_BHSW))
        assert self._room is not None
        for room, new in zip(self._room, (key_BHSW, value_BHSW), strict=True):
            room[:, :, before:after] = new
        self.keys, self.values = (room[:, :, :after] for room in self._room)
        return self.keys, self.values

    def reset(self) -> None:
        # `reset` of transformers 5.17 keeps the keys
        self.keys = self.values = self._room = None
        self.is_initialized = False
        super().reset()

    def _empty_like(self, new_BHSW: Tensor) -> Tensor:
        rows, heads, _, width = new_BHSW.shape
        return torch.empty(rows, heads, self._tokens, width, dtype=new_BHSW.dtype, device=new_BHSW.device)


def roomy_cache(model: PreTrainedModel, tokens: int) -> DynamicCache | None:
    """A cache for one call of `generate`; None if the model needs transformers' own cache."""
    if getattr(model, "_is_stateful", False) or model.config.is_encoder_decoder:
        return None
    cache = DynamicCache(config=model.config)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [RoomyLayer(tokens) for _ in cache.layers]
    return cache
