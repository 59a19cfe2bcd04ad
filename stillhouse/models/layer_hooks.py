"""Tools for forward hooks, mainly for hooks that add a loss inside a decoder's layers.

A hook of a `LayerLossModule` adds the loss of the current micro-batch to the autograd graph, so that no pipeline
stage has to send a loss to the next stage. This also works if backward recomputes the layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class LayerRows(Protocol):
    """The rows of the layers' documents, such as `UnpackedRows`."""

    def pack(self, values_NL: Tensor, /) -> Tensor: ...
    def pack_tokens(self, values: Tensor, /) -> Tensor: ...


class Current(NamedTuple):
    """value: the loss of the current micro-batch; None: the hooks do nothing. recomputing: backward is recomputing a
    layer whose hooks have already recorded their results. rows: the rows of the layers' documents; None: packed.
    """

    value: Any
    recomputing: bool
    rows: LayerRows | None = None

    def packed(self, values: Tensor) -> Tensor:
        """Return values [N, L, …] of the layers' rows as those of the micro-batch's rows, [B, S, …]."""
        return values if self.rows is None else self.rows.pack(values)

    def packed_tokens(self, values: Tensor) -> Tensor:
        """Return values [N·L, …] of the layers' rows as those of the micro-batch's tokens, [T, …]."""
        return values if self.rows is None else self.rows.pack_tokens(values)


class LayerLossModule(nn.Module):
    """A loss inside a decoder's layers: its weights, if any, and its hooks, which read `current`.

    name: the module's name in the decoder and in checkpoints. layer_pairs: the numbers of layers of student and
    teacher that must be on the same stage. A hook must call the submodules whose weights it needs, because FSDP
    gathers weights only in the call of their module. `current` is a plain attribute, not a context variable, because
    on a GPU, backward recomputes layers in another thread.
    """

    name: ClassVar[str]
    layer_pairs: Sequence[tuple[int, int]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.current = Current(None, recomputing=False)

    def using(self, value: Any) -> AbstractContextManager[None]:
        """Return a context in which the hooks read this value."""
        return _Using([(self, Current(value, recomputing=False))])

    def initialize(self, seed: int) -> None:
        """Initialize the weights on this process. The values must not depend on the layout."""

    def keep(self, layers: range) -> None:
        """Remove the weights that only layers of other stages need."""

    def with_weights(self) -> list[nn.Module]:
        """Return this module and its submodules, without those that have no weights of their own."""
        return [module for module in self.modules() if next(module.parameters(recurse=False), None) is not None]


def checkpoint_contexts(
    losses: Mapping[str, LayerLossModule],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts in which a layer's forward runs and is recomputed: torch's `context_fn`.

    torch calls this function when the forward of a layer begins. Other micro-batches may run before backward
    recomputes the layer, so the second context restores the values that the hooks had at the call.
    """
    return nullcontext(), _Using([(loss, loss.current._replace(recomputing=True)) for loss in losses.values()])


class _Using(AbstractContextManager[None]):
    """A context that sets `current` of some losses. It can be entered several times, because torch recomputes a layer
    for each backward pass through the layer, and zero-bubble schedules run two backward passes.
    """

    def __init__(self, values: Sequence[tuple[LayerLossModule, Current]]):
        self.values = values
        self.before: list[Current] = []

    def __enter__(self) -> None:
        self.before = [loss.current for loss, _ in self.values]
        for loss, value in self.values:
            loss.current = value

    def __exit__(self, *_: object) -> None:
        for (loss, _), before in zip(self.values, self.before, strict=True):
            loss.current = before


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states in a layer's output, which may be a tuple that begins with them."""
    return output[0] if isinstance(output, tuple) else output


def with_loss(output: Any, loss: Tensor) -> Any:
    """Return a layer's output with unchanged values, and with a loss in its autograd graph."""
    hidden_BSD = _AddLoss.apply(hidden_of(output), loss)
    return (hidden_BSD, *output[1:]) if isinstance(output, tuple) else hidden_BSD


@contextmanager
def hooked(*hooks: RemovableHandle) -> Iterator[None]:
    """Remove these hooks at the end of the block."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
