"""Compares tensors by their names."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def assert_equal_tensors(tensors: Named, expected: Named) -> None:
    """Compare to the bit. Both have the same names, in any order."""
    tensors, expected = dict(tensors), dict(expected)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
