"""Compares tensors: to the bit, or by their distance relative to the norm of the expected one."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Named = Mapping[Any, Tensor] | Iterable[tuple[str, Tensor]]


def assert_equal_tensors(tensors: Named, expected: Named) -> None:
    """Compare to the bit. Both have the same names, in any order."""
    tensors, expected = dict(tensors), dict(expected)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def assert_near(tensors: Named, expected: Named, within: float) -> None:
    """Compare within a relative distance, which fails if it is NaN. Both have the same names, in any order."""
    tensors, expected = dict(tensors), dict(expected)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        difference, norm = (tensors[name].double() - tensor.double()).norm(), tensor.double().norm()
        assert difference <= within * norm, f"{name}: {difference / norm}"
