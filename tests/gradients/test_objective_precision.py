"""Extreme numbers: far from 0, infinite, of different precision, and any content of rows that no term counts.

A row is left out by the objective's weight, by the own weight of every term, or by a negative label. Such rows
contribute exactly 0 to value and gradient, also where the pass computes them, as on a GPU.
T tokens, V vocabulary.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    DTYPES,
    F_DIVERGENCES,
    Leaves,
    Result,
    T,
    V,
    assert_accurate,
    converted,
    distance,
    every_term,
    exact,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_signal,
    run,
    sums,
)
from torch import Tensor

from stillhouse.objective import (
    Continuation,
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    FullVocab,
    Mixture,
    PolicyGradient,
    SampledKL,
    Term,
    TopK,
    forward_kl,
    jsd,
    linear_objective,
    logits_objective,
    parse_divergence,
    reverse_kl,
)
from stillhouse.objective.reference import dense_objective


def test_half_precision_hidden_states_with_a_float32_head() -> None:
    half, full = make_leaves(dtype=torch.bfloat16), make_leaves(dtype=torch.float32)
    assert_accurate(Leaves(half.hidden, full.weight, full.bias), every_term(dtype=torch.float32))
    assert_accurate(Leaves(full.hidden, half.weight, half.bias), every_term(dtype=torch.float32))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_large_logits_keep_their_last_digits(offset: float) -> None:
    """The reference is log_softmax of the same float32 logits; the engine must subtract the maximum first, too."""
    logits = torch.randn(T, V, generator=generator(0)) * 50 + offset
    labels_T, teacher = logits.argmax(1), DenseLogits(torch.randn(T, V, generator=generator(1)) * 50 + offset)
    terms = [CrossEntropy(labels_T), Distill(teacher, reverse_kl()), Entropy(0.1)]
    fast = logits_objective(logits, terms).per_token
    exact = logits_objective(logits.double(), [converted(term, torch.float64) for term in terms]).per_token
    plain = torch.nn.functional.cross_entropy(logits, labels_T, reduction="none")
    error = (plain.double() - exact["cross_entropy"]).abs().max()
    assert (fast["cross_entropy"].double() - exact["cross_entropy"]).abs().max() <= 2 * error + torch.finfo(
        torch.float32
    ).eps
    assert distance(fast["reverse_kl"], exact["reverse_kl"]) < 1e-6
    assert distance(fast["entropy"], exact["entropy"]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("small", ["normalizer", "weights_T"])
def test_small_gradients_of_half_precision_logits_meet_the_loss_scale_first(small: str, dtype: torch.dtype) -> None:
    """With 3e9 valid tokens, gradients of 1e-10 become zero in float16, unless the loss scale is applied first."""
    options: dict[str, Any] = (
        {"normalizer": 3e9} if small == "normalizer" else {"weights_T": torch.full((T,), 1 / 3e9)}
    )
    logits = torch.randn(T, V, generator=generator(0)).to(dtype).requires_grad_()
    (logits_objective(logits, [CrossEntropy(make_labels())], **options).loss * 3e9).backward()
    exact = logits.detach().double().requires_grad_()
    logits_objective(exact, [CrossEntropy(make_labels())]).loss.backward()
    assert logits.grad.dtype == dtype
    assert distance(logits.grad, exact.grad) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("expression", [*F_DIVERGENCES, "alpha_beta(0.2, 0.5)"])
def test_tokens_without_probability_on_both_sides_leave_no_trace(expression: str) -> None:
    """A masked column changes nothing, including the gradient, compared with logits without that column."""
    teacher, student = (torch.randn(5, 11, generator=generator(seed), dtype=torch.float64) for seed in (0, 1))
    labels_T = torch.arange(5)
    wide = [torch.cat([side, torch.full((5, 2), -math.inf, dtype=torch.float64)], 1) for side in (teacher, student)]
    results = []
    for teacher_TV, student_TV in ((teacher, student), wide):
        logits = student_TV.clone().requires_grad_()
        terms = [
            CrossEntropy(labels_T),
            Distill(DenseLogits(teacher_TV), parse_divergence(expression)),
            Entropy(-0.1),
        ]
        output = logits_objective(logits, terms)
        output.loss.backward()
        results.append((output, logits.grad))
    (narrow_output, narrow_grad), (wide_output, wide_grad) = results
    torch.testing.assert_close(wide_output.loss, narrow_output.loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(wide_grad[:, :11], narrow_grad, rtol=1e-12, atol=1e-13)
    assert (wide_grad[:, 11:] == 0).all()
    torch.testing.assert_close(sums(wide_output), sums(narrow_output), rtol=1e-12, atol=0)


def test_a_token_masked_on_one_side_only() -> None:
    """A divergence that is finite stays finite. A KL is inf, not NaN, if it weighs the masked token."""
    both = torch.randn(5, 11, generator=generator(0), dtype=torch.float32)
    masked = both.flip(0).index_fill(1, torch.tensor([3]), -math.inf)
    finite_without_student = ["reverse_kl", "jsd(0.3)", "skew_forward_kl(0.1)", "total_variation"]
    finite_without_teacher = ["forward_kl", "jsd(0.3)", "skew_reverse_kl(0.1)", "total_variation"]
    for teacher, student, expressions in [
        (both, masked, finite_without_student),
        (masked, both, finite_without_teacher),
    ]:
        for expression in expressions:
            logits = student.clone().requires_grad_()
            loss = logits_objective(logits, [Distill(DenseLogits(teacher), parse_divergence(expression))]).loss
            loss.backward()
            assert loss.isfinite(), expression
            assert logits.grad.isfinite().all(), expression
    assert logits_objective(masked, [Distill(DenseLogits(both), forward_kl())]).loss == math.inf
    assert logits_objective(both, [Distill(DenseLogits(masked), reverse_kl())]).loss == math.inf


@pytest.mark.parametrize("teacher", DTYPES)
@pytest.mark.parametrize("student", DTYPES)
def test_a_teacher_of_another_precision(student: str, teacher: str) -> None:
    """Each side is projected in its dtype, at least in float32. If one is float64, the divergence is in float64, too.

    The results are rounded to the student's dtype.
    """
    leaves = make_leaves(dtype=DTYPES[student])
    full = make_full(dtype=DTYPES[teacher])
    mixed = FullVocab(full.hidden_TE, converted(full.head, torch.float32)) if teacher == "float64" else full
    for signal in (full, mixed):
        terms: list[Term] = [Distill(signal, parse_divergence("0.5*forward_kl + 0.5*jsd(0.3)"))]
        actual = run(linear_objective, leaves, terms, chunk_tokens=10)
        oracle = exact(leaves, terms)
        within = {"float64": 1e-12, "float32": 2e-6}.get(student, 2 * torch.finfo(DTYPES[student]).eps)
        assert actual.output.loss.dtype == (torch.float64 if student == "float64" else torch.float32)
        assert distance(actual.output.loss, oracle.output.loss) <= min(within, 2e-6)
        for name, gradient in oracle.gradients.items():
            assert actual.gradients[name].dtype == DTYPES[student]
            assert distance(actual.gradients[name], gradient) <= within, name


@pytest.mark.parametrize("expression", ["alpha_beta(0.5, -0.5)", "alpha_beta(-0.5, 0.5)", "alpha_beta(0, 0)"])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_exponents_that_cancel_are_infinite_where_one_side_has_no_mass(side: str, expression: str) -> None:
    """(p/q)^α and log(p/q) are infinite there, so the divergence is infinite and not NaN. Other rows stay finite."""
    both = torch.randn(5, 11, generator=generator(0))
    masked = both.flip(0).index_put((torch.tensor([1]), torch.tensor([3])), torch.tensor(-math.inf))
    teacher, student = (both, masked) if side == "student" else (masked, both)
    term = Distill(DenseLogits(teacher), parse_divergence(expression))
    (value_T,) = logits_objective(student, [term]).per_token.values()
    assert value_T[1] == math.inf
    expected_T = logits_objective(
        student.index_select(0, ALL_BUT_1), [Distill(DenseLogits(teacher[ALL_BUT_1]), term.divergence)]
    )
    torch.testing.assert_close(value_T[ALL_BUT_1], next(iter(expected_T.per_token.values())))


ALL_BUT_1 = torch.tensor([0, 2, 3, 4])


DEAD = torch.tensor([0, 3, 11, 36])
LABELS = torch.randint(0, V, (T,), generator=generator(41))
OBJECTIVES = pytest.mark.parametrize("objective", [linear_objective, dense_objective], ids=["fused", "reference"])


def kept(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(T, dtype=dtype).index_fill(0, DEAD, 0.0)


def sampled_log_probs(at_dead: float) -> Tensor:
    """Return old log-probabilities: `at_dead` in the rows that are left out, random ones around −5 elsewhere."""
    return (torch.randn(T, generator=generator(42), dtype=torch.float64) - 5.0).index_fill(0, DEAD, at_dead)


def assert_close(result: Result, expected: Result) -> None:
    assert all(gradient.isfinite().all() for gradient in expected.gradients.values())
    torch.testing.assert_close(result.gradients, expected.gradients, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.output.loss, expected.output.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(sums(result.output), sums(expected.output), rtol=1e-10, atol=1e-12)


def terms_without(rows_by: str, far: float = -1000.0) -> list[Term]:
    """Return terms of every kind that skip the rows `DEAD`: by "labels" if the term has labels, by "own weights",
    or not at all ("weights_T").

    In these rows the teachers hold NaN, and the log-probability `far` gives a ratio of e^1000 to the student's.
    """
    labels_T = LABELS.index_fill(0, DEAD, -100) if rows_by == "labels" else LABELS
    of_labels = {"weights_T": kept() if rows_by == "own weights" else None}
    of_rows = {"weights_T": None if rows_by == "weights_T" else kept()}
    sparse, full = make_signal("bucket"), make_full()
    assert isinstance(sparse, TopK)
    poisoned = FullVocab(full.hidden_TE.index_fill(0, DEAD, math.nan), full.head)
    poisoned_sparse = TopK(sparse.ids_TK, sparse.log_probs_TK.index_fill(0, DEAD, math.nan))
    old_T, near_T, opposite_T = (sampled_log_probs(value) for value in (far, -5.0, -far))
    policy = partial(PolicyGradient, labels_T, sampled_log_probs(1.0), **of_labels)
    return [
        CrossEntropy(labels_T, 1.0, 0.1, 0.1, **of_labels),
        SampledKL(labels_T, opposite_T, "k3", **of_labels),
        SampledKL(labels_T, opposite_T, "k2", **of_labels),
        policy(old_T),
        policy(near_T, opposite_T, kl_scale=0.1),
        policy(old_T, dual_clip=3.0),
        policy(old_T, clip_high=math.inf, surrogate="cispo"),
        Distill(poisoned, jsd(0.3), **of_rows),
        Distill(poisoned, forward_kl(), **of_rows),
        Distill(Mixture([poisoned, make_signal("dense")], [2, 1]), jsd(0.3), **of_rows),
        Distill(poisoned_sparse, reverse_kl(), **of_rows),
        Entropy(0.2, **of_rows),
        Continuation(labels_T, **of_labels),
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
    result = run(objective, poisoned_leaves(), terms_without(rows_by), **options)
    assert_close(result, run(objective, make_leaves(), terms_without(rows_by, far=-5.0), **options))
    assert (result.gradients["hidden"][DEAD] == 0).all()
    assert all((values[DEAD] == 0).all() for values in result.output.per_token.values())


def test_rows_of_logits_without_weight_may_hold_nan() -> None:
    logits = torch.randn(4, 9).index_fill(0, torch.tensor([2]), math.nan).requires_grad_()
    terms = [CrossEntropy(torch.arange(4)), Entropy(1.0)]
    output = logits_objective(logits, terms, weights_T=torch.tensor([1, 1, 0, 1]))
    output.loss.backward()
    assert output.loss.isfinite()
    assert logits.grad.isfinite().all()
    assert (logits.grad[2] == 0).all()


def test_a_teacher_that_is_missing_on_rows_that_another_term_counts() -> None:
    result, expected = (
        run(linear_objective, make_leaves(), [*terms_without("own weights", far), Entropy(0.1)], chunk_tokens=10)
        for far in (-1000.0, -5.0)
    )
    assert_close(result, expected)
    assert all(values.isfinite().all() for values in result.output.per_token.values())
    assert result.output.metrics["tokens"] == T


@pytest.mark.parametrize("head", [{}, {"softcap": 3.0}], ids=str)
def test_a_term_of_scale_zero_sees_the_rows_and_gives_them_no_gradient(head: dict[str, Any]) -> None:
    """Such a term is only reported: its metric may be NaN, but it changes neither the loss nor the gradient."""
    terms = terms_without("labels")
    policy = PolicyGradient(LABELS, sampled_log_probs(1), sampled_log_probs(-5), scale=0.0)
    watched = [*terms, Entropy(0.0), CrossEntropy(LABELS, 0.0), policy]
    result = run(linear_objective, poisoned_leaves(), watched, head=head)
    expected = run(linear_objective, make_leaves(), terms, head=head)
    torch.testing.assert_close(result.gradients, expected.gradients, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.output.loss, expected.output.loss, rtol=1e-12, atol=0)
    assert result.output.metrics["entropy#2"].isnan()


def test_a_row_that_one_term_counts_is_not_left_out() -> None:
    result = run(linear_objective, poisoned_leaves(), [*terms_without("labels"), CrossEntropy(LABELS, 0.5)])
    assert result.output.loss.isnan()
    assert result.gradients["weight"].isnan().any()
