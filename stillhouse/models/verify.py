"""Checks that a wrapped model gives the right results, by running a few tokens through it in eval mode.

The functions take a `Decoder`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.models.checks import check_finite_weights
from stillhouse.models.structure import describe
from stillhouse.objective import OutputHead

_PROBE_TOKENS = 8  # per document

# Largest allowed relative error between two ways to compute the same values. Logits come from the same hidden states
# and differ only by the rounding of the head. Hidden states go through products of other shapes in every layer.
_LOGIT_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_HIDDEN_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@torch.no_grad()
def verify_wrapping(model: PreTrainedModel, decoder: Any) -> None:
    """Run probe tokens through `model` and through `decoder`, which wraps it, both in eval mode.

    Checks that no token attends to later tokens, that the head gives the model's own logits, and that a document's
    hidden states stay the same when it follows another document in a packed row. Uses no random numbers.
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
def verify_depths(decoder: Any) -> None:
    """Check that the hidden states of all depths stay the same when another document precedes them in a packed row.

    The decoder must be in eval mode and have MTP layers.
    """
    model, tokens = decoder.pretrained, _PROBE_TOKENS + decoder.mtp.depths
    _require_runnable(model)
    first, second = _probes(model, tokens)
    positions = torch.arange(tokens, device=model.device).repeat(1, 2)
    both = torch.cat([first, second])[None]
    apart = decoder(second[None], mtp_input_ids=second[None], processor=_hidden)
    packed = decoder(both, positions, mtp_input_ids=both, processor=_hidden)
    for depth, (together, alone) in enumerate(zip(packed, apart, strict=True)):
        rows = tokens - depth  # the last `depth` rows have no token to be computed from
        _check_packing(model, together[0, tokens : tokens + rows], alone[0, :rows])


def _probes(model: PreTrainedModel, tokens: int) -> tuple[Tensor, ...]:
    """Return two documents [tokens] of fixed token ids."""
    rows = model.get_input_embeddings().weight.shape[0]
    return ((torch.arange(2 * tokens, device=model.device) * 37 + 5) % rows).chunk(2)


def _hidden_and_logits(
    *, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0
) -> tuple[Tensor, Tensor]:
    return hidden_states, head.logits(hidden_states)


def _hidden(*, hidden_states: Any, head: OutputHead, context: Any, depth: int = 0) -> Any:
    return hidden_states


def _require_runnable(model: PreTrainedModel) -> None:
    attention = model.config._attn_implementation or ""
    if model.device.type == "meta":
        raise ValueError(f"{describe(model)} has no weights yet (meta device): pass verify=False")
    if model.device.type == "cpu" and "flash" in attention:
        raise ValueError(f"attention '{attention}' runs on GPUs only: pass device='cuda', or verify=False")


def _check_causal(model: PreTrainedModel, before: Tensor, after: Tensor) -> None:
    if not _median_error(after, before) <= _HIDDEN_TOLERANCE[before.dtype]:
        raise ValueError(f"{describe(model)} is not causal: its tokens attend to later tokens")


def _check_logits(model: PreTrainedModel, head: OutputHead, logits: Tensor, expected: Tensor) -> None:
    error, largest = float((logits - expected).abs().max()), float(expected.abs().max())
    if not error <= _LOGIT_TOLERANCE[logits.dtype] * largest:
        raise ValueError(
            f"{describe(model)}: its logits differ by up to {error:.2g} (the largest is {largest:.2g}) from "
            f"softcap(scale · (hidden Wᵀ + bias)) with scale {head.scale:g} and softcap {head.softcap}, as its "
            "configuration says. The model computes something else after its last hidden states"
        )


def _check_packing(model: PreTrainedModel, packed: Tensor, apart: Tensor) -> None:
    error = _median_error(packed, apart)
    if not error <= _HIDDEN_TOLERANCE[apart.dtype]:
        raise ValueError(
            f"{describe(model)} with attention '{model.config._attn_implementation}' lets documents that share "
            f"a row see each other (hidden states change by {error:.2%}): expected an attention that separates "
            "them where position_ids restart; try another attention, such as sdpa or eager"
        )


def _median_error(given_ND: Tensor, expected_ND: Tensor) -> float:
    """The median over tokens of the relative error: a single token can differ much if two experts are nearly tied."""
    difference = (given_ND - expected_ND).float().norm(dim=-1)
    return float((difference / expected_ND.float().norm(dim=-1).clamp_min(1e-30)).median())
