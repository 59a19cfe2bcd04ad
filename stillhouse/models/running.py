"""What the hooks of a decoder's layers know of the micro-batch that is running, also when layers are recomputed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Current(NamedTuple, Generic[Value]):
    """value: of the running micro-batch; None: the hooks do nothing. recomputing: whether a layer runs again in
    backward, so that its hooks have recorded their results already.
    """

    value: Value | None
    recomputing: bool


class Running(Generic[Value]):
    """The value that the forward hooks of one decoder read.

    It is a plain attribute and not a context variable, because on a GPU backward, which recomputes layers, runs in
    another thread than forward.
    """

    def __init__(self) -> None:
        self.current: Current[Value] = Current(None, recomputing=False)

    def using(self, value: Value) -> AbstractContextManager[None]:
        """Return a context in which a forward of the decoder has this value."""
        return _Using(self, Current(value, recomputing=False))

    def recomputing(self) -> AbstractContextManager[None]:
        """Return a context in which a layer is recomputed with the value that is current now."""
        return _Using(self, Current(self.current.value, recomputing=True))


def checkpoint_contexts(
    states: Sequence[Running],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts in which a layer's forward runs and is recomputed: torch's `context_fn`.

    torch calls this when the forward of a layer begins. It recomputes the layer in backward, when other micro-batches
    may have run, and the layer's hooks then need the values that are current now.
    """
    return nullcontext(), _All([each.recomputing() for each in states])


class _Using(AbstractContextManager[None]):
    """A context that sets the current value. It can be entered several times, because torch recomputes a layer for
    each backward pass through it, and zero-bubble schedules run two.
    """

    def __init__(self, state: Running, current: Current):
        self.state, self.inside, self.outside = state, current, state.current

    def __enter__(self) -> None:
        self.outside, self.state.current = self.state.current, self.inside

    def __exit__(self, *_: object) -> None:
        self.state.current = self.outside


class _All(AbstractContextManager[None]):
    """Several such contexts as one."""

    def __init__(self, contexts: Sequence[AbstractContextManager[None]]):
        self.contexts = contexts

    def __enter__(self) -> None:
        for each in self.contexts:
            each.__enter__()

    def __exit__(self, *_: object) -> None:
        for each in reversed(self.contexts):
            each.__exit__(None, None, None)
