"""Weights that a `Decoder` has under several names: a state dict contains each of them once."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from stillhouse.models.families import text_config
from stillhouse.models.model_checks import describe

_KEY = "tie_word_embeddings"


def match_tied_flag(model: PreTrainedModel) -> None:
    """Let the configuration say whether the model's head is tied to its embedding.

    transformers does not tie weights that differ in the files. Saved with a configuration that says otherwise, the
    model would give other logits in every reader that obeys the configuration.
    Raises ValueError if the same key also shares weights between layers (Zamba 2): no value describes such a model.
    """
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    is_tied, config = head is embedding, model.config
    if getattr(config, _KEY, False):
        names = model.get_expanded_tied_weights_keys(all_submodels=True).items()
        pairs = {name: [model.get_parameter_or_buffer(part) for part in (name, other)] for name, other in names}
        separate = [name for name, (weight, other) in pairs.items() if weight is not other]
        if separate and any(weight is not head for weight, _ in pairs.values()):
            raise ValueError(
                f"{describe(model)} has {_KEY} true, but '{separate[0]}' has other values than the weight with which "
                "this key shares it. In this family, it also shares weights between layers: expected equal values"
            )
    for part in (config, text_config(config)):
        if getattr(part, _KEY, is_tied) != is_tied:
            setattr(part, _KEY, is_tied)


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
