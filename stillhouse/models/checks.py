"""What must hold for a model to be used here, checked before anything trains; each failure is a ValueError.

`require_decoder` reads the model's structure, `verify_wrapping` and `verify_depths` run a few tokens through it, and
the other two are for whoever knows the run: finite weights, and documents that the model's positions reach.
"""

import inspect
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stillhouse.libraries import reading
from stillhouse.models.head import local
from stillhouse.objective import OutputHead

if TYPE_CHECKING:
    from stillhouse.models.decoder import Decoder
    from stillhouse.models.mtp import MultiTokenDecoder

_PROBE_TOKENS = 8  # per document

# Largest relative error between two ways to compute the same: logits, which only round differently after the
# same hidden states, and hidden states, which go through differently shaped products in every layer.
_LOGIT_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_HIDDEN_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def require_decoder(model: Any) -> nn.Linear:
    """The layer that projects onto the vocabulary, of a model whose structure can be wrapped."""
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
        raise ValueError(f"{what} has no backbone apart from its head: its base_model_prefix names no submodule")
    # exactly: a subclass or a wrapper computes more than x Wᵀ + b, and its `.weight` does not say what
    if type(linear) is not nn.Linear:
        raise ValueError(
            f"{what} has a {type(linear).__module__}.{type(linear).__name__} as its output head: expected a "
            "plain torch.nn.Linear. Leave the head out of LoRA, or merge it, and leave the head unquantized"
        )
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise ValueError(
            f"{what} takes no position_ids: documents packed into one row cannot be kept apart in it "
            "(state-space and ALiBi models)"
        )
    return linear


@torch.no_grad()
def verify_wrapping(model: PreTrainedModel, decoder: "Decoder") -> None:
    """Run probe tokens through `model` and through `decoder`, which wraps it, both in eval mode.

    Checks that a token does not see the following ones, that the head gives the model's own logits, and that
    a document's hidden states are the same behind another one in a packed row. Draws no random numbers.
    """
    _require_runnable(model)
    device, rows = model.device, model.get_input_embeddings().weight.shape[0]
    first, second = _probes(model, _PROBE_TOKENS)
    changed = torch.cat([first[:-1], (first[-1:] + 1) % rows])
    apart = torch.stack([first, second, changed])
    hidden, logits = decoder(apart, processor=_hidden_and_logits)
    expected = model(apart, use_cache=False, return_dict=True).logits
    if not bool(expected.isfinite().all()):
        check_finite_weights(decoder, describe(model))
        raise ValueError(f"{describe(model)}: its logits are not finite in {hidden.dtype}: try a wider dtype")

    _check_causal(model, hidden[0, :-1], hidden[2, :-1])
    _check_logits(model, decoder.output_head(), logits, expected)
    positions = torch.arange(_PROBE_TOKENS, device=device).repeat(1, 2)
    packed, _ = decoder(torch.cat([first, second])[None], positions, processor=_hidden_and_logits)
    _check_packing(model, packed[0, _PROBE_TOKENS:], hidden[1])


@torch.no_grad()
def verify_depths(decoder: "MultiTokenDecoder") -> None:
    """Check that further depths, too, are the same behind another document in a packed row; in eval mode."""
    model, tokens = decoder.main.pretrained, _PROBE_TOKENS + decoder.depths
    _require_runnable(model)
    first, second = _probes(model, tokens)
    positions = torch.arange(tokens, device=model.device).repeat(1, 2)
    apart = decoder(second[None], processor=_hidden_and_logits)
    packed = decoder(torch.cat([first, second])[None], positions, processor=_hidden_and_logits)
    for depth, (together, alone) in enumerate(zip(packed, apart, strict=True)):
        rows = tokens - depth  # that have a token to be made of
        _check_packing(model, together[0][0, tokens : tokens + rows], alone[0][0, :rows])


def check_finite_weights(decoder: "Decoder", which: str) -> None:
    """Raise ValueError naming the first tensor that holds a NaN or an infinity; `which` says whose it is.

    Of a tensor that lies over several processes, each looks at its own part.
    """
    for name, tensor in _floating(decoder):
        if not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise ValueError(
                f"{which}: {bad} of the {tensor.numel()} values of '{name}' are NaN or infinite: "
                "expected finite weights; the checkpoint is damaged"
            )


def check_saving(decoder: "Decoder") -> None:
    """Raise ValueError for a model whose configurations cannot be written, as each checkpoint will have to."""
    model = decoder.pretrained
    with reading(f"{describe(model)}: its configuration cannot be saved again"), TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)


def check_document_length(decoder: "Decoder", max_tokens: int, which: str) -> None:
    """Raise ValueError where the model's positions cannot serve documents of `max_tokens` tokens.

    A table of learned positions has an end. Rotary angles that change with the longest document of a forward
    pass (longrope, dynamic) would make a document's result depend on which others it is packed with.
    """
    config = decoder.config.get_text_config()
    reach = getattr(config, "max_position_embeddings", None)
    if reach is not None and max_tokens > reach and _has_position_table(decoder, reach):
        raise ValueError(
            f"{which} has learned positions for {reach} tokens: expected data.max_tokens of at most {reach}, "
            f"got {max_tokens}"
        )
    for rope in _rope_parameters(config):
        original = rope.get("original_max_position_embeddings") or reach
        if rope.get("rope_type") in ("longrope", "dynamic") and original and max_tokens > original:
            raise ValueError(
                f"{which} changes its rotary positions ({rope['rope_type']}) for a whole batch once a document "
                f"in it is longer than {original} tokens, so that a result depends on the batch it is in: "
                f"expected data.max_tokens of at most {original}, got {max_tokens}"
            )


def describe(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (model type '{model.config.model_type}')"


def _probes(model: PreTrainedModel, tokens: int) -> tuple[Tensor, ...]:
    """Two documents."""
    rows = model.get_input_embeddings().weight.shape[0]
    return ((torch.arange(2 * tokens, device=model.device) * 37 + 5) % rows).chunk(2)


def _hidden_and_logits(
    *, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0
) -> tuple[Tensor, Tensor]:
    return hidden_states, head.logits(hidden_states)


def _require_runnable(model: PreTrainedModel) -> None:
    attention = model.config._attn_implementation or ""
    if model.device.type == "meta":
        raise ValueError(f"{describe(model)} has no weights yet (meta device): pass verify=False")
    if model.device.type == "cpu" and "flash" in attention:
        raise ValueError(f"attention '{attention}' runs on GPUs only: pass device='cuda', or verify=False")


def _check_causal(model: PreTrainedModel, before: Tensor, after: Tensor) -> None:
    if not _median_error(after, before) <= _HIDDEN_TOLERANCE[before.dtype]:
        raise ValueError(f"{describe(model)} is not causal: its tokens see the ones that follow them")


def _check_logits(model: PreTrainedModel, head: OutputHead, logits: Tensor, expected: Tensor) -> None:
    error, largest = float((logits - expected).abs().max()), float(expected.abs().max())
    if not error <= _LOGIT_TOLERANCE[logits.dtype] * largest:
        raise ValueError(
            f"{describe(model)}: its logits differ by up to {error:.2g} (the largest is {largest:.2g}) from "
            f"softcap(scale · (hidden Wᵀ + bias)) with scale {head.scale:g} and softcap {head.softcap}, as its "
            "configuration reads. It does something after its last hidden states that is unknown here"
        )


def _check_packing(model: PreTrainedModel, packed: Tensor, apart: Tensor) -> None:
    error = _median_error(packed, apart)
    if not error <= _HIDDEN_TOLERANCE[apart.dtype]:
        raise ValueError(
            f"{describe(model)} with attention '{model.config._attn_implementation}' lets documents that share "
            f"a row see each other (hidden states change by {error:.2%}): expected position_ids that restart to "
            "keep them apart. Another attention (sdpa, eager) may do so"
        )


def _median_error(given_ND: Tensor, expected_ND: Tensor) -> float:
    """The median over tokens of the relative error: single ones jump where two experts are nearly tied."""
    difference = (given_ND - expected_ND).float().norm(dim=-1)
    return float((difference / expected_ND.float().norm(dim=-1).clamp_min(1e-30)).median())


def _floating(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return ((name, local(tensor)) for name, tensor in tensors if tensor.is_floating_point())


def _has_position_table(decoder: "Decoder", reach: int) -> bool:
    """Whether an embedding besides the tokens' has about `reach` rows (OPT keeps two more than it says)."""
    tokens = decoder.pretrained.get_input_embeddings()
    tables = [each for each in decoder.modules() if isinstance(each, nn.Embedding) and each is not tokens]
    return any(reach <= each.num_embeddings <= reach + 2 for each in tables)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings, one dict for all layers or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return nested or [parameters]
