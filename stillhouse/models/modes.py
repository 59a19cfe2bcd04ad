"""Train and eval mode of a module for the duration of a block."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set all submodules to train or eval mode; afterwards each gets its previous mode back."""
    changed = [submodule for submodule in module.modules() if submodule.training != training]
    for submodule in changed:
        submodule.training = training
    try:
        yield
    finally:
        for submodule in changed:
            submodule.training = not training


def evaluating(module: nn.Module) -> AbstractContextManager[None]:
    """Set all submodules to eval mode; afterwards each gets its previous mode back."""
    return in_mode(module, training=False)
