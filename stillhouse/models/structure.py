"""Checks whether a model's structure allows wrapping it as a `Decoder`, without running the model."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from stillhouse.display import name_list

#: transformers' names of layers whose windows begin at multiples of their length in the row. The proof at load does
#: not reach windows that are longer than its documents
_ROW_WINDOWS = {
    "chunked_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
}


def require_decoder(model: Any) -> nn.Linear:
    """Return the layer that projects onto the vocabulary. Raises ValueError for a model that cannot be wrapped."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model: expected a PreTrainedModel "
            "(of a peft model, merge_and_unload(), or the model itself after its own add_adapter)"
        )
    what = describe(model)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{what} has an encoder: expected a decoder-only causal language model")
    linear = model.get_output_embeddings()
    if linear is None:
        raise ValueError(
            f"{what} has no output head over the vocabulary: "
            "expected a causal language model, as AutoModelForCausalLM loads it"
        )
    if model.base_model is model:
        raise ValueError(f"{what} has no backbone separate from its head: its base_model_prefix names no submodule")
    # an exact type test: a subclass or wrapper may compute more than x Wᵀ + b, which its `.weight` does not show
    if type(linear) is not nn.Linear:
        raise ValueError(
            f"{what} has a {type(linear).__module__}.{type(linear).__name__} as its output head: expected a "
            "plain torch.nn.Linear. Leave the head out of LoRA, or merge it, and leave the head unquantized"
        )
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise ValueError(
            f"{what} takes no position_ids: it cannot separate documents that are packed into one row "
            "(state-space and ALiBi models)"
        )
    if windows := _ROW_WINDOWS & set(getattr(model.config.get_text_config(), "layer_types", None) or ()):
        raise ValueError(
            f"{what} has layers of type {name_list(sorted(windows))}, which cut a row into windows wherever its "
            "documents begin: it cannot separate documents that are packed into one row"
        )
    return linear


def layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """The list of a language model's layers, also where it is a part of a larger model; None if it cannot be told.

    On a stage of a pipeline the list has empty modules in place of absent layers.
    """
    count = model.config.get_text_config().num_hidden_layers
    numbered = [layers for layers in outermost_lists(model.get_decoder()) if len(layers) == count]
    return numbered[0] if len(numbered) == 1 else None


def outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The lists of modules within a module that are not within another list."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from outermost_lists(child)


def describe(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (model type '{model.config.model_type}')"
