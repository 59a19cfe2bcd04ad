"""Divergences in float32 are exact where student and teacher are close and give one token almost all probability.

Distillation ends in this state. In their textbook form, the divergences are then small differences of large numbers,
and plain float32 autograd has errors of 10 % and more. The tests allow a relative error of 1e-4 against float64 on
the same numbers.

T tokens, V vocabulary, K ids per token.
"""

import itertools
from functools import cache, partial

import pytest
import torch
from kit.divergence_formulas import TEXTBOOK
from kit.objective_cases import Leaves, converted, distance, exact, generator, run
from kit.shard_cases import Layout, Logits, Problem, on_shards, oracle, over
from kit.shard_problems import FOUR
from kit.shard_ranks import Failure, shared_pool
from torch import Tensor

from stillhouse.objective import (
    DenseLogits,
    Distill,
    FullVocab,
    OutputHead,
    Signal,
    Term,
    TopK,
    linear_objective,
    logits_objective,
    parse_divergence,
)
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.tile import compiled

EXPRESSIONS = list(TEXTBOOK)
#: (vocabulary size, the teacher's largest probability)
SIZES = [(512, 0.9), (4096, 0.996), (4096, 1 - 1e-6), (32_000, 0.5)]
LARGEST = [(151_936, 0.99994), (151_936, 1 - 1e-6)]
#: two of the expressions, because each vocabulary size compiles
COMPILED_AT_EVERY_SIZE = ("alpha_beta(0.2, 0.5)", "2*jsd(0.3) + total_variation")
COMPILED = list(dict.fromkeys([*COMPILED_AT_EVERY_SIZE, *EXPRESSIONS[::2]]))
#: "apart": the student's logits are above or below the teacher's; "less sure": above, except for the top token
STUDENTS = ["apart", "less sure"]
ROWS = 2
WITHIN = 1e-4
#: the slope log(q/p) of alpha_beta(0, 0) has no weight p or q, so 151,936 numbers of both signs are summed; the
#: compiled sum is less exact on CPUs with shorter vectors (2.1e-4 with AVX2)
WITHIN_SQUARED_LOG = 3e-4

Pair = tuple[Tensor, Tensor]


@cache
def logits_of(vocabulary: int, largest: float, student: str, halves: bool = False) -> Pair:
    """Return teacher and student logits in float32. Every |log(q/p)| except the top token's is 0.03 or more, so
    that rounding changes no sign.
    """
    random = generator(vocabulary)
    teacher_TV = torch.randn(ROWS, vocabulary, generator=random, dtype=torch.float64)
    others_T = torch.logsumexp(teacher_TV[:, 1:], 1)
    teacher_TV[:, 0] = others_T + torch.tensor(largest, dtype=torch.float64).logit()
    if halves:
        teacher_TV = teacher_TV.bfloat16().double()
    size_TV = 0.05 + 0.1 * torch.rand(ROWS, vocabulary, generator=random, dtype=torch.float64)
    sign_TV = torch.where(torch.rand(ROWS, vocabulary, generator=random) < 0.5, -1.0, 1.0)
    gap_TV = size_TV * sign_TV if student == "apart" else size_TV
    gap_TV[:, 0] = 0.0
    student_TV = teacher_TV + gap_TV
    if halves:
        student_TV = student_TV.bfloat16().double()
    return teacher_TV.float(), student_TV.float()


def measured(student: Tensor, signal: Signal, expression: str) -> Pair:
    """Return the value of each row and the gradient."""
    logits = student.clone().requires_grad_()
    output = logits_objective(logits, [Distill(signal, parse_divergence(expression))])
    output.loss.backward()
    (value_T,) = output.per_token.values()
    return value_T, logits.grad


def float64_of(expression: str, teacher: Tensor, student: Tensor) -> Pair:
    """Compute the textbook formula by autograd in float64, after subtracting the largest logit."""
    logits = student.double().requires_grad_()
    log_p, log_q = (
        torch.log_softmax(logits_TV - logits_TV.detach().amax(1, keepdim=True), 1)
        for logits_TV in (teacher.double(), logits)
    )
    value_T = torch.stack([TEXTBOOK[expression](p, q) for p, q in zip(log_p.exp(), log_q.exp(), strict=True)])
    value_T.sum().backward()
    return value_T.detach(), logits.grad


def assert_close(student: Tensor, signal: Signal, expression: str, expected: Pair) -> None:
    value_T, gradient_TV = measured(student, signal, expression)
    for row, (value, expected_value) in enumerate(zip(value_T.double(), expected[0], strict=True)):
        # with α + β > 1 the divergence of such a row is about (1 − p)², which is below the precision of both sides
        if not (expression == "alpha_beta(2, 1)" and expected_value < 1e-9):
            assert abs(value / expected_value - 1) <= WITHIN, (row, float(value), float(expected_value))
        within = WITHIN_SQUARED_LOG if expression == "alpha_beta(0, 0)" else WITHIN
        assert distance(gradient_TV[row], expected[1][row]) <= within, row


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED_FROM", 1 << 30)


def assert_digits(expression: str, sizes: list[tuple[int, float]]) -> None:
    for size, student, halves in itertools.product(sizes, STUDENTS, (False, True)):
        teacher_TV, student_TV = logits_of(*size, student, halves)
        expected = float64_of(expression, teacher_TV, student_TV)
        assert_close(student_TV, DenseLogits(teacher_TV), expression, expected)


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_divergence_keeps_its_digits(expression: str) -> None:
    assert_digits(expression, SIZES)


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_over_the_largest_vocabulary(expression: str) -> None:
    teacher_TV, student_TV = logits_of(*LARGEST[-1], "less sure")
    assert_close(student_TV, DenseLogits(teacher_TV), expression, float64_of(expression, teacher_TV, student_TV))


@pytest.mark.slow
@pytest.mark.parametrize("expression", COMPILED)
def test_compiled(expression: str) -> None:
    assert_digits(expression, [*SIZES[1:], *LARGEST] if expression in COMPILED_AT_EVERY_SIZE else LARGEST)


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_through_two_heads(expression: str, dtype: torch.dtype) -> None:
    """Gradients in bfloat16 have only the error of rounding each number once, which is 2⁻⁸."""
    random = generator(9)
    hidden = torch.randn(5, 16, generator=random)
    hidden[:, 0] = 1.0
    weight = torch.randn(3001, 16, generator=random) / 4
    weight[:, 0] = 0.0
    weight[0] = 20.0 * (torch.arange(16) == 0)
    near = weight + 0.1 * torch.rand(3001, 16, generator=random)
    near[:, 0] += 0.3 * (torch.arange(3001) > 0)
    hidden, weight, near = (tensor.to(dtype) for tensor in (hidden, weight, near))
    terms: list[Term] = [Distill(FullVocab(hidden, OutputHead(weight)), parse_divergence(expression))]
    actual = run(linear_objective, Leaves(hidden, near, None), terms)
    expected = exact(Leaves(hidden, near, None), terms)
    (value_T,), (expected_T,) = actual.output.per_token.values(), expected.output.per_token.values()
    assert ((value_T.double() / expected_T - 1).abs() <= WITHIN).all()
    for name, gradient in expected.gradients.items():
        error = (actual.gradients[name].double() - gradient).abs()
        rounding = gradient.abs() * (2**-8 if dtype == torch.bfloat16 else 0)
        assert float((error - rounding).clamp(min=0).norm() / gradient.norm()) <= WITHIN, name


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_sparse_teacher(expression: str, tail: str) -> None:
    """The log-probabilities are a float64 teacher's, rounded; the top token's log-probability is −1e-6."""
    for student in STUDENTS:
        teacher_TV, student_TV = logits_of(512, 1 - 1e-6, student)
        log_p_TV = teacher_TV.double().log_softmax(1)
        log_p_TK, ids_TK = log_p_TV.topk(9, dim=1)
        tail_T = torch.logsumexp(log_p_TV.scatter(1, ids_TK, -torch.inf), 1)
        signal = TopK(ids_TK, log_p_TK.float(), tail, tail_T.float())  # type: ignore[arg-type]
        eye = OutputHead(torch.eye(512, dtype=torch.float64))
        logits = student_TV.double().requires_grad_()
        terms = [Distill(converted(signal, torch.float64), parse_divergence(expression))]
        expected = dense_objective(logits, eye, terms)
        expected.loss.backward()
        (expected_T,) = expected.per_token.values()
        assert_close(student_TV, signal, expression, (expected_T, logits.grad))


def close_over_ranks(expression: str, student: str) -> Problem:
    teacher_TV, student_TV = logits_of(251, 1 - 1e-5, student)
    return Problem(Logits(student_TV), [Distill(DenseLogits(teacher_TV), parse_divergence(expression))])


def test_over_vocabulary_shards() -> None:
    """The top token is on one rank only, so each rank's sums are relative to another largest logit."""
    named = {
        f"{expression} {student}": partial(close_over_ranks, expression, student)
        for expression in EXPRESSIONS
        for student in STUDENTS
    }
    cases = over(Layout(FOUR), named)
    for case, answer in zip(cases, shared_pool().run(on_shards, cases, limit=30.0), strict=True):
        assert not isinstance(answer, Failure), answer
        expected = oracle(case.problem())
        gradient_TV = torch.cat([outcome.gradients["logits"] for outcome in answer], 1)
        assert distance(gradient_TV, expected.gradients["logits"]) <= WITHIN, case.name
        for name, expected_T in expected.output.per_token.items():
            assert ((answer[0].per_token[name].double() / expected_T - 1).abs() <= WITHIN).all(), case.name
