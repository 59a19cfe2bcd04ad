"""Checks of the models of a run before training starts; each failure is a ValueError."""

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from stillhouse.libraries import reading
from stillhouse.models.head import local
from stillhouse.models.quantized import is_quantized
from stillhouse.models.structure import describe


class ProofError(ValueError):
    """A model that does not compute what training assumes."""


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
    with reading(f"{describe(model)}: its configuration cannot be saved again"), TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)


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
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (
        (name, local(tensor)) for name, tensor in tensors if tensor.is_floating_point() and not is_quantized(tensor)
    )


def _has_position_table(model: PreTrainedModel, reach: int) -> bool:
    """Whether an embedding other than the token embedding has `reach` rows, or up to two more (OPT has two more)."""
    tokens = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not tokens]
    return any(reach <= each.num_embeddings <= reach + 2 for each in tables)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings, one dict for all layers or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return nested or [parameters]
