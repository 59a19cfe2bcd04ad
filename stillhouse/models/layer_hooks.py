"""Finds a decoder's layers by number, records their outputs, and computes losses inside them, by hooks.

A hook of a `LayerLossModule` adds the loss of the current micro-batch to the autograd graph of the layer's output, so
that no pipeline stage has to send a loss to the next stage. This also works if backward recomputes the layer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stillhouse.models.families import layer_list, text_config


class Current(NamedTuple):
    """The state that the hooks of a `LayerLossModule` read."""

    value: Any  # the loss of the current micro-batch; if it is None, the hooks do nothing
    recomputing: bool  # whether backward is recomputing a layer whose hooks have already recorded their results
    rows: Any = None  # the rows in the layers, such as `UnpackedRows`; None if they are the micro-batch's rows

    def packed_tokens(self, values: Tensor) -> Tensor:
        """Return values [N·L, …] of the layers' rows as values of the micro-batch's tokens, [T, …]."""
        return values if self.rows is None else self.rows.pack_tokens(values)


class LayerLossModule(nn.Module):
    """A loss inside a decoder's layers: its weights, if any, and its hooks, which read `current`.

    name: the module's name in the decoder and in checkpoints. layer_pairs: (number of a student's layer, number of a
    teacher's layer) for layers that must be on the same stage. A hook must call the submodules whose weights it
    needs, because FSDP gathers weights only when their module is called. `current` is a plain attribute, not a
    context variable, because backward on a GPU recomputes layers in another thread.
    """

    name: ClassVar[str]
    layer_pairs: Sequence[tuple[int, int]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.current = Current(None, recomputing=False)

    def using(self, value: Any) -> AbstractContextManager[None]:
        """Return a context in which the hooks read `value` as the loss of the current micro-batch."""
        return _Using([(self, Current(value, recomputing=False))])

    def initialize(self, seed: int) -> None:
        """Initialize the weights on this process. The values must not depend on the layout."""

    def keep(self, layers: range) -> None:
        """Remove the weights that this stage does not need. layers: the numbers of this stage's layers."""


def checkpoint_contexts(
    losses: Mapping[str, LayerLossModule],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts, for a layer's forward and for its recomputation in backward.

    This function is the `context_fn` of torch's activation checkpointing, which calls it when the forward begins.
    Other micro-batches may run before the recomputation, so the second context restores the values that `current` had
    when the forward began.
    """
    return nullcontext(), _Using([(loss, loss.current._replace(recomputing=True)) for loss in losses.values()])


class _Using(AbstractContextManager[None]):
    """A context that sets `current` of some losses. It can be entered several times, because torch recomputes a layer
    for each backward pass through the layer, and zero-bubble schedules run two of these passes.
    """

    def __init__(self, values: Sequence[tuple[LayerLossModule, Current]]):
        self.values, self.before = values, [loss.current for loss, _ in values]

    def __enter__(self) -> None:
        self.before = [loss.current for loss, _ in self.values]
        for loss, value in self.values:
            loss.current = value

    def __exit__(self, *_: object) -> None:
        for (loss, _), before in zip(self.values, self.before, strict=True):
            loss.current = before


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states in a layer's output. If the output is a tuple, they are its first element."""
    return output[0] if isinstance(output, tuple) else output


def with_loss(output: Any, loss: Tensor) -> Any:
    """Return a layer's output with unchanged values. Backward through it gives `loss` a gradient of 1."""
    hidden_BSD = _AddLoss.apply(hidden_of(output), loss)
    return (hidden_BSD, *output[1:]) if isinstance(output, tuple) else hidden_BSD


class _AddLoss(torch.autograd.Function):
    """Returns a tensor unchanged and gives `loss` a gradient of 1 in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = (loss.shape, loss.dtype, loss.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.loss
        return grad, torch.ones(shape, dtype=dtype, device=device)


@contextmanager
def hooked(*hooks: RemovableHandle) -> Iterator[None]:
    """Remove these hooks at the end of the block."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def numbered_layers(decoder: Any) -> nn.ModuleList:
    """Return all layers of a `Decoder`, with placeholders for the layers of other pipeline stages. Raises ValueError
    for a model whose layers are not in one list.
    """
    layers = layer_list(decoder.pretrained)
    if layers is None:
        count = text_config(decoder.config).num_hidden_layers
        raise ValueError(
            f"model type '{decoder.config.model_type}' does not have exactly one list of {count} layers: expected "
            "one list, in which layers can be found by their numbers"
        )
    return layers


def recorded(decoder: Any, numbers: Iterable[int], into: dict[int, Tensor]) -> AbstractContextManager[None]:
    """Return a context in which a forward writes the outputs [B, S, D] of layers with these numbers into a dict."""

    def record(number: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        hidden = hidden_of(output)
        into[number] = hidden if decoder.rows is None else decoder.rows.pack(hidden)

    layers = numbered_layers(decoder)
    return hooked(*(layers[number].register_forward_hook(partial(record, number)) for number in numbers))
