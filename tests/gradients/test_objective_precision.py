"""Rounding: the chunked pass is no worse than plain float32 autograd, both compared with a float64 oracle.

The rule is: error of the fast path ≤ 2 × error of the plain path + a tiny tolerance. It holds on odd sizes, in every
dtype, on peaked rows, with logits of −inf, and for any content of rows of weight 0.
"""

import math
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    ALL_DIVERGENCES,
    DIVERGENCES_OF_PEAKED_ROWS,
    F_DIVERGENCES,
    SIGNALS,
    D,
    Leaves,
    T,
    V,
    converted,
    distance,
    every_term,
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
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    FullVocab,
    OutputHead,
    Term,
    TopK,
    forward_kl,
    linear_objective,
    logits_objective,
    parse_divergence,
    reverse_kl,
)
from stillhouse.objective.reference import dense_objective

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def assert_no_worse_than_plain(leaves: Leaves, terms: list[Term], tiny: float = 5e-7, **options: Any) -> None:
    exact_leaves = Leaves(*(None if leaf is None else leaf.double() for leaf in vars(leaves).values()))  # type: ignore[arg-type]
    exact = run(dense_objective, exact_leaves, [converted(term, torch.float64) for term in terms], **options)
    plain = run(dense_objective, leaves, terms, **options)
    fast = run(linear_objective, leaves, terms, chunk_tokens=9, **options)
    for name, gradient in exact.gradients.items():
        assert fast.gradients[name].dtype == plain.gradients[name].dtype
        allowed = 2 * distance(plain.gradients[name], gradient) + tiny
        assert distance(fast.gradients[name], gradient) <= allowed, name
    for name, value_T in exact.output.per_token.items():
        assert fast.output.per_token[name].dtype == torch.float32
        allowed = 2 * distance(plain.output.per_token[name], value_T) + tiny
        assert distance(fast.output.per_token[name], value_T) <= allowed, name
    # one number may be exact by chance, so the plain path's error of the loss is the error over its tokens
    errors = [
        abs(term.scale) * (plain.output.per_token[name].double() - value_T).abs().sum() + tiny * value_T.abs().sum()
        for (name, value_T), term in zip(exact.output.per_token.items(), terms, strict=True)
    ]
    allowed = 2 * float(sum(errors)) / options.get("normalizer", 1.0)
    assert abs(fast.output.loss.item() - exact.output.loss.item()) <= allowed
    assert fast.output.loss.dtype == torch.float32


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("sharpness", [1.0, 50.0])
@pytest.mark.parametrize("signal", SIGNALS)
def test_every_signal(signal: str, sharpness: float, dtype: torch.dtype) -> None:
    leaves = make_leaves(dtype=dtype, sharpness=sharpness)
    teacher = make_signal(
        signal, dtype=torch.float32 if signal not in ("full", "dense") else dtype, sharpness=sharpness
    )
    assert_no_worse_than_plain(leaves, [Distill(teacher, parse_divergence("jsd(0.3)"), 0.7)])


@pytest.mark.parametrize(
    ("expression", "sharpness"),
    [(each, 1.0) for each in ALL_DIVERGENCES] + [(each, 50.0) for each in DIVERGENCES_OF_PEAKED_ROWS],
)
def test_every_divergence(expression: str, sharpness: float) -> None:
    leaves = make_leaves(dtype=torch.float32, sharpness=sharpness)
    teacher = make_full(dtype=torch.float32, sharpness=sharpness)
    assert_no_worse_than_plain(leaves, [Distill(teacher, parse_divergence(expression))])


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("sharpness", [1.0, 50.0])
def test_sum_of_terms(sharpness: float, dtype: torch.dtype) -> None:
    head = {"scale": 0.5, "softcap": 30.0}
    leaves = make_leaves(dtype=dtype, sharpness=sharpness)
    assert_no_worse_than_plain(leaves, every_term(dtype=dtype), head=head, normalizer=29.0, weights_T=torch.ones(T))


def test_half_precision_hidden_states_with_a_float32_head() -> None:
    half, full = make_leaves(dtype=torch.bfloat16), make_leaves(dtype=torch.float32)
    assert_no_worse_than_plain(Leaves(half.hidden, full.weight, full.bias), every_term(dtype=torch.float32))
    assert_no_worse_than_plain(Leaves(full.hidden, half.weight, half.bias), every_term(dtype=torch.float32))


def test_student_close_to_its_teacher() -> None:
    """The gradient is a small difference here, which rounding the logits to half precision would destroy."""
    leaves = make_leaves(dtype=torch.float32, bias=False)
    near = leaves.weight + 1e-3 * torch.randn(V, D, generator=generator(1))
    for expression in F_DIVERGENCES:
        terms: list[Term] = [Distill(FullVocab(leaves.hidden, OutputHead(near)), parse_divergence(expression))]
        assert_no_worse_than_plain(leaves, terms, tiny=1e-5)


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
    assert logits.grad is not None
    assert exact.grad is not None
    assert logits.grad.dtype == dtype
    assert distance(logits.grad, exact.grad) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("expression", [*F_DIVERGENCES, "alpha_beta(0.2, 0.5)"])
def test_tokens_without_probability_on_both_sides_leave_no_trace(expression: str) -> None:
    """A masked column changes nothing, including the gradient, compared with logits without that column."""
    teacher, student = (torch.randn(5, 11, generator=generator(seed), dtype=torch.float64) for seed in (0, 1))
    labels_T = torch.arange(5)
    wide = [torch.cat([each, torch.full((5, 2), -math.inf, dtype=torch.float64)], 1) for each in (teacher, student)]
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
        assert logits.grad is not None
        results.append((output, logits.grad))
    (narrow_output, narrow_grad), (wide_output, wide_grad) = results
    torch.testing.assert_close(wide_output.loss, narrow_output.loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(wide_grad[:, :11], narrow_grad, rtol=1e-12, atol=1e-13)
    assert (wide_grad[:, 11:] == 0).all()
    for name, total in sums(narrow_output).items():
        torch.testing.assert_close(wide_output.metrics[name], total, rtol=1e-12, atol=0)


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
            assert logits.grad is not None
            assert logits.grad.isfinite().all(), expression
    assert logits_objective(masked, [Distill(DenseLogits(both), forward_kl())]).loss == math.inf
    assert logits_objective(both, [Distill(DenseLogits(masked), reverse_kl())]).loss == math.inf


def poisoned(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_fill(0, rows, math.nan)


@pytest.mark.parametrize("valid_index", ["none", "all"])
@pytest.mark.parametrize("head", [{}, {"softcap": 3.0}], ids=str)
def test_rows_of_weight_zero_may_hold_nan(head: dict[str, Any], valid_index: str) -> None:
    """With valid_index="all" the engine computes these rows too, as on a GPU without a valid_index."""
    dead = torch.tensor([0, 5, 6, 36])
    weights_T = torch.ones(T).index_fill(0, dead, 0.0)
    leaves, full, sparse = make_leaves(), make_full(), make_signal("bucket")
    assert isinstance(sparse, TopK)
    clean: list[Term] = [
        CrossEntropy(make_labels(), 0.3, 0.1, 0.1),
        Distill(full, parse_divergence("jsd(0.3)")),
        Distill(sparse, reverse_kl()),
        Entropy(0.2),
    ]
    broken: list[Term] = [
        clean[0],
        Distill(FullVocab(poisoned(full.hidden_TE, dead), full.head), parse_divergence("jsd(0.3)")),
        Distill(TopK(sparse.ids_TK, poisoned(sparse.log_probs_TK, dead)), reverse_kl()),
        clean[3],
    ]
    clean[2] = Distill(TopK(sparse.ids_TK, sparse.log_probs_TK), reverse_kl())
    expected = run(linear_objective, leaves, clean, head=head, weights_T=weights_T)
    actual = run(
        linear_objective,
        Leaves(poisoned(leaves.hidden, dead), leaves.weight, leaves.bias),
        broken,
        head=head,
        weights_T=weights_T,
        valid_index=torch.arange(T) if valid_index == "all" else None,
        chunk_tokens=10,
    )
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(actual.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    for name, total in sums(expected.output).items():
        torch.testing.assert_close(actual.output.metrics[name], total, rtol=1e-10, atol=1e-12)
    assert (actual.gradients["hidden"][dead] == 0).all()
    assert all((values[dead] == 0).all() for values in actual.output.per_token.values())


def test_rows_of_logits_without_weight_may_hold_nan() -> None:
    logits = torch.randn(4, 9)
    logits[2] = math.nan
    logits.requires_grad_()
    output = logits_objective(
        logits, [CrossEntropy(torch.arange(4)), Entropy(1.0)], weights_T=torch.tensor([1, 1, 0, 1])
    )
    output.loss.backward()
    assert output.loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[2] == 0).all()


def test_a_teacher_that_is_missing_on_some_rows() -> None:
    """The term's own weight of 0 excludes these rows from loss, gradient, metrics and values per token."""
    missing = torch.tensor([1, 8])
    own_T = torch.ones(T).index_fill(0, missing, 0.0)
    full = make_full()
    terms = [
        Distill(FullVocab(poisoned(full.hidden_TE, missing), full.head), forward_kl(), weights_T=own_T),
        Entropy(0.1),
    ]
    result = run(linear_objective, make_leaves(), terms, chunk_tokens=10)
    assert all(gradient.isfinite().all() for gradient in result.gradients.values())
    assert all(total.isfinite() for total in result.output.metrics.values())
    assert result.output.per_token["forward_kl"].isfinite().all()
    assert result.output.metrics["tokens"] == T


DTYPES = {"float64": torch.float64, **FLOATS}


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
        found = run(linear_objective, leaves, terms, chunk_tokens=10)
        exact = run(
            dense_objective, converted(leaves, torch.float64), [converted(each, torch.float64) for each in terms]
        )
        within = {"float64": 1e-12, "float32": 2e-6}.get(student, 2 * torch.finfo(DTYPES[student]).eps)
        assert found.output.loss.dtype == (torch.float64 if student == "float64" else torch.float32)
        assert distance(found.output.loss, exact.output.loss) <= min(within, 2e-6)
        for name, gradient in exact.gradients.items():
            assert found.gradients[name].dtype == DTYPES[student]
            assert distance(found.gradients[name], gradient) <= within, name


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
