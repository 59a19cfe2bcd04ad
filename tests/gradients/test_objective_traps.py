"""Mistakes that other projects released; each one fails a test here. Numbers refer to the design's list of traps."""

import math

import pytest
import torch
from kit.objective_cases import (
    ALL_DIVERGENCES,
    TAILS,
    Leaves,
    T,
    V,
    converted,
    distance,
    divergence_of,
    generator,
    make_full,
    make_labels,
    make_leaves,
    run,
)

from stillhouse.objective import (
    Chosen,
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    FullVocab,
    OutputHead,
    Sampled,
    Signal,
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

# 2. Absent ids are replaced by index 0 before they are scattered; token 0's gradient must not change.
# 11. A server's top-k has duplicates in its ids; the first one counts.


def assert_equal_signals(padded: Signal, clean: Signal, expression: str) -> None:
    student = torch.randn(clean.tokens, 7, generator=generator(0), dtype=torch.float64)
    value, gradient = divergence_of(student, padded, parse_divergence(expression))
    expected_value, expected = divergence_of(student, clean, parse_divergence(expression))
    assert value == pytest.approx(expected_value, rel=1e-14)
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("expression", ALL_DIVERGENCES)
def test_absent_and_repeated_ids_add_nothing(expression: str, tail: str) -> None:
    log_p_TV = torch.log_softmax(torch.randn(2, 7, generator=generator(1), dtype=torch.float64), 1)
    for ids in ([[5, 2, 3], [2, 1, 6]], [[0, 2, 3], [6, 0, 1]]):  # token 0 is present in the second case
        ids_TK = torch.tensor(ids)
        clean = TopK(ids_TK, log_p_TV.gather(1, ids_TK), tail)  # type: ignore[arg-type]
        absent_T3 = torch.tensor([[-1, 7, -100]]).expand(2, 3)
        absent = torch.cat([absent_T3, ids_TK, absent_T3], 1)
        nothing_T3 = torch.tensor([[0.0, -0.1, math.nan]], dtype=torch.float64).expand(2, 3)
        log_p_TK = torch.cat([nothing_T3, clean.log_probs_TK, nothing_T3], 1)
        assert_equal_signals(TopK(absent, log_p_TK, tail), clean, expression)  # type: ignore[arg-type]
        repeated_TK = torch.cat([ids_TK, ids_TK[:, :2], ids_TK[:, :1]], 1)
        log_p_TK = torch.cat([clean.log_probs_TK, torch.zeros(2, 3)], 1)
        for kind in (TopK, Chosen):
            assert_equal_signals(kind(repeated_TK, log_p_TK, tail), clean, expression)  # type: ignore[arg-type]


def test_absent_entries_alone_and_beside_a_masked_token_zero() -> None:
    """A row without any id is worth nothing. The index that replaces an absent id may point to a token of probability
    0, and 0·log 0 must be 0.
    """
    weights = torch.tensor([[0.4, 0.6]], dtype=torch.float64)
    padded = torch.tensor([[0.9, 0.4, math.nan, 0.6]], dtype=torch.float64)
    clean = Sampled(torch.tensor([[3, 5]]), weights)
    assert_equal_signals(Sampled(torch.tensor([[-1, 3, 7, 5]]), padded), clean, "forward_kl")
    student = torch.randn(2, 7, generator=generator(0), dtype=torch.float64)
    for tail in TAILS:
        nothing = TopK(torch.full((2, 3), -1), torch.zeros(2, 3), tail=tail)  # type: ignore[arg-type]
        value, gradient = divergence_of(student, nothing, jsd(0.3))
        assert abs(value) < 1e-12, tail
        assert gradient.abs().max() < 1e-12, tail
    student = torch.tensor([[-math.inf, 0.3, 0.1, -0.5]])
    ids, values = torch.tensor([[-1, 2, 1]]), torch.tensor([[0.5, 0.5, 0.5]])
    signals = [Sampled(ids, values), *(TopK(ids, values.log() - 1, tail=tail) for tail in TAILS)]  # type: ignore[arg-type]
    for signal in signals:
        value, gradient = divergence_of(student, signal, forward_kl())
        assert math.isfinite(value)
        assert gradient.isfinite().all()
        assert gradient[0, 0] == 0


# 3. The gradient of a truncated KL is m·q − p, where m is the mass of the kept ids, and not q − p.
# 7. A negative truncated KL is not clamped; a renormalised KL does not penalise the student's mass outside the ids.


@pytest.mark.parametrize("ids", [[5, 2, 3], [0]], ids=str)
def test_a_truncated_kl_may_be_negative_and_has_its_own_gradient(ids: list[int]) -> None:
    student, teacher = (torch.randn(1, 7, generator=generator(seed), dtype=torch.float64) for seed in (0, 1))
    teacher[0, 0], student[0, 0] = 0.0, 2.0
    p, q, ids_TK = teacher.softmax(1), student.softmax(1), torch.tensor([ids])
    kept = torch.zeros_like(p).scatter(1, ids_TK, p.gather(1, ids_TK))
    value, gradient = divergence_of(student, TopK(ids_TK, p.gather(1, ids_TK).log(), tail="drop"), forward_kl())
    torch.testing.assert_close(gradient, kept.sum() * q - kept, rtol=1e-12, atol=1e-15)
    assert len(ids) > 1 or value < 0


def test_bucket_punishes_mass_outside_the_ids_and_renormalize_does_not() -> None:
    """The student agrees on the ratio of the two ids and has 90 % of its mass elsewhere."""
    student = torch.tensor([[0.08, 0.02, 0.45, 0.45]], dtype=torch.float64).log()
    ids, log_p = torch.tensor([[0, 1]]), torch.tensor([[0.8 * 0.99, 0.2 * 0.99]], dtype=torch.float64).log()
    value, gradient = divergence_of(student, TopK(ids, log_p, tail="renormalize"), reverse_kl())
    assert abs(value) < 1e-12
    assert gradient.abs().max() < 1e-12
    value, gradient = divergence_of(student, TopK(ids, log_p, tail="bucket"), reverse_kl())
    assert value > 3
    assert (gradient[0, :2] < 0).all()
    assert (gradient[0, 2:] > 0.1).all()


# 9. Padded heads: one head has 256 rows for 251 tokens, or both heads have different padding.


@pytest.mark.parametrize(
    ("student_rows", "teacher_rows", "student_options", "teacher_options"),
    [
        (V, V + 5, {}, {}),
        (V + 5, V, {}, {}),
        (V, V + 5, {"vocab_size": V}, {}),
        (V + 5, V + 5, {}, {"vocab_size": V}),
        (V + 5, V + 9, {"vocab_size": V}, {"vocab_size": V}),
        (V + 9, V + 5, {}, {"vocab_size": V}),
    ],
)
def test_padding_rows_get_no_probability(
    student_rows: int, teacher_rows: int, student_options: dict[str, int], teacher_options: dict[str, int]
) -> None:
    wide, teacher = make_leaves(vocabulary=student_rows), make_full(vocabulary=teacher_rows)
    narrow = Leaves(wide.hidden, wide.weight[:V], wide.bias[:V])
    real = FullVocab(teacher.hidden_TE, OutputHead(teacher.head.weight_VD[:V]))
    padded = FullVocab(teacher.hidden_TE, OutputHead(teacher.head.weight_VD, **teacher_options))  # type: ignore[arg-type]
    others: list[Term] = [CrossEntropy(make_labels(), label_smoothing=0.1), Entropy(0.1)]
    expected = run(linear_objective, narrow, [*others, Distill(real, jsd(0.3))])
    for objective in (linear_objective, dense_objective):
        actual = run(objective, wide, [*others, Distill(padded, jsd(0.3))], head=student_options)
        assert distance(actual.output.loss, expected.output.loss) < 1e-12
        assert distance(actual.gradients["hidden"], expected.gradients["hidden"]) < 1e-12
        for name in ("weight", "bias"):
            assert actual.gradients[name].shape == vars(wide)[name].shape
            assert distance(actual.gradients[name][:V], expected.gradients[name]) < 1e-12
            assert (actual.gradients[name][V:] == 0).all()


def test_padded_logits_meet_a_padded_teacher() -> None:
    logits = torch.randn(T, V + 5, dtype=torch.float64, generator=generator(0)).requires_grad_()
    narrow = logits[:, :V].detach().clone().requires_grad_()
    teacher = make_full(vocabulary=V + 9)
    real = FullVocab(teacher.hidden_TE, OutputHead(teacher.head.weight_VD[:V]))
    stated = FullVocab(teacher.hidden_TE, OutputHead(teacher.head.weight_VD, vocab_size=V))
    logits_objective(logits, [Distill(stated, jsd(0.3))]).loss.backward()
    logits_objective(narrow, [Distill(real, jsd(0.3))]).loss.backward()
    assert distance(logits.grad[:, :V], narrow.grad) < 1e-13
    assert (logits.grad[:, V:] == 0).all()


# 13. The weight's gradient is summed over chunks in float32, not in the weight's dtype.


def test_weight_gradient_of_many_chunks_does_not_round_in_bfloat16() -> None:
    tokens, labels_T = 2048, make_labels(2048)
    leaves = make_leaves(tokens, dtype=torch.bfloat16)
    exact = run(dense_objective, converted(leaves, torch.float64), [CrossEntropy(labels_T)]).gradients
    many = run(linear_objective, leaves, [CrossEntropy(labels_T)], chunk_tokens=8).gradients
    assert many["weight"].dtype == torch.bfloat16
    for name in ("weight", "bias"):
        assert distance(many[name], exact[name]) < 2**-8
    summed = torch.zeros_like(leaves.weight)
    for start in range(0, tokens, 8):
        rows = slice(start, start + 8)
        part = Leaves(leaves.hidden[rows], leaves.weight, leaves.bias)
        summed += run(linear_objective, part, [CrossEntropy(labels_T[rows])]).gradients["weight"]
    assert distance(summed, exact["weight"]) > 2**-6  # the mistake's error is visible here


# 14. Peaked rows: the mass outside the top-k is below float32's last digit.


@pytest.mark.parametrize("gap", [10.0, 30.0, 80.0])
@pytest.mark.parametrize("send_tail", [True, False])
@pytest.mark.parametrize(
    "expression", ["forward_kl", "reverse_kl", "jsd(0.5)", "skew_reverse_kl(0.1)", "total_variation"]
)
def test_peaked_rows_have_a_finite_bucket(expression: str, send_tail: bool, gap: float) -> None:
    student = torch.randn(64, V, generator=generator(0))
    teacher = torch.randn(64, V, generator=generator(1))
    teacher[:, 3] += gap
    log_p = torch.log_softmax(teacher, 1)
    top, ids = log_p.topk(4, 1)
    tail = torch.logsumexp(log_p.scatter(1, ids, -math.inf), 1)
    assert send_tail or gap < 20 or (1 - top.exp().sum(1) <= 0).any()  # the mistake fails here
    divergence = parse_divergence(expression)
    for logits in (student, teacher, student * 50):
        value, gradient = divergence_of(
            logits, TopK(ids, top, tail_log_prob_T=tail if send_tail else None), divergence
        )
        assert math.isfinite(value)
        assert gradient.isfinite().all()
        if send_tail and logits is student:
            double = TopK(ids, top.double(), tail_log_prob_T=tail.double())
            exact_value, exact = divergence_of(student.double(), double, divergence)
            assert value == pytest.approx(exact_value, rel=1e-5)
            assert distance(gradient, exact) < 1e-5


def test_a_tail_that_was_not_sent_is_the_rest_or_the_floor() -> None:
    """The tail is log(1 − Σp) where float32 can represent it, and otherwise the log of float32's epsilon."""
    ids, student = torch.tensor([[0], [0]]), torch.tensor([[0.0, 1.0, 2.0]] * 2)
    sums = torch.tensor([[0.75], [1.0000001]])
    q = student.softmax(1)[:, 1:].sum(1)
    value_T = logits_objective(student, [Distill(TopK(ids, sums.log()), reverse_kl())]).per_token["reverse_kl"]
    rest = torch.tensor([0.25, torch.finfo(torch.float32).eps])
    expected = (1 - q) * ((1 - q) / sums[:, 0]).log() + q * (q / rest).log()
    torch.testing.assert_close(value_T, expected, rtol=1e-5, atol=1e-6)


# Random sampling distillation promises an unbiased gradient, so the test takes the expectation over every draw.


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_sampled_gradient_is_forward_kls_in_expectation(temperature: float) -> None:
    """Two draws from a proposal r over four tokens have weights p/(2r). The test enumerates all 16 outcomes."""
    student, teacher = (torch.randn(1, 4, generator=generator(seed), dtype=torch.float64) for seed in (0, 1))
    p = (teacher / temperature).softmax(1)[0]
    proposal = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    draws = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    chance_T = proposal[draws].prod(1)
    logits = student.expand(16, 4).clone().requires_grad_()
    term = Distill(Sampled(draws, p[draws] / (2 * proposal[draws])), forward_kl(), temperature=temperature)
    logits_objective(logits, [term], weights_T=chance_T).loss.backward()
    exact = student.clone().requires_grad_()
    logits_objective(exact, [Distill(DenseLogits(teacher), forward_kl(), temperature=temperature)]).loss.backward()
    torch.testing.assert_close(logits.grad.sum(0, keepdim=True), exact.grad, rtol=1e-12, atol=1e-15)
