"""Divergences against the formulas of their papers, written out with plain probabilities, and their grammar."""

import inspect
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from pathlib import Path

import pytest
import torch
from kit.divergence_formulas import TEXTBOOK, alpha_beta_formula
from kit.objective_cases import ALL_DIVERGENCES, DIVERGENCES_OF_PEAKED_ROWS, F_DIVERGENCES
from torch import Tensor

from stillhouse.objective import (
    Divergence,
    alpha_beta,
    forward_kl,
    jsd,
    parse_divergence,
    reverse_kl,
    skew_forward_kl,
    skew_reverse_kl,
    total_variation,
)
from stillhouse.objective.divergences import DIVERGENCES


def random_log_probs(rows: int = 40, vocabulary: int = 23, *, seed: int = 0, sharpness: float = 2.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=random, dtype=torch.float64)
    return torch.log_softmax(logits * sharpness, 1)


@pytest.mark.parametrize("expression", TEXTBOOK)
def test_value_is_the_textbook_formula(expression: str) -> None:
    log_p, log_q = random_log_probs(seed=0), random_log_probs(seed=1)
    expected = torch.stack([TEXTBOOK[expression](p, q) for p, q in zip(log_p.exp(), log_q.exp(), strict=True)])
    actual = parse_divergence(expression).value(log_p, log_q).sum(1)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("expression", "sharpness"),
    [(expression, sharpness) for expression in ALL_DIVERGENCES for sharpness in (0.5, 2.0)]
    + [(expression, 20.0) for expression in DIVERGENCES_OF_PEAKED_ROWS],
)
def test_weighted_slope_is_the_derivative_of_the_value(expression: str, sharpness: float) -> None:
    """∂f/∂log q = q·∂f/∂q holds for each entry exactly, and not only up to a constant in h."""
    divergence = parse_divergence(expression)
    log_p = random_log_probs(seed=0, sharpness=sharpness)
    log_q = random_log_probs(seed=1, sharpness=sharpness).requires_grad_()
    (expected,) = torch.autograd.grad(divergence.value(log_p, log_q).sum(), log_q)
    torch.testing.assert_close(divergence.weighted_slope(log_p, log_q), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "limit"),
    [
        (lambda small: alpha_beta(0.7, small), alpha_beta(0.7, 0)),
        (lambda small: alpha_beta(small, 0.7), alpha_beta(0, 0.7)),
        (lambda small: alpha_beta(small, small), alpha_beta(0, 0)),
        (lambda small: alpha_beta(small, -small), alpha_beta(0, 0)),
        (lambda small: alpha_beta(1, small), forward_kl()),
        (lambda small: alpha_beta(small, 1), reverse_kl()),
        (skew_forward_kl, forward_kl()),
        (skew_reverse_kl, reverse_kl()),
        (lambda small: jsd(small, normalized=True), forward_kl()),
        (lambda small: jsd(1 - small, normalized=True), reverse_kl()),
    ],
    ids=lambda parameter: str(parameter) if isinstance(parameter, Divergence) else "",
)
def test_limits_are_continuous(family: Callable[[float], Divergence], limit: Divergence) -> None:
    log_p, log_q = random_log_probs(seed=0, sharpness=0.4), random_log_probs(seed=1, sharpness=0.4)
    values = at_zero(lambda small: family(small).value(log_p, log_q).sum(1))
    torch.testing.assert_close(limit.value(log_p, log_q).sum(1), values, rtol=1e-10, atol=0)
    gradients = at_zero(lambda small: through_softmax(family(small), log_p, log_q))
    torch.testing.assert_close(through_softmax(limit, log_p, log_q), gradients, rtol=0, atol=1e-12)


def test_the_limit_at_opposite_exponents_is_the_one_of_the_general_formula() -> None:
    log_p, log_q = random_log_probs(seed=0, sharpness=0.4), random_log_probs(seed=1, sharpness=0.4)

    def general(small: float) -> Tensor:
        formula = alpha_beta_formula(0.5, -0.5 + small)
        return torch.stack([formula(p, q) for p, q in zip(log_p.exp(), log_q.exp(), strict=True)])

    value = alpha_beta(0.5, -0.5).value(log_p, log_q).sum(1)
    torch.testing.assert_close(value, at_zero(general), rtol=1e-10, atol=0)


def at_zero(function: Callable[[float], Tensor]) -> Tensor:
    """Return the limit of a smooth function at 0, by Neville's polynomial through six small arguments.

    The error of the extrapolation is of sixth order in the arguments, about 1e-14. A single argument that is small
    enough for this error would lose all digits, because some formulas divide by its square.
    """
    arguments = [2.0**-power for power in range(7, 13)]
    values = [function(argument) for argument in arguments]
    for width in range(1, len(arguments)):
        pairs = zip(arguments, arguments[width:], values, values[1:], strict=False)
        values = [(far * right - near * left) / (far - near) for far, near, left, right in pairs]
    return values[0]


def through_softmax(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> Tensor:
    slope = divergence.weighted_slope(log_p, log_q)
    return slope - log_q.exp() * slope.sum(-1, keepdim=True)


@pytest.mark.parametrize("expression", ALL_DIVERGENCES)
def test_an_outcome_without_mass_on_either_side_is_worth_nothing(expression: str) -> None:
    """The padding entries of a sparse row rely on this."""
    nothing = torch.tensor([-math.inf], requires_grad=True)
    divergence = parse_divergence(expression)
    assert divergence.value(nothing, nothing).item() == 0
    assert divergence.weighted_slope(nothing, nothing).item() == 0


FINITE_WITHOUT_TEACHER_MASS = [name for name in F_DIVERGENCES if "reverse_kl" not in name or "0.1" in name]


@pytest.mark.parametrize("expression", FINITE_WITHOUT_TEACHER_MASS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_teacher_probabilities_of_zero_are_finite(expression: str, dtype: torch.dtype) -> None:
    log_p = torch.tensor([[math.log(0.75), math.log(0.25), -math.inf]], dtype=dtype)
    log_q = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]], dtype=dtype)
    divergence = parse_divergence(expression)
    assert divergence.value(log_p, log_q).isfinite().all()
    assert divergence.weighted_slope(log_p, log_q).isfinite().all()
    if expression in TEXTBOOK and not expression.startswith("alpha"):
        p, q = log_p[0].double().exp(), log_q[0].double().exp()
        p = torch.where(p == 0, 1e-300, p)
        torch.testing.assert_close(
            divergence.value(log_p, log_q).double().sum(), TEXTBOOK[expression](p, q), rtol=1e-6, atol=0
        )


def test_a_divergence_is_infinite_where_its_definition_says_so_and_never_nan() -> None:
    some, none = torch.tensor([-1.0]), torch.tensor([-math.inf])
    for name, kind in DIVERGENCES.items():
        divergence, infinite = parse_divergence(f"{name}({kind.definition.example})"), kind.definition.infinite
        assert divergence.value(some, none).isfinite().item() == (infinite != "q = 0 < p"), name
        assert divergence.value(none, some).isfinite().item() == (infinite != "p = 0 < q"), name
    assert forward_kl().value(some, none).item() == math.inf
    assert reverse_kl().value(none, some).item() == math.inf
    assert forward_kl().value(none, some).item() == 0
    assert reverse_kl().value(some, none).item() == 0


@pytest.mark.parametrize("expression", F_DIVERGENCES)
def test_underflowing_probabilities_stay_finite_in_float32(expression: str) -> None:
    """e^−200 is 0 in float32, so both sides must stay in log space."""
    log_p = torch.log_softmax(torch.tensor([[0.0, -200.0, -3.0, -110.0]]), 1)
    log_q = torch.log_softmax(torch.tensor([[-200.0, 0.0, -120.0, -110.0]]), 1)
    divergence = parse_divergence(expression)
    value, slope = divergence.value(log_p, log_q), divergence.weighted_slope(log_p, log_q)
    exact_value = divergence.value(log_p.double(), log_q.double())
    exact_slope = divergence.weighted_slope(log_p.double(), log_q.double())
    torch.testing.assert_close(value.double(), exact_value, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=1e-5, atol=1e-30)


def decimal_jsd(log_p: list[float], log_q: list[float], beta: Decimal) -> tuple[Decimal, list[Decimal]]:
    """Compute normalised JSD and q·h from unnormalised weights e^log with 60 digits."""
    with localcontext() as context:
        context.prec = 60
        p, q = [Decimal(value).exp() for value in log_p], [Decimal(value).exp() for value in log_q]
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        value = sum(beta * a * (a / c).ln() + (1 - beta) * b * (b / c).ln() for a, b, c in zip(p, q, m, strict=True))
        slope = [(1 - beta) * b * (b / c).ln() for b, c in zip(q, m, strict=True)]
        scale = beta * (1 - beta)
        return Decimal(value) / scale, [value / scale for value in slope]


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-6])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 8.0])
def test_normalized_jsd_is_right_near_its_ends_in_float32(beta: float, sharpness: float) -> None:
    log_p = random_log_probs(6, 11, seed=0, sharpness=sharpness).float()
    log_q = random_log_probs(6, 11, seed=1, sharpness=sharpness).float()
    divergence = jsd(beta, normalized=True)
    exact = [decimal_jsd(p, q, Decimal(beta)) for p, q in zip(log_p.tolist(), log_q.tolist(), strict=True)]
    slopes = torch.tensor([[float(value) for value in slope] for _, slope in exact], dtype=torch.float64)
    torch.testing.assert_close(divergence.weighted_slope(log_p, log_q).double(), slopes, rtol=3e-6, atol=1e-7)
    values = torch.tensor([float(value) for value, _ in exact], dtype=torch.float64)
    # the summands of a small divergence cancel in any formula, so allow an error in their last digits
    summed = (divergence.value(log_p, log_q).double().abs()).sum(1)
    error = (divergence.value(log_p, log_q).double().sum(1) - values).abs()
    assert (error <= 1e-6 * summed + 3e-7).all()


@pytest.mark.parametrize(
    "divergence",
    [
        *(forward_kl(), jsd(0.123456789), jsd(1e-6, normalized=True), jsd(1 / 3, True), skew_forward_kl(0.1 + 0.2)),
        *(skew_reverse_kl(0), total_variation(), alpha_beta(1, -1), alpha_beta(1 / 3, 2 / 3), 1.0 * forward_kl()),
        *(0.9 * forward_kl() + 0.1 * reverse_kl(), 1 / 3 * (forward_kl() + 2 * jsd(0.25)), 2 * (0.5 * reverse_kl())),
        forward_kl() + forward_kl(),
    ],
    ids=str,
)
def test_expression_reads_back_as_the_same_divergence(divergence: Divergence) -> None:
    assert parse_divergence(str(divergence)) == divergence


def test_the_documentation_has_the_table_of_the_definitions() -> None:
    page = (Path(__file__).parents[2] / "docs" / "objective.md").read_text(encoding="utf-8")
    for name, kind in DIVERGENCES.items():
        call = f"{name}({', '.join(inspect.signature(kind).parameters)})"
        _, value, slope, domain, infinite, *_ = kind.definition
        assert f"| `{call}` | {value} | {slope} | {domain or 'none'} | {infinite or 'nowhere'} |\n" in page


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (" forward_kl() ", "forward_kl"),
        ("jsd(beta=0.5)", "jsd(0.5)"),
        ("forward_kl*0.5", "0.5*forward_kl"),
        ("jsd(0.5, True)", "jsd(0.5, normalized=True)"),
        ("reverse_kl + 1e-1*forward_kl", "reverse_kl + 0.1*forward_kl"),
    ],
)
def test_the_grammar_has_some_room(text: str, same: str) -> None:
    assert parse_divergence(text) == parse_divergence(same)
