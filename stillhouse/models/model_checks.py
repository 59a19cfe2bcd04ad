"""Checks, without running a model, whether it can be wrapped as a `Decoder`, trained and saved."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from stillhouse.libraries import reading
from stillhouse.models.dtensors import local
from stillhouse.models.families import ModelFacts, backbone_name
from stillhouse.models.quantized import is_quantized


class NotFiniteError(ValueError):
    """A value that a model computes is NaN or infinite. norm: for the gradient, its global norm; otherwise NaN."""

    def __init__(self, message: str, norm: float = math.nan):
        super().__init__(message)
        self.norm = norm

    @classmethod
    def in_gradient(cls, norm: float) -> "NotFiniteError":
        return cls(f"the gradient is not finite (norm {norm:g})", norm)


def require_decoder(model: Any) -> nn.Linear:
    """Return the layer that projects onto the vocabulary. Raises ValueError for a model that cannot be wrapped."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model: expected a PreTrainedModel "
            "(instead of a peft model, pass the result of its merge_and_unload(), or use the model's add_adapter)"
        )
    what = typename(model)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{what} has an encoder: expected a decoder-only causal language model")
    linear = model.get_output_embeddings()
    if linear is None:
        raise ValueError(
            f"{what} has no output head over the vocabulary: "
            "expected a causal language model, as AutoModelForCausalLM loads it"
        )
    if backbone_name(model) is None:
        raise ValueError(
            f"{what} has no backbone separate from its head, by its base_model_prefix or by its input embedding: "
            "expected a model whose backbone is a submodule"
        )
    # an exact type test: a subclass may compute more than x Wᵀ + b, but the objective reads only weight and bias
    if type(linear) is not nn.Linear:
        raise ValueError(
            f"{what} has a {type(linear).__module__}.{type(linear).__name__} as its output head: expected a "
            "plain torch.nn.Linear; exclude the head from LoRA (or merge the LoRA) and from quantization"
        )
    return linear


def typename(model: PreTrainedModel) -> str:
    """Return a model's class and type, for messages."""
    return f"{type(model).__name__} (model type '{model.config.model_type}')"


class ProofError(ValueError):
    """A model does not compute the values that training assumes."""


@contextmanager
def prefixed(what: str, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Put `what`, such as a model's name, before the message of any error of this kind in the block."""
    try:
        yield
    except kind as error:
        raise (type(error) if isinstance(error, ProofError) else kind)(f"{what}: {error}") from error


def check_finite_weights(module: nn.Module, which: str) -> None:
    """Raise ProofError, naming the first tensor that contains a NaN or an infinity.

    Each process checks only its own shard of a sharded tensor. Quantized weights are not checked here, because
    `quantized.py` checks their files. Persistent buffers may contain infinities, because some are limits (Gemma 4).
    """
    unsaved = unsaved_buffers(module)
    stored = {name for name, _ in module.named_buffers()} - {*unsaved}
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if not value.is_floating_point() or is_quantized(value):
            continue
        tensor = local(value)
        is_bad = tensor.isnan() if name in stored else ~tensor.isfinite()
        if not bool(is_bad.any()):
            continue
        message = f"{which}: {int(is_bad.sum())} of the {tensor.numel()} values of '{name}' are NaN or infinite: "
        if name in unsaved:
            raise ProofError(
                f"{message}no file has this buffer, so the model's code has computed it from the configuration; "
                "expected a configuration that gives finite values"
            )
        raise ProofError(
            f"{message}expected finite weights; the checkpoint is damaged or, for a new model, the tensor has not "
            "been initialised"
        )


def unsaved_buffers(module: nn.Module) -> list[str]:
    """Return the names of the non-persistent buffers, which no file has."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, part in module.named_modules()
        for name, _ in part.named_buffers(recurse=False)
        if name in part._non_persistent_buffers_set
    ]


def check_saving(model: PreTrainedModel) -> None:
    """Raise ValueError if the model's configuration or generation_config, which checkpoints have, cannot be saved."""
    configurations = [config for config in (model.config, model.generation_config) if config is not None]
    with TemporaryDirectory() as folder, reading(f"{typename(model)}: its configuration cannot be saved again"):
        for config in configurations:
            config.save_pretrained(folder)


def check_document_length(model: PreTrainedModel, max_tokens: int, which: str) -> None:
    """Raise ValueError if the model's position encoding does not support documents of `max_tokens` tokens.

    A table of learned positions has a fixed length. Rotary angles of some types depend on the longest document of a
    forward pass (`ModelFacts.length_limits`), so a document's result would depend on the other documents of the pass.
    """
    facts = ModelFacts(model.config)
    reach, embedding = facts.max_positions, model.get_input_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not embedding]
    # OPT's table of positions has two additional rows
    tables = [] if reach is None else [table for table in tables if reach <= table.num_embeddings <= reach + 2]
    if reach is not None and max_tokens > reach and tables:
        raise ValueError(
            f"{which} has learned positions for {reach} tokens: expected documents of at most {reach}, "
            f"got {max_tokens}"
        )
    for kind, longest in facts.length_limits:
        if max_tokens > longest:
            raise ValueError(
                f"{which} changes its rotary positions ({kind}) for a whole batch if one document is longer than "
                f"{longest} tokens, so a document's result would depend on other documents of its batch: expected "
                f"documents of at most {longest}, got {max_tokens}"
            )


def warn_of_positions(model: PreTrainedModel, longest: int, which: str) -> list[str]:
    """Return a list with a warning if `longest` tokens exceed max_position_embeddings, otherwise an empty list."""
    if (reach := ModelFacts(model.config).max_positions) is None or longest <= reach:
        return []
    return [
        f"{which} has max_position_embeddings {reach:,}, and the longest document has {longest:,} tokens: the model "
        "may not know positions beyond; lower data.max_tokens, or extend the model's positions (rope_scaling)"
    ]
