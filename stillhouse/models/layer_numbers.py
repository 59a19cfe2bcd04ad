"""Access to a decoder's layers by number: to record their outputs, and to match them with a teacher's layers."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.models.decoder import Decoder
from stillhouse.models.families import layer_list, text_config
from stillhouse.models.hidden_match import HiddenMatch, HiddenPair
from stillhouse.models.layer_hooks import hidden_of, hooked


def match_hidden(student: Decoder, pairs: Sequence[HiddenPair], teacher_layers: int, teacher_width: int) -> None:
    """Prepare layers of an unsharded student for the hidden-state loss, by adding a `HiddenMatch`.

    pairs: negative numbers count from the last layer. Raises ValueError for a layer that a model does not have, for
    a pair that is given twice, and for a student whose layers cannot be found.
    """
    layers, width = numbered_layers(student), student.width
    numbered = tuple(
        replace(
            pair,
            student=_number(pair.student, len(layers), "student"),
            teacher=_number(pair.teacher, teacher_layers, "teacher"),
        )
        for pair in pairs
    )
    names = [pair.name for pair in numbered]
    if twice := next((pair for pair in numbered if names.count(pair.name) > 1), None):
        raise ValueError(
            f"layers {twice.student} of the student and {twice.teacher} of the teacher have the loss {twice.kind} "
            "more than once: expected every pair once, with the sum of the scales"
        )
    device = student.pretrained.device
    # float32, because the loss is computed in float32
    projectors = {
        name: nn.Linear(width, teacher_width, bias=False, device=device, dtype=torch.float32)
        for name in (names if width != teacher_width else ())
    }
    student.add_layer_loss(HiddenMatch(list(layers), numbered, nn.ModuleDict(projectors)))


def numbered_layers(decoder: Decoder) -> nn.ModuleList:
    """Return all layers of a decoder; on a pipeline stage, with placeholders for the layers of other stages.

    Raises ValueError for a model whose layers are not in one list.
    """
    layers = layer_list(decoder.pretrained)
    if layers is None:
        raise ValueError(
            f"model type '{decoder.config.model_type}' has not exactly one list of "
            f"{text_config(decoder.config).num_hidden_layers} layers: expected one, so that layers are found by "
            "their numbers"
        )
    return layers


def layers_name(decoder: Decoder) -> str:
    """Return the name of the list of layers in a decoder's backbone. Raises ValueError as `numbered_layers`."""
    layers = numbered_layers(decoder)
    return next(name for name, module in decoder.backbone.named_modules() if module is layers)


def recorded(decoder: Decoder, numbers: Iterable[int], into: dict[int, Tensor]) -> AbstractContextManager[None]:
    """Return a context in which a forward of the decoder writes these layers' outputs [B, S, D] into a dict."""
    layers = numbered_layers(decoder)
    return hooked(
        *(layers[number].register_forward_hook(partial(_record, decoder, number, into)) for number in numbers)
    )


def _record(
    decoder: Decoder, number: int, into: dict[int, Tensor], _: nn.Module, __: tuple[Any, ...], output: Any
) -> None:
    hidden = hidden_of(output)
    into[number] = hidden if decoder.rows is None else decoder.rows.pack(hidden)


def _number(number: int, layers: int, which: str) -> int:
    if not -layers <= number < layers:
        raise ValueError(
            f"layer {number} of the {which}, which has {layers} layers: expected 0 to {layers - 1}, "
            f"or -{layers} to -1"
        )
    return number % layers
