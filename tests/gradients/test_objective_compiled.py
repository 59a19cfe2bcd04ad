"""The compiled pointwise functions on a CPU, compared with float64 and with the uncompiled functions.

Tiles of `COMPILED_FROM` columns or more are compiled; the other tests of the objective are smaller. Compiling costs
seconds per plan, so `make test` compiles two plans, and the other divergences are marked slow.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.compiled_cases import PLANS, V, assert_close, exact, full_terms, leaves_of, mixture_terms
from kit.objective_cases import (
    ALL_DIVERGENCES,
    TAILS,
    Leaves,
    T,
    distance,
    make_full,
    make_signal,
    run,
)

from stillhouse.objective import (
    Distill,
    Term,
    linear_objective,
    parse_divergence,
)
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.tile import compiled

pytestmark = pytest.mark.filterwarnings("error:.*torch.compile:UserWarning")


@pytest.fixture
def ran_compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the functions that ran compiled."""
    names: list[str] = []
    original = compiled._compiled

    def recorded(function: Callable[..., Any], *rest: Any) -> Callable[..., Any]:
        names.append(function.__name__)
        return original(function, *rest)

    monkeypatch.setattr(compiled, "_compiled", recorded)
    return names


def assert_no_worse_than_plain(leaves: Leaves, terms: list[Term], **options: Any) -> None:
    """Assert that the error is at most 2 × the error of plain float32 autograd + 1e-6, both relative to float64."""
    oracle = exact(leaves, terms, **options)
    plain = run(dense_objective, leaves, terms, **options)
    fast = run(linear_objective, leaves, terms, **options)
    assert (
        distance(fast.output.loss, oracle.output.loss) <= 2 * distance(plain.output.loss, oracle.output.loss) + 1e-6
    )
    for name, gradient in oracle.gradients.items():
        allowed = 2 * distance(plain.gradients[name], gradient) + 1e-6
        assert distance(fast.gradients[name], gradient) <= allowed, name
    for name, value_T in oracle.output.per_token.items():
        allowed = 2 * distance(plain.output.per_token[name], value_T) + 1e-6
        assert distance(fast.output.per_token[name], value_T) <= allowed, name


@pytest.mark.parametrize("plan", PLANS)
def test_plans_against_float64(plan: str, ran_compiled: list[str]) -> None:
    assert_no_worse_than_plain(leaves_of(), PLANS[plan](), normalizer=29.0)
    sweeps = {"raw_sums", "gradient"} if plan == "plain" else {"raw_sums", "normalized_sums", "gradient"}
    assert set(ran_compiled) == sweeps


@pytest.mark.parametrize("tokens", [T, 2, 1])
def test_a_mixture_of_teachers_against_float64(tokens: int, ran_compiled: list[str]) -> None:
    assert_no_worse_than_plain(leaves_of(tokens), mixture_terms(tokens))
    assert set(ran_compiled) == ({"raw_sums", "log_mean", "normalized_sums", "gradient"} if tokens > 1 else set())


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("expression", ["forward_kl", "jsd(0.3)", "total_variation", "alpha_beta(0.2, 0.5)"])
def test_sparse_signals_against_float64(expression: str, tail: str) -> None:
    """All divergences share one plan, because the kernels do not compute the divergence of a sparse signal."""
    terms: list[Term] = [Distill(make_signal(tail, T, V, dtype=torch.float32), parse_divergence(expression))]
    assert_no_worse_than_plain(leaves_of(), terms)


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
@pytest.mark.parametrize("expression", ALL_DIVERGENCES)
def test_every_divergence_against_float64(expression: str, sharpness: float) -> None:
    teacher = make_full(T, V, dtype=torch.float32, sharpness=sharpness)
    terms: list[Term] = [Distill(teacher, parse_divergence(expression))]
    assert_no_worse_than_plain(leaves_of(sharpness=sharpness), terms)


@pytest.mark.slow
@pytest.mark.parametrize("head", [{"scale": 0.5}, {"softcap": 30.0}, {"scale": 2.0, "softcap": 5.0}], ids=str)
def test_heads_against_float64(head: dict[str, float]) -> None:
    assert_no_worse_than_plain(leaves_of(), full_terms(), head=head)


@pytest.mark.parametrize("plan", PLANS)
def test_compiled_results_equal_uncompiled_ones(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = run(linear_objective, leaves_of(), PLANS[plan]())
    monkeypatch.setattr(compiled, "COMPILED_FROM", 1 << 60)
    assert_close(fast, run(linear_objective, leaves_of(), PLANS[plan]()))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tokens", [1, 2])
def test_few_rows(tokens: int, plan: str) -> None:
    assert_no_worse_than_plain(leaves_of(tokens), PLANS[plan](tokens))


@pytest.mark.parametrize("plan", PLANS)
def test_no_row(plan: str) -> None:
    fast = run(linear_objective, leaves_of(0), PLANS[plan](0))
    assert fast.output.loss == 0
    assert (fast.gradients["weight"] == 0).all()


def test_no_row_counts() -> None:
    fast = run(linear_objective, leaves_of(), full_terms(), weights_T=torch.zeros(T))
    assert fast.output.loss == 0
    assert all((gradient == 0).all() for gradient in fast.gradients.values())
