"""Checks of a model without running it: whether it can be wrapped as a `Decoder`, trained and saved.

Each failure is a ValueError.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from stillhouse.display import name_list
from stillhouse.libraries import reading
from stillhouse.models.dtensors import local
from stillhouse.models.quantized import is_quantized

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
    """The list of a language model's layers, also where it is a part of a larger model; None if it is not found.

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


class ProofError(ValueError):
    """A model that does not compute what training assumes."""


@contextmanager
def prefixed(what: str, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Within the block, put `what`, such as a model's name, before the message of an error of this kind."""
    try:
        yield
    except kind as error:
        raise kind(f"{what}: {error}") from error


def check_finite_weights(module: nn.Module, which: str) -> None:
    """Raise ProofError naming the first tensor that holds a NaN or an infinity.

    `which`: the model's name for the message. Each process checks only its own shard of a sharded tensor. Quantized
    weights are left out: their files were checked when they were loaded (`quantized.py`).
    """
    for name, tensor in _floating(module):
        if not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise ProofError(
                f"{which}: {bad} of the {tensor.numel()} values of '{name}' are NaN or infinite: "
                "expected finite weights; the checkpoint is damaged"
            )


def check_saving(model: PreTrainedModel) -> None:
    """Raise ValueError for a model whose configurations cannot be saved: every checkpoint has to save them."""
    configurations = [config for config in (model.config, model.generation_config) if config is not None]
    with TemporaryDirectory() as folder, reading(f"{describe(model)}: its configuration cannot be saved again"):
        for config in configurations:
            config.save_pretrained(folder)


def check_document_length(model: PreTrainedModel, max_tokens: int, which: str) -> None:
    """Raise ValueError if the model's position encoding does not support documents of `max_tokens` tokens.

    A table of learned positions has a fixed length. Rotary angles that change with the longest document of a forward
    pass (longrope, dynamic) would make the result of a document depend on the documents that it is packed with.
    """
    config = model.config.get_text_config()
    reach = getattr(config, "max_position_embeddings", None)
    if reach is not None and max_tokens > reach and _has_position_table(model, reach):
        raise ValueError(
            f"{which} has learned positions for {reach} tokens: expected documents of at most {reach}, "
            f"got {max_tokens}"
        )
    for rope in _rope_parameters(config):
        original = rope.get("original_max_position_embeddings") or reach
        if rope.get("rope_type") in ("longrope", "dynamic") and original and max_tokens > original:
            raise ValueError(
                f"{which} changes its rotary positions ({rope['rope_type']}) for a whole batch once a document "
                f"in it is longer than {original} tokens, so that a result depends on the batch it is in: "
                f"expected documents of at most {original}, got {max_tokens}"
            )


def warn_of_positions(model: PreTrainedModel, longest: int, which: str) -> list[str]:
    """A warning if a document of `longest` tokens has positions beyond those that the model's configuration names."""
    reach = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if reach is None or longest <= reach:
        return []
    return [
        f"{which} has max_position_embeddings {reach:,}, and the longest document has {longest:,} tokens: what is "
        "beyond may be new to the model; lower data.max_tokens, or extend the model's positions (rope_scaling)"
    ]


def _floating(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and not is_quantized(tensor):
            yield name, local(tensor)


def _has_position_table(model: PreTrainedModel, reach: int) -> bool:
    """Whether an embedding other than the token embedding has `reach` rows, or up to two more (OPT has two more)."""
    tokens = model.get_input_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens]
    return any(reach <= table.num_embeddings <= reach + 2 for table in tables)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings, one dict for all layers or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [values for values in parameters.values() if isinstance(values, dict)]
    return nested or [parameters]
