"""Plans, leaves and checks for the tests of the compiled pointwise functions."""

from collections.abc import Callable
from typing import Any

import torch
from kit.objective_cases import (
    Leaves,
    Result,
    T,
    make_full,
    make_labels,
    make_leaves,
    make_mixture,
    make_signal,
)
from kit.tensors import assert_near

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    Entropy,
    Term,
    forward_kl,
    parse_divergence,
    reverse_kl,
)

#: an odd size, just above the smallest one that is compiled
V = 2053


def leaves_of(tokens: int = T, dtype: torch.dtype = torch.float32, **options: Any) -> Leaves:
    return make_leaves(tokens, V, dtype=dtype, **options)


def plain_terms(tokens: int = T, dtype: torch.dtype = torch.float32) -> list[Term]:
    """Return the terms that most tests share. The objects are new, but equal to those of every other call."""
    return [Distill(make_full(tokens, V, dtype=dtype), forward_kl())]


def full_terms(tokens: int = T, dtype: torch.dtype = torch.float32) -> list[Term]:
    """Return terms that use every part of a plan: both kinds of pairs, a mixture, two temperatures, a bucket.

    The kernels do not compute the divergence of a sparse signal, and the tail "bucket" needs the most of them.
    """
    full = make_full(tokens, V, dtype=dtype)
    return [
        CrossEntropy(make_labels(tokens, V), 0.3, label_smoothing=0.1, z_loss=1e-2),
        Distill(full, parse_divergence("forward_kl"), 0.7, 1.5),
        Distill(full, parse_divergence("jsd(0.3)"), 0.5),
        Distill(make_mixture(tokens, V, dtype=dtype), parse_divergence("total_variation"), 0.7),
        Distill(make_signal("bucket", tokens, V, dtype=dtype), reverse_kl(), 0.4),
        Entropy(-0.05, 1.5),
    ]


PLANS: dict[str, Callable[..., list[Term]]] = {"plain": plain_terms, "full": full_terms}


def assert_close(actual: Result, expected: Result) -> None:
    """Assert that two results differ by at most a few units in the last place of float32."""
    assert_near(actual.gradients, expected.gradients, 4 * torch.finfo(torch.float32).eps)
    # a small divergence is a difference of large sums
    torch.testing.assert_close(actual.output.metrics, expected.output.metrics, rtol=1e-5, atol=1e-6)
