"""The work on the rows of a chunk as a GPU computes it: the terms rebuilt from the tensors of a chunk, and compiled.

Here it runs on a CPU: uncompiled, where it must equal a plain pass but for rounding, and compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    T,
    V,
    all_terms,
    assert_accurate,
    converted,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_signal,
    rebuilt_terms,
    run,
)
from kit.tensors import assert_near
from torch import Tensor
from torch._dynamo.utils import counters

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    Entropy,
    OutputHead,
    Term,
    forward_kl,
    jsd,
    linear_objective,
    reverse_kl,
)
from stillhouse.objective.tile.logits_provider import HeadLogits
from stillhouse.objective.tile.tile import TermResult, Tile

LEAVES = make_leaves(dtype=torch.float32)


def uniform(seed: int) -> Tensor:
    return torch.rand(T, generator=generator(seed))


def dense_terms(seed: int = 0) -> list[Term]:
    """Two terms share one teacher and one softmax; a label can be the label of both cross-entropies."""
    full, labels_T = make_full(dtype=torch.float32), make_labels().roll(seed)
    return [
        CrossEntropy(labels_T, 0.3, label_smoothing=0.1, z_loss=1e-2, weights_T=uniform(seed)),
        CrossEntropy(labels_T, 0.2),
        Distill(full, jsd(0.5), 0.7),
        Distill(full, forward_kl() + 0.5 * reverse_kl(), 0.4),
        Entropy(-0.05),
    ]


def every_kind() -> list[Term]:
    return converted([*all_terms(), Distill(make_signal("bucket"), jsd(0.3), 0.0)], torch.float32)


TERMS: dict[str, Callable[[], list[Term]]] = {
    "dense": dense_terms,
    "every kind": every_kind,
    **{
        kind: lambda kind=kind: [Distill(make_signal(kind, dtype=torch.float32), jsd(0.3), 0.7)]
        for kind in ("renormalize", "mixture")
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "weights": {"weights_T": uniform(6).where(torch.arange(T) != 4, 0.0), "chunk_tokens": 7},
    "an index": {"valid_index": torch.arange(T).roll(5)[: T - 3], "chunk_tokens": 9},
}


def assert_same(terms: list[Term], error: float, **options: Any) -> None:
    """Compare a pass whose terms are rebuilt with a plain one."""
    expected = run(linear_objective, LEAVES, terms, **options)
    with rebuilt_terms():
        actual = run(linear_objective, LEAVES, terms, **options)
    assert_near(actual.gradients, expected.gradients, error)
    assert list(actual.output.metrics) == list(expected.output.metrics)
    for name, number in expected.output.metrics.items():
        torch.testing.assert_close(actual.output.metrics[name], number, rtol=error, atol=1e-6, msg=name)
    torch.testing.assert_close(actual.output.loss, expected.output.loss, rtol=error, atol=1e-6)
    torch.testing.assert_close(actual.output.per_token, expected.output.per_token, rtol=error, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_rebuilt_terms_compute_the_same(terms: Callable[[], list[Term]], options: dict[str, Any]) -> None:
    """With gradients, and the loss alone without them."""
    with torch._dynamo.config.patch(disable=True):
        assert_same(terms(), 1e-6, **options)
        with torch.no_grad():
            head = OutputHead(LEAVES.weight)
            losses = [linear_objective(LEAVES.hidden, head, terms()).loss]
            with rebuilt_terms():
                losses.append(linear_objective(LEAVES.hidden, head, terms()).loss)
    assert torch.equal(*losses)


def test_the_gradient_at_ids_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a plain pass, which sums the values of repeated ids in the tile and rounds the sum."""
    monkeypatch.setattr(HeadLogits, "rounded_buffer", lambda _, rows: torch.full((rows, V), torch.nan).bfloat16())
    with torch._dynamo.config.patch(disable=True):
        # one bfloat16 of many is rounded to its other neighbour, if its sum has another order
        assert_same(dense_terms(), 1e-4)


@dataclass(frozen=True, eq=False)
class Negative(Entropy):
    """A term of a user."""

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        # data-dependent code cannot be compiled
        return super().add_to(tile, -weights_C if bool((weights_C > 0).any()) else weights_C)


def test_a_term_of_a_user_is_not_compiled() -> None:
    """Its code may do anything."""
    assert_same([Negative(1.0)], 0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*torch.compile:UserWarning")
def test_compiled_rows() -> None:
    """They meet float64. Other tensors, row counts and chunks give their own results and compile nothing again."""
    with rebuilt_terms():
        run(linear_objective, LEAVES, dense_terms())
        graphs = counters["stats"]["unique_graphs"]
        assert_accurate(LEAVES, dense_terms(), chunk_tokens=None, tiny=1e-6, normalizer=29.0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, options in enumerate(OPTIONS.values()):
            assert_same(dense_terms(seed), 1e-5, **options)
    assert counters["stats"]["unique_graphs"] == graphs
