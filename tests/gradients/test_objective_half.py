"""The compiled objective on half-precision leaves: the places where it rounds, and the error of the rounding."""

import pytest
import torch
from kit.compiled_cases import HALVES, exact, leaves_of, plain_terms
from kit.objective_cases import (
    Leaves,
    distance,
    generator,
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
)
from stillhouse.objective.head import Projection

pytestmark = pytest.mark.filterwarnings("error:.*torch.compile:UserWarning")


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


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_half_precision_student_close_to_its_teacher(dtype: torch.dtype) -> None:
    """The gradient's error is at most 0.5 %; rounding the logits to half precision would cost ten times as much."""
    leaves, teacher = near_teacher(64, dtype)
    terms: list[Term] = [Distill(teacher, forward_kl())]
    oracle = exact(leaves, terms)
    assert 2e-4 < oracle.output.per_token["forward_kl"].mean() < 5e-3
    fast, rounded = run(linear_objective, leaves, terms), from_rounded_logits(leaves, teacher, dtype)
    for name, gradient in oracle.gradients.items():
        error = distance(fast.gradients[name], gradient)
        assert error <= 5e-3, name
        assert distance(rounded[name], gradient) >= max(10 * error, 1e-2), name


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_a_gradient_that_is_rounded_before_its_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU rounds operands to bfloat16 before its products. The range of float16 is too small for gradients."""
    rounding = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    monkeypatch.setattr(Projection, "operand", lambda _, grad_CV: grad_CV.to(rounding).to(grad_CV.dtype))
    leaves, teacher = near_teacher(64, dtype)
    terms: list[Term] = [Distill(teacher, forward_kl())]
    fast = run(linear_objective, leaves, terms)
    for name, gradient in exact(leaves, terms).gradients.items():
        assert distance(fast.gradients[name], gradient) <= 5e-3, name


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 4])
def test_weight_gradient_over_many_chunks(chunk_tokens: int) -> None:
    """The gradient is summed in float32 and rounded once; bfloat16 sums of 128 chunks would have an error of 1 %."""
    leaves, terms = leaves_of(512, torch.bfloat16, bias=False), plain_terms(512, torch.bfloat16)
    fast = run(linear_objective, leaves, terms, chunk_tokens=chunk_tokens).gradients["weight"]
    once = run(linear_objective, leaves, terms, chunk_tokens=512).gradients["weight"]
    assert distance(fast, once) <= 2e-4
    full = run(linear_objective, Leaves(leaves.hidden.float(), leaves.weight.float(), None), terms)
    torch.testing.assert_close(fast, full.gradients["weight"].bfloat16(), rtol=2**-7, atol=1e-6)


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
