"""The work on the rows of a chunk as a GPU computes it: the terms rebuilt from the tensors of a chunk, and compiled.

Here it runs on a CPU: uncompiled, where it must equal a plain pass but for rounding, and compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    Leaves,
    Result,
    T,
    assert_accurate,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_mixture,
    make_signal,
    run,
)
from kit.tensors import assert_near
from torch import Tensor
from torch._dynamo.utils import counters

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    Entropy,
    LogRatio,
    OutputHead,
    PolicyGradient,
    SampledKL,
    Term,
    forward_kl,
    jsd,
    linear_objective,
    reverse_kl,
    total_variation,
)
from stillhouse.objective.tile import compiled
from stillhouse.objective.tile.logits_provider import HeadLogits
from stillhouse.objective.tile.tile import TermResult, Tile

V = 61


def uniform(seed: int) -> Tensor:
    return torch.rand(T, generator=generator(seed))


def rollout_terms(seed: int = 0) -> list[Term]:
    labels_T = make_labels(T, V)
    return [
        PolicyGradient(labels_T, uniform(seed) - 0.5, -uniform(1), -uniform(2), kl_scale=0.1, dual_clip=3.0),
        LogRatio(labels_T, -3 * uniform(3)),
        SampledKL(labels_T, -3 * uniform(4), weights_T=uniform(5)),
    ]


def dense_terms(seed: int = 0) -> list[Term]:
    """Two terms share one teacher and one softmax; a label can be the label of both cross-entropies."""
    full, labels_T = make_full(T, V, dtype=torch.float32), make_labels(T, V).roll(seed)
    return [
        CrossEntropy(labels_T, 0.3, label_smoothing=0.1, z_loss=1e-2, weights_T=uniform(seed)),
        CrossEntropy(labels_T, 0.2),
        Distill(full, jsd(0.5), 0.7),
        Distill(full, forward_kl() + 0.5 * reverse_kl(), 0.4),
        Entropy(-0.05),
    ]


def sparse_terms() -> list[Term]:
    tails = ("bucket", "renormalize", "drop")
    signals = {tail: make_signal(tail, T, V, dtype=torch.float32) for tail in (*tails, "zero")}
    terms: list[Term] = [Distill(signals[tail], forward_kl(), temperature=1.5) for tail in tails]
    return [*terms, Distill(signals["zero"], reverse_kl()), Distill(signals["bucket"], jsd(0.3), 0.0)]


TERMS: dict[str, Callable[[], list[Term]]] = {
    "dense": dense_terms,
    "rollout": rollout_terms,
    "sparse": sparse_terms,
    "renormalized": lambda: [Distill(make_signal("renormalize", T, V, dtype=torch.float32), reverse_kl())],
    "mixture": lambda: [Distill(make_mixture(T, V, dtype=torch.float32), total_variation(), 0.7)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "weights": {"weights_T": uniform(6).where(torch.arange(T) != 4, 0.0), "chunk_tokens": 7},
    "an index": {"valid_index": torch.arange(T).roll(5)[: T - 3], "chunk_tokens": 9},
}


def leaves_of() -> Leaves:
    return make_leaves(T, V, dtype=torch.float32)


def plain(terms: list[Term], **options: Any) -> Result:
    assert "cpu" not in compiled.ROW_DEVICES
    return run(linear_objective, leaves_of(), terms, **options)


def rebuilt(terms: list[Term], **options: Any) -> Result:
    """Run a pass whose terms are rebuilt from the tensors of each chunk."""
    compiled.ROW_DEVICES.add("cpu")
    try:
        return run(linear_objective, leaves_of(), terms, **options)
    finally:
        compiled.ROW_DEVICES.discard("cpu")


def assert_same(actual: Result, expected: Result, error: float) -> None:
    assert_near(actual.gradients, expected.gradients, error)
    assert list(actual.output.metrics) == list(expected.output.metrics)
    for name, number in expected.output.metrics.items():
        torch.testing.assert_close(actual.output.metrics[name], number, rtol=error, atol=1e-6, msg=name)
    torch.testing.assert_close(actual.output.loss, expected.output.loss, rtol=error, atol=1e-6)
    torch.testing.assert_close(actual.output.per_token, expected.output.per_token, rtol=error, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_rebuilt_terms_compute_the_same(terms: Callable[[], list[Term]], options: dict[str, Any]) -> None:
    with torch._dynamo.config.patch(disable=True):
        assert_same(rebuilt(terms(), **options), plain(terms(), **options), 1e-6)


def test_the_gradient_at_ids_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a plain pass, which sums the values of repeated ids in the tile and rounds the sum."""
    monkeypatch.setattr(HeadLogits, "rounded_buffer", lambda _, rows: torch.full((rows, V), torch.nan).bfloat16())
    with torch._dynamo.config.patch(disable=True):
        # one bfloat16 of many is rounded to its other neighbour, if its sum has another order
        assert_same(rebuilt(dense_terms()), plain(dense_terms()), 1e-4)


def test_a_pass_without_gradients() -> None:
    with torch._dynamo.config.patch(disable=True), torch.no_grad():
        losses = []
        for devices in (set(), {"cpu"}):
            compiled.ROW_DEVICES |= devices
            try:
                leaves = leaves_of()
                losses.append(linear_objective(leaves.hidden, OutputHead(leaves.weight), dense_terms()).loss)
            finally:
                compiled.ROW_DEVICES -= devices
    assert torch.equal(*losses)


@dataclass(frozen=True, eq=False)
class Negative(Entropy):
    """A term of a user."""

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        # data-dependent code cannot be compiled
        return super().add_to(tile, -weights_C if bool((weights_C > 0).any()) else weights_C)


def test_a_term_of_a_user_is_not_compiled() -> None:
    """Its code may do anything."""
    assert_same(rebuilt([Negative(1.0)]), plain([Negative(1.0)]), 0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*torch.compile:UserWarning")
def test_compiled_rows() -> None:
    """They meet float64. Other tensors, row counts and chunks give their own results and compile nothing again."""
    rebuilt(dense_terms())
    graphs = counters["stats"]["unique_graphs"]
    compiled.ROW_DEVICES.add("cpu")
    try:
        assert_accurate(leaves_of(), dense_terms(), chunk_tokens=None, tiny=1e-6, normalizer=29.0)
    finally:
        compiled.ROW_DEVICES.discard("cpu")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, options in enumerate(OPTIONS.values()):
            assert_same(rebuilt(dense_terms(seed), **options), plain(dense_terms(seed), **options), 1e-5)
    assert counters["stats"]["unique_graphs"] == graphs
