"""Weights that a `Decoder` has under several names: a state dict contains each of them once."""

from typing import Any

from torch import nn


def keep_shared_once(decoder: nn.Module) -> None:
    """Let a decoder's state dict have each shared weight once, and let loading share the weights again."""
    decoder.register_state_dict_post_hook(_drop_shared)
    decoder.register_load_state_dict_pre_hook(_find_shared)
    decoder.register_load_state_dict_post_hook(_share_again)


def _drop_shared(decoder: Any, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    """Keep a shared weight in the state dict only once, so that a checkpoint contains it once."""
    for name in decoder.shared_names():
        state.pop(prefix + name, None)


def _find_shared(decoder: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """When loading, use a shared weight for all parameters that share it."""
    decoder.__dict__["_shared"] = decoder.shared_names()
    for name, other in decoder.shared_names().items():
        if prefix + other in state:
            state.setdefault(prefix + name, state[prefix + other])


def _share_again(decoder: Any, _: Any) -> None:
    """Share the weights again, because `load_state_dict(assign=True)` gives each name a parameter of its own."""
    decoder.share(decoder.__dict__.pop("_shared"))
