"""The compiled pointwise functions on a CPU, compared with float64 and with the uncompiled functions.

Tiles of `COMPILED_FROM` columns or more are compiled; the other tests of the objective are smaller. Compiling costs
seconds per plan, so `make test` compiles two plans, and the other divergences are marked slow.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.compiled_cases import PLANS, V, assert_close, full_terms, leaves_of, mixture_terms, plain_terms
from kit.objective_cases import (
    ALL_DIVERGENCES,
    HEADS,
    TAILS,
    Leaves,
    T,
    distance,
    exact,
    generator,
    judge,
    make_full,
    make_signal,
    run,
)
from torch import Tensor

from stillhouse.objective import (
    DenseLogits,
    Distill,
    FullVocab,
    OutputHead,
    Term,
    forward_kl,
    linear_objective,
    logits_objective,
    parse_divergence,
)
from stillhouse.objective.head import Projection
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


def judge_compiled(leaves: Leaves, terms: list[Term], **options: Any) -> None:
    judge(leaves, terms, chunk_tokens=None, tiny=1e-6, **options)


@pytest.mark.parametrize("plan", PLANS)
def test_plans_against_float64(plan: str, ran_compiled: list[str]) -> None:
    judge_compiled(leaves_of(), PLANS[plan](), normalizer=29.0)
    sweeps = {"raw_sums", "gradient"} if plan == "plain" else {"raw_sums", "normalized_sums", "gradient"}
    assert set(ran_compiled) == sweeps


@pytest.mark.parametrize("tokens", [T, 2, 1])
def test_a_mixture_of_teachers_against_float64(tokens: int, ran_compiled: list[str]) -> None:
    judge_compiled(leaves_of(tokens), mixture_terms(tokens))
    assert set(ran_compiled) == ({"raw_sums", "log_mean", "normalized_sums", "gradient"} if tokens > 1 else set())


@pytest.mark.parametrize("tail", TAILS)
def test_sparse_signals_against_float64(tail: str) -> None:
    """The kernels do not compute the divergence of a sparse signal: all divergences share one plan."""
    terms: list[Term] = [Distill(make_signal(tail, T, V, dtype=torch.float32), parse_divergence("jsd(0.3)"))]
    judge_compiled(leaves_of(), terms)


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
@pytest.mark.parametrize("expression", ALL_DIVERGENCES)
def test_every_divergence_against_float64(expression: str, sharpness: float) -> None:
    teacher = make_full(T, V, dtype=torch.float32, sharpness=sharpness)
    terms: list[Term] = [Distill(teacher, parse_divergence(expression))]
    judge_compiled(leaves_of(sharpness=sharpness), terms)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["scaled", "capped", "both"])
def test_heads_against_float64(head: str) -> None:
    judge_compiled(leaves_of(), full_terms(), head=HEADS[head])


@pytest.mark.parametrize("plan", PLANS)
def test_compiled_results_equal_uncompiled_ones(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = run(linear_objective, leaves_of(), PLANS[plan]())
    monkeypatch.setattr(compiled, "COMPILED_FROM", 1 << 60)
    assert_close(fast, run(linear_objective, leaves_of(), PLANS[plan]()))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tokens", [1, 2])
def test_few_rows(tokens: int, plan: str) -> None:
    judge_compiled(leaves_of(tokens), PLANS[plan](tokens))


@pytest.mark.parametrize("plan", PLANS)
def test_no_row(plan: str) -> None:
    fast = run(linear_objective, leaves_of(0), PLANS[plan](0))
    assert fast.output.loss == 0
    assert (fast.gradients["weight"] == 0).all()


def test_no_row_counts() -> None:
    fast = run(linear_objective, leaves_of(), full_terms(), weights_T=torch.zeros(T))
    assert fast.output.loss == 0
    assert all((gradient == 0).all() for gradient in fast.gradients.values())


# half precision: the places where the pass rounds, and the error of the rounding


def near_teacher(tokens: int, dtype: torch.dtype) -> tuple[Leaves, FullVocab]:
    """Return a student and a teacher whose divergence is about 1e-3 nats."""
    leaves = leaves_of(tokens, dtype, bias=False)
    noise = 0.01 * torch.randn(leaves.weight.shape, generator=generator(1), dtype=torch.float64)
    return leaves, FullVocab(leaves.hidden, OutputHead((leaves.weight.double() + noise).to(dtype)))


def from_rounded_logits(leaves: Leaves, teacher: FullVocab, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute gradients in float64, except that the logits of both models are rounded once."""
    hidden, weight = leaves.hidden.double(), leaves.weight.double()
    logits_TV = (hidden @ weight.T).to(dtype).double().requires_grad_()
    teacher_TV = (teacher.hidden_TE.double() @ teacher.head.weight_VD.double().T).to(dtype)
    logits_objective(logits_TV, [Distill(DenseLogits(teacher_TV.double()), forward_kl())]).loss.backward()
    assert logits_TV.grad is not None
    return {"hidden": logits_TV.grad @ weight, "weight": logits_TV.grad.T @ hidden}


@pytest.mark.parametrize("rounds_operands", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_student_close_to_its_teacher(
    dtype: torch.dtype, rounds_operands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient's error is at most 0.5 %; rounding the logits to half precision would cost ten times as much.

    A GPU rounds operands to bfloat16 before its products. The range of float16 is too small for gradients.
    """
    if rounds_operands:
        rounding = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        monkeypatch.setattr(Projection, "operand", lambda _, grad_CV: grad_CV.to(rounding).to(grad_CV.dtype))
    leaves, teacher = near_teacher(64, dtype)
    terms: list[Term] = [Distill(teacher, forward_kl())]
    oracle = exact(leaves, terms)
    assert 2e-4 < oracle.output.per_token["forward_kl"].mean() < 5e-3
    fast, rounded = run(linear_objective, leaves, terms), from_rounded_logits(leaves, teacher, dtype)
    for name, gradient in oracle.gradients.items():
        error = distance(fast.gradients[name], gradient)
        assert error <= 5e-3, name
        assert rounds_operands or distance(rounded[name], gradient) >= max(10 * error, 1e-2), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_normalizer_changes_nothing_but_the_scale(dtype: torch.dtype) -> None:
    leaves, terms = leaves_of(dtype=dtype), plain_terms(dtype=dtype)
    plain = run(linear_objective, leaves, terms).gradients
    for normalizer in (1e-6, 1e-3, 3.0, 1e3, 1e6):
        gradients = run(linear_objective, leaves, terms, normalizer=normalizer).gradients
        for name, gradient in plain.items():
            actual = gradients[name].double() * normalizer
            rounding = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(actual, gradient.double(), rtol=rounding, atol=1e-30, msg=name)
    for normalizer in (2.0**-20, 2.0**20):  # exact in every dtype
        gradients = run(linear_objective, leaves, terms, normalizer=normalizer).gradients
        assert all(torch.equal(gradients[name] * normalizer, each) for name, each in plain.items())
