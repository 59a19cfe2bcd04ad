"""The non-persistent buffers of a model, such as rotary frequencies: no file has them, the family computes them.

transformers creates a model without memory before it loads the weights, so these buffers lose the values that the
constructor gave them. If no `_init_weights` computes a buffer again, it stays uninitialised.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stillhouse.libraries import reading
from stillhouse.models.lm_head import PassThrough
from stillhouse.models.model_checks import describe, unsaved_buffers


def initialize_buffers(module: nn.Module, model: PreTrainedModel, new_layers: Sequence[nn.Module] = ()) -> None:
    """Compute the non-persistent buffers with the family's own initialisation; no other tensor changes.

    module: has the tensors of `model`, and those of `new_layers`, which are not in `model`.

    The buffers are filled with 0 before a first initialisation and with 1 before a second one: a value that differs
    afterwards is one that the family does not initialise. Raises ValueError for it, naming the buffer.
    """
    zeros, ones = (_buffers_after(module, model, new_layers, value) for value in (0, 1))
    for name, buffer in ones.items():
        if bool((buffer != zeros[name]).logical_and(~buffer.isnan()).any()):
            raise ValueError(
                f"{describe(model)} has no rule to initialise its buffer '{name}', which no file holds: expected "
                "code in its _init_weights that computes the buffer, or a persistent buffer"
            )


@torch.no_grad()
def _buffers_after(
    module: nn.Module, model: PreTrainedModel, new_layers: Sequence[nn.Module], value: int
) -> dict[str, Tensor]:
    """Fill the non-persistent buffers with `value`, initialise them, and return copies of them by name.

    All other tensors are marked as initialised in the meantime, so that transformers does not change them.
    """
    names = unsaved_buffers(module)
    for name in names:
        module.get_buffer(name).fill_(value)
    unsaved = {id(module.get_buffer(name)) for name in names}
    others: list[Any] = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in unsaved]
    for tensor in others:
        tensor._is_hf_initialized = True
    for part in model.modules():
        part._is_hf_initialized = False
    with (
        _only_present_layers(model),
        torch.random.fork_rng(devices=[]),
        reading(f"{describe(model)}: its buffers cannot be computed"),
    ):
        model.initialize_weights()  # every module by the innermost transformers model that contains it
        for part in (part for layer in new_layers for part in layer.modules()):
            model._init_weights(part)
    for tensor in others:
        del tensor._is_hf_initialized
    return {name: module.get_buffer(name).clone() for name in names}


@contextmanager
def _only_present_layers(model: nn.Module) -> Iterator[None]:
    """Within the block, lists of layers lack the layers of other pipeline stages. A family may initialise every layer
    of its backbone (Falcon-H1).
    """
    lists = [(module, module._modules) for module in model.modules() if isinstance(module, nn.ModuleList)]
    for module, layers in lists:
        module._modules = {name: layer for name, layer in layers.items() if not isinstance(layer, PassThrough)}
    try:
        yield
    finally:
        for module, layers in lists:
            module._modules = layers
