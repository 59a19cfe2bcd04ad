"""Compares tensors: to the bit, or by their distance relative to the norm of the expected one."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@contextmanager
def no_waiting(mode: str = "error") -> Iterator[None]:
    """Raise an error, or warn, if the block waits for the GPU."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Largest(TorchDispatchMode):
    """Records the largest tensor. numbers: the number of its elements. products: the number of matrix products."""

    numbers = 0
    products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.products += function.overloadpacket in PRODUCTS
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


Named = Mapping[Any, Tensor] | Iterable[tuple[str, Tensor]]


def assert_equal_tensors(tensors: Named, expected: Named) -> None:
    """Compare to the bit. Both have the same names, in any order."""
    tensors, expected = dict(tensors), dict(expected)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def assert_same_bytes(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare names, dtypes and bytes."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)), name


def assert_near(tensors: Named, expected: Named, within: float) -> None:
    """Compare within a relative distance, which fails if it is NaN. Both have the same names, in any order."""
    tensors, expected = dict(tensors), dict(expected)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        difference, norm = (tensors[name].double() - tensor.double()).norm(), tensor.double().norm()
        assert difference <= within * norm, f"{name}: {difference / norm}"
