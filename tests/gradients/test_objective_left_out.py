"""Rows that no term counts contribute exactly 0 to value and gradient, even if they hold NaN, infinity or padding.

A row is left out by the objective's weight, by the own weight of every term, or by a negative label. In every case
here the engine computes these rows too, as a pass on a GPU does. T tokens, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    Leaves,
    Result,
    T,
    V,
    generator,
    make_full,
    make_leaves,
    make_signal,
    make_sorted,
    run,
    sums,
)
from torch import Tensor

from stillhouse.objective import (
    Continuation,
    CrossEntropy,
    Distill,
    Entropy,
    FullVocab,
    PolicyGradient,
    SampledKL,
    SortedL1,
    Term,
    TopK,
    forward_kl,
    jsd,
    linear_objective,
    logits_objective,
    reverse_kl,
)
from stillhouse.objective.reference import dense_objective

DEAD = torch.tensor([0, 3, 11, 36])
LABELS = torch.randint(0, V, (T,), generator=generator(41))
OBJECTIVES = pytest.mark.parametrize("objective", [linear_objective, dense_objective], ids=["fused", "reference"])


def kept(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(T, dtype=dtype).index_fill(0, DEAD, 0.0)


def sampled_log_probs(at_dead: float) -> Tensor:
    """Return old log-probabilities: `at_dead` in the rows that are left out, random ones around −5 elsewhere."""
    return (torch.randn(T, generator=generator(42), dtype=torch.float64) - 5.0).index_fill(0, DEAD, at_dead)


def assert_left_out(found: Result, expected: Result) -> None:
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    assert (found.gradients["hidden"][DEAD] == 0).all()
    torch.testing.assert_close(found.output.loss, expected.output.loss, rtol=1e-12, atol=0)
    for name, total in sums(expected.output).items():
        torch.testing.assert_close(found.output.metrics[name], total, rtol=1e-10, atol=1e-12)
    assert all((values[DEAD] == 0).all() for values in found.output.per_token.values())


POLICY: dict[str, Callable[[float, Any], Term]] = {
    "ratio": lambda far, own: PolicyGradient(LABELS, sampled_log_probs(1.0), sampled_log_probs(far), weights_T=own),
    "reference": lambda far, own: PolicyGradient(
        LABELS, sampled_log_probs(1.0), sampled_log_probs(-5.0), sampled_log_probs(-far), kl_scale=0.1, weights_T=own
    ),
    "dual clip": lambda far, own: PolicyGradient(
        LABELS, sampled_log_probs(1.0), sampled_log_probs(far), dual_clip=3.0, weights_T=own
    ),
    "cispo": lambda far, own: PolicyGradient(
        LABELS, sampled_log_probs(1.0), sampled_log_probs(far), clip_high=math.inf, surrogate="cispo", weights_T=own
    ),
    "k3": lambda far, own: SampledKL(LABELS, sampled_log_probs(-far), "k3", weights_T=own),
    "k2": lambda far, own: SampledKL(LABELS, sampled_log_probs(-far), "k2", weights_T=own),
}


@OBJECTIVES
@pytest.mark.parametrize("by", ["valid_index", "weights_T", "own weights"])
@pytest.mark.parametrize("term", POLICY)
def test_log_probabilities_far_from_the_students(term: str, by: str, objective: Any) -> None:
    """A log-probability far from the student's gives an infinite ratio e^1000, and 0·inf would be NaN."""
    every_row = {"valid_index": torch.arange(T)}
    if by == "own weights":
        found = run(objective, make_leaves(), [POLICY[term](-1000.0, kept())], **every_row)
        expected = run(objective, make_leaves(), [POLICY[term](-5.0, kept())], **every_row)
    else:
        options = {"weights_T": kept()} | (every_row if by == "valid_index" else {})
        found = run(objective, make_leaves(), [POLICY[term](-1000.0, None)], **options)
        expected = run(objective, make_leaves(), [POLICY[term](-5.0, None)], **options)
    assert_left_out(found, expected)


def terms_without(rows_by: str, scale: float = 1.0) -> list[Term]:
    """Return terms of every kind that skip the rows `DEAD`: by "labels" if the term has labels, by "own weights",
    or not at all ("weights_T"). The teachers' rows hold NaN.
    """
    labels_T = LABELS.index_fill(0, DEAD, -100) if rows_by == "labels" else LABELS
    of_labels = kept() if rows_by == "own weights" else None
    own = None if rows_by == "weights_T" else kept()
    sparse, full = make_signal("bucket"), make_full()
    assert isinstance(sparse, TopK)
    poisoned = FullVocab(full.hidden_TE.index_fill(0, DEAD, math.nan), full.head)
    poisoned_sparse = TopK(sparse.ids_TK, sparse.log_probs_TK.index_fill(0, DEAD, math.nan))
    return [
        CrossEntropy(labels_T, scale, 0.1, 0.1, weights_T=of_labels),
        SampledKL(labels_T, sampled_log_probs(-5.0), "k3", scale, weights_T=of_labels),
        PolicyGradient(labels_T, sampled_log_probs(1.0), sampled_log_probs(-5.0), scale=scale, weights_T=of_labels),
        Distill(poisoned, jsd(0.3), scale, weights_T=own),
        Distill(poisoned, forward_kl(), scale, weights_T=own),
        Distill(poisoned_sparse, reverse_kl(), scale, weights_T=own),
        Entropy(0.2 * scale, weights_T=own),
        Continuation(labels_T, scale, weights_T=of_labels),
        SortedL1(make_sorted(torch.randn(T, V, generator=generator(5)).log_softmax(1), 8), scale, weights_T=own),
    ]


def poisoned_leaves() -> Leaves:
    leaves = make_leaves()
    hidden = leaves.hidden.index_fill(0, DEAD[:2], math.nan).index_fill(0, DEAD[2:], math.inf)
    return Leaves(hidden, leaves.weight, leaves.bias)


@OBJECTIVES
@pytest.mark.parametrize("chunk_tokens", [None, 10])
@pytest.mark.parametrize("head", [{}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("rows_by", ["labels", "own weights", "weights_T"])
def test_rows_that_no_term_counts_may_hold_anything(
    rows_by: str, head: dict[str, Any], chunk_tokens: int | None, objective: Any
) -> None:
    """With a valid_index, rows of weight 0 are computed, as on a GPU."""
    options: dict[str, Any] = {"head": head, "chunk_tokens": chunk_tokens}
    if rows_by == "weights_T":
        options |= {"weights_T": kept()} | ({"valid_index": torch.arange(T)} if chunk_tokens else {})
    terms = terms_without(rows_by)
    found = run(objective, poisoned_leaves(), terms, **options)
    assert_left_out(found, run(objective, make_leaves(), terms, **options))


def test_rows_of_logits_without_weight_may_hold_nan() -> None:
    logits = torch.randn(4, 9).index_fill(0, torch.tensor([2]), math.nan).requires_grad_()
    terms = [CrossEntropy(torch.arange(4)), Entropy(1.0)]
    output = logits_objective(logits, terms, weights_T=torch.tensor([1, 1, 0, 1]))
    output.loss.backward()
    assert output.loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[2] == 0).all()


def test_a_teacher_that_is_missing_on_rows_that_another_term_counts() -> None:
    terms = [terms_without("own weights")[3], Entropy(0.1)]
    result = run(linear_objective, make_leaves(), terms, chunk_tokens=10)
    assert all(gradient.isfinite().all() for gradient in result.gradients.values())
    assert all(total.isfinite() for total in result.output.metrics.values())
    assert result.output.per_token["jsd(0.3)"].isfinite().all()
    assert result.output.metrics["tokens"] == T


@pytest.mark.parametrize("head", [{}, {"softcap": 3.0}], ids=str)
def test_a_term_of_scale_zero_sees_the_rows_and_gives_them_no_gradient(head: dict[str, Any]) -> None:
    """Such a term is only reported: its metric may be NaN, but it changes neither the loss nor the gradient."""
    terms = terms_without("labels")
    watched = [
        *terms,
        Entropy(0.0),
        CrossEntropy(LABELS, 0.0),
        PolicyGradient(LABELS, sampled_log_probs(1), sampled_log_probs(-5), scale=0.0),
    ]
    found = run(linear_objective, poisoned_leaves(), watched, head=head)
    expected = run(linear_objective, make_leaves(), terms, head=head)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.output.loss, expected.output.loss, rtol=1e-12, atol=0)
    assert found.output.metrics["entropy#2"].isnan()


def test_a_row_that_one_term_counts_is_not_left_out() -> None:
    result = run(linear_objective, poisoned_leaves(), [*terms_without("labels"), CrossEntropy(LABELS, 0.5)])
    assert result.output.loss.isnan()
    assert result.gradients["weight"].isnan().any()
