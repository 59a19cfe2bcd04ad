"""Compiles each layer of a decoder with `torch.compile`; the layers of a model share the compiled code.

Only a layer's `forward` is compiled. The hooks of FSDP and of losses inside layers run outside of the compiled code.
Activation checkpointing also runs outside, so that backward recomputes a layer by the same compiled code. The names
of modules and parameters do not change. Generation with a cache of keys and values runs layers without compilation.

The sizes of a micro-batch are symbolic in the compiled code, except for a size of 1. So a layer needs one graph for
micro-batches of several rows, and another graph for micro-batches of a single row.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from stillhouse.display import first_line
from stillhouse.models import Decoder, ProofError
from stillhouse.models.model_checks import typename
from stillhouse.models.router_balancing import RouterBalance

Forward = Callable[..., Any]

#: the names of the layers' arguments that are caches
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
#: the maximum number of graphs of a function; if it needs more, torch runs it without compiling. A class of layers,
#: which student and teacher can share, needs a graph for each combination of layer type (such as sliding attention),
#: one or several rows, and with or without gradients
_MOST_GRAPHS = 64


def compile_layers(decoder: Decoder, backend: str = "inductor") -> None:
    """Compile the layers of a decoder's language model.

    A layer is compiled at its first forward, which raises ProofError if compiling fails. Call this function after
    adding modules to the layers (adapters), and before FSDP.

    backend: see `torch.compile`.

    Raises ValueError for a decoder with a loss inside its routers.
    """
    if RouterBalance.name in decoder.layer_losses:
        raise ValueError(
            f"{typename(decoder.pretrained)} has a loss in its routers, whose hooks compiled layers do not run: "
            "expected train.compile: false, or objective.router_aux_loss: 0"
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    # compile backward together with forward, so that `run` also catches the compilation errors of backward
    torch._functorch.config.force_non_lazy_backward_lowering = True
    kinds: set[type[nn.Module]] = set(map(type, decoder.layers()))
    compiled = {kind: torch.compile(kind.forward, dynamic=True, backend=backend) for kind in kinds}
    for layer in decoder.layers():
        kind = type(layer)
        # a bound method, because a deep copy of a layer binds the method to the copied layer
        layer.forward = MethodType(_forward(kind, compiled[kind], _taken_checkpoint(layer)), layer)


@contextmanager
def layers_not_compiled() -> Iterator[None]:
    """Within the block, functions that `torch.compile` has wrapped run without compilation."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _forward(kind: type[nn.Module], compiled: Forward, checkpoint: Forward | None) -> Forward:
    """Return a `forward` for layers of the class `kind`. It runs the compiled function; with a cache of keys and
    values, it runs `kind.forward`.

    checkpoint: transformers' checkpointing function, which calls a given function, and calls it again in backward.
    """

    def run(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        try:
            return compiled(layer, *arguments, **options)
        except TorchDynamoException as error:
            raise ProofError(
                f"torch.compile cannot compile {kind.__name__} ({first_line(error)}): expected train.compile: false"
            ) from error

    @wraps(kind.forward)
    def forward(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        if any(options.get(name) is not None for name in _CACHES):
            return kind.forward(layer, *arguments, **options)
        nonlocal checkpoint
        checkpoint = _taken_checkpoint(layer) or checkpoint  # checkpointing can be enabled after `compile_layers`
        if checkpoint is not None and layer.training:
            return checkpoint(partial(run, layer, **options), *arguments)
        return run(layer, *arguments, **options)

    return forward


def _taken_checkpoint(layer: nn.Module) -> Forward | None:
    """Return transformers' checkpointing function of a layer, or None if checkpointing is disabled already. Also
    disable checkpointing in the layer itself, because some versions would compile it as a part of the layer.
    """
    if not getattr(layer, "gradient_checkpointing", False):
        return None
    layer.gradient_checkpointing = False  # type: ignore[assignment]
    function: Any = layer._gradient_checkpointing_func
    return function
