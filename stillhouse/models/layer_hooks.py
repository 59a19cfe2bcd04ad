"""Tools for forward hooks, mainly for hooks that add a loss inside a decoder's layers.

Such a hook (`router_aux_loss.py`, `hidden_match.py`) reads the inputs of its loss for the current micro-batch from
`Running`, even if its layer is recomputed in backward, and adds the loss to the autograd graph with `AddLoss`. So
no pipeline stage has to send the loss to the next one.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

Value = TypeVar("Value")


class Current(NamedTuple, Generic[Value]):
    """value: the value for the current micro-batch; None: the hooks do nothing. recomputing: whether backward is
    recomputing a layer. The layer's hooks have then recorded their results already.
    """

    value: Value | None
    recomputing: bool


class Running(Generic[Value]):
    """The value that the forward hooks of one decoder read.

    It is a plain attribute, not a context variable: on a GPU, backward runs in another thread than forward, and
    layers are recomputed in that thread.
    """

    def __init__(self) -> None:
        self.current: Current[Value] = Current(None, recomputing=False)

    def using(self, value: Value) -> AbstractContextManager[None]:
        """Return a context in which the hooks read this value."""
        return _Using([(self, Current(value, recomputing=False))])


def checkpoint_contexts(
    states: Sequence[Running],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts in which a layer's forward runs and is recomputed: torch's `context_fn`.

    torch calls this when the forward of a layer begins, and keeps both contexts. Until backward recomputes the layer,
    other micro-batches may have run, but the layer's hooks need the values of the time when the forward began.
    """
    return nullcontext(), _Using([(state, Current(state.current.value, recomputing=True)) for state in states])


class _Using(AbstractContextManager[None]):
    """A context that sets the current values of some states.

    It can be entered several times, because torch recomputes a layer for each backward pass through the layer, and
    zero-bubble schedules run two backward passes.
    """

    def __init__(self, values: Sequence[tuple[Running, Current]]):
        self.values = values
        self.before: list[Current] = []

    def __enter__(self) -> None:
        self.before = [state.current for state, _ in self.values]
        for state, value in self.values:
            state.current = value

    def __exit__(self, *_: object) -> None:
        for (state, _), before in zip(self.values, self.before, strict=True):
            state.current = before


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states in a layer's output, which may be a tuple that begins with them."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def hooked(*hooks: RemovableHandle) -> Iterator[None]:
    """Remove these hooks at the end of the block."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class AddLoss(torch.autograd.Function):
    """Returns a tensor unchanged and gives `loss` a gradient of 1 in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = (loss.shape, loss.dtype, loss.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.loss
        return grad, torch.ones(shape, dtype=dtype, device=device)
