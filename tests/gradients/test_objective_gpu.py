"""The objective on a GPU: half-precision operands, float32 logits, compiled functions, no synchronisation.

This file imports nothing but torch, pytest and the package.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    FullVocab,
    Mixture,
    OutputHead,
    Sampled,
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
from stillhouse.objective.tile import compiled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

T, V, D, E = 123, 507, 64, 96


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_leaves(dtype: torch.dtype, device: str = "cuda", vocabulary: int = V) -> tuple[Tensor, Tensor]:
    """Make values that every dtype represents exactly, so that all dtypes start from the same numbers."""
    hidden, weight = normal(0, T, D).bfloat16(), (normal(1, vocabulary, D) / 8).bfloat16()
    return (hidden.to(device, dtype).detach().requires_grad_(), weight.to(device, dtype).detach().requires_grad_())


def make_terms(dtype: torch.dtype, device: str = "cuda", vocabulary: int = V) -> list[Term]:
    labels_T = torch.arange(T) % vocabulary
    labels_T[::5] = -100
    log_p_TK, ids_TK = torch.log_softmax(normal(4, T, vocabulary), 1).topk(8, 1)
    ids_TK[::3, 2] = -1
    exact = dtype if dtype == torch.float64 else torch.float32
    return [
        CrossEntropy(labels_T.to(device), 0.3, 0.1, 1e-2),
        Distill(full_vocab(dtype, device, vocabulary), jsd(0.3), 0.7, 1.5),
        Distill(TopK(ids_TK.to(device), log_p_TK.to(device, exact)), reverse_kl(), 0.4),
        Distill(Sampled(ids_TK.to(device), log_p_TK.exp().to(device, exact)), forward_kl(), 0.1),
        Entropy(-0.05),
    ]


def full_vocab(dtype: torch.dtype, device: str, vocabulary: int) -> FullVocab:
    """A teacher whose head has five rows more than the student's."""
    teacher, head = normal(2, T, E).bfloat16(), (normal(3, vocabulary + 5, E) / 10).bfloat16()
    return FullVocab(teacher.to(device, dtype), OutputHead(head.to(device, dtype)))


def mixture_term(dtype: torch.dtype, device: str = "cuda") -> Distill:
    """A mixture of two teachers, whose heads have different row counts."""
    signals = [
        FullVocab(
            normal(seed, T, E).bfloat16().to(device, dtype),
            OutputHead((normal(seed + 1, rows, E) / 10).bfloat16().to(device, dtype)),
        )
        for seed, rows in ((2, V + 5), (7, V))
    ]
    return Distill(Mixture(signals, [2, 1], 1.5), jsd(0.3), 0.7, 1.5)


def gradients(
    objective: Any, dtype: torch.dtype, device: str = "cuda", **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = make_leaves(dtype, device)
    loss = objective(
        hidden, OutputHead(weight, vocab_size=V), make_terms(dtype, device), normalizer=T, **options
    ).loss
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def distance(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())


class Products(TorchDispatchMode):
    """Records the dtypes of every matrix product: (left, right, result)."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            first = 1 if func.overloadpacket is torch.ops.aten.addmm else 0  # after the total
            left, right = args[first : first + 2]
            self.dtypes.append((left.dtype, right.dtype, result.dtype))
        return result


@pytest.mark.parametrize("chunk_tokens", [None, 50])
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float64, 1e-12), (torch.float32, 2e-3), (torch.bfloat16, 8e-3)]
)
def test_loss_and_gradients_meet_the_float64_oracle(
    dtype: torch.dtype, rounding: float, chunk_tokens: int | None
) -> None:
    exact = gradients(dense_objective, torch.float64, "cpu")
    actual = gradients(linear_objective, dtype, chunk_tokens=chunk_tokens)
    plain = gradients(dense_objective, dtype)
    for one, other, oracle in zip(actual, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert distance(one, oracle) <= max(2 * distance(other, oracle), rounding)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-3), (torch.bfloat16, 8e-3)])
def test_a_mixture_of_teachers(dtype: torch.dtype, rounding: float) -> None:
    """It meets the float64 oracle, and the pass does not wait for the device."""
    results = []
    for objective, its_dtype, device in ((linear_objective, dtype, "cuda"), (dense_objective, torch.float64, "cpu")):
        hidden, weight = make_leaves(its_dtype, device)
        term = mixture_term(its_dtype, device)
        objective(hidden, OutputHead(weight), [term], chunk_tokens=50)  # the first pass compiles
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            output = objective(hidden, OutputHead(weight), [term], chunk_tokens=50)
            output.loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert hidden.grad is not None
        assert weight.grad is not None
        results.append((output.loss.detach(), hidden.grad, weight.grad))
    for one, oracle in zip(*results, strict=True):
        assert distance(one, oracle) < rounding


def divergence_terms(text: str) -> Callable[[torch.dtype, str, int], list[Term]]:
    def make(dtype: torch.dtype, device: str, vocabulary: int) -> list[Term]:
        return [Distill(full_vocab(dtype, device, vocabulary), parse_divergence(text))]

    return make


#: the terms of the compiled functions; the last one needs all of their parts
COMPILED: dict[str, Callable[[torch.dtype, str, int], list[Term]]] = {
    "forward_kl": divergence_terms("forward_kl"),
    "jsd": divergence_terms("jsd(0.5)"),
    "others": divergence_terms("reverse_kl + skew_forward_kl(0.1) + total_variation + alpha_beta(0.2, 0.7)"),
    "all": make_terms,
}


@cache
def exact_result(name: str, vocabulary: int) -> tuple[Tensor, ...]:
    return compiled_result(dense_objective, name, torch.float64, "cpu", vocabulary)


def compiled_result(
    objective: Any, name: str, dtype: torch.dtype, device: str, vocabulary: int, **options: Any
) -> tuple[Tensor, ...]:
    hidden, weight = make_leaves(dtype, device, vocabulary)
    terms, head = COMPILED[name](dtype, device, vocabulary), OutputHead(weight, vocab_size=vocabulary)
    waits = "error" if options.pop("may_not_wait", False) else "default"
    torch.cuda.set_sync_debug_mode(waits)
    try:
        loss = objective(hidden, head, terms, normalizer=float(T), **options).loss
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [*((name, 2053) for name in COMPILED), ("forward_kl", 50_021), ("jsd", 50_021), ("all", 50_021)],
)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-3), (torch.bfloat16, 8e-3)])
def test_compiled_functions_meet_the_float64_oracle(
    dtype: torch.dtype, rounding: float, name: str, vocabulary: int
) -> None:
    """Only the first pass, which compiles, may wait for the device."""
    functions = compiled._compiled.cache_info().misses + compiled._compiled.cache_info().hits
    exact, plain = exact_result(name, vocabulary), compiled_result(dense_objective, name, dtype, "cuda", vocabulary)
    options: dict[str, Any] = {"chunk_tokens": 50}
    compiled_result(linear_objective, name, dtype, "cuda", vocabulary, **options)
    actual = compiled_result(linear_objective, name, dtype, "cuda", vocabulary, may_not_wait=True, **options)
    # each pass has three chunks, and at least two functions for each chunk
    assert compiled._compiled.cache_info().misses + compiled._compiled.cache_info().hits >= functions + 12
    assert not compiled._without_compiler
    for one, other, oracle in zip(actual, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert distance(one, oracle) <= max(2 * distance(other, oracle), rounding)


def test_float64_is_compiled_too() -> None:
    exact = exact_result("all", 2053)
    actual = compiled_result(linear_objective, "all", torch.float64, "cuda", 2053, chunk_tokens=50)
    assert not compiled._without_compiler
    for one, oracle in zip(actual, exact, strict=True):
        assert distance(one, oracle) <= 1e-10


def test_float16_gradients_survive_until_the_loss_scale() -> None:
    """The logits' gradients of 1e-8, too small for float16, enter their products in float32; results fit float16."""
    exact = gradients(linear_objective, torch.float64)
    half = gradients(linear_objective, torch.float16)
    for one, oracle in zip(half, exact, strict=True):
        assert distance(one, oracle) < 2e-3


def test_half_precision_operands_stay_and_logits_are_float32() -> None:
    with Products() as products:
        gradients(linear_objective, torch.bfloat16)
    # student logits, teacher logits, hidden gradient, weight gradient: each of the aligned columns and of the rest
    assert len(products.dtypes) == 8
    assert set(products.dtypes) == {(torch.bfloat16, torch.bfloat16, torch.float32)}


def test_autocast_takes_half_precision_operands_of_a_student_with_float32_weights() -> None:
    exact = gradients(dense_objective, torch.float64, "cpu")
    with torch.autocast("cuda", torch.bfloat16), Products() as products:
        actual = gradients(linear_objective, torch.float32)
    # the teacher's logits, of the aligned columns and of the rest, keep the teacher's dtype
    assert [left for left, _, _ in products.dtypes].count(torch.float32) == 2
    assert {left for left, _, _ in products.dtypes} == {torch.bfloat16, torch.float32}
    assert actual[1].dtype == actual[2].dtype == torch.float32
    for one, oracle in zip(actual, exact, strict=True):
        assert distance(one, oracle) < 8e-3


@pytest.mark.parametrize("half", [True, False])
def test_a_pass_does_not_wait_for_the_device(half: bool) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    hidden, weight = make_leaves(dtype)
    terms, weights_T = make_terms(dtype), torch.ones(T, device="cuda")
    valid_index, normalizer = torch.arange(T, device="cuda"), torch.tensor(float(T), device="cuda")
    head = OutputHead(weight, vocab_size=V)
    linear_objective(hidden, head, terms, weights_T=weights_T, chunk_tokens=50)  # the first pass compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in ({"valid_index": valid_index, "normalizer": normalizer}, {"normalizer": 7.0}):
            output = linear_objective(hidden, head, terms, weights_T=weights_T, chunk_tokens=50, **options)
            output.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.loss.isfinite()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_rows_of_weight_zero_may_hold_nan_without_an_index_of_valid_rows(softcap: float | None) -> None:
    dead = torch.tensor([0, 7, 122], device="cuda")
    weights_T = torch.ones(T, device="cuda").index_fill(0, dead, 0.0)
    results = []
    for poison in (0.0, math.nan):
        hidden, weight = make_leaves(torch.bfloat16)
        hidden = hidden.detach().index_fill(0, dead, poison).requires_grad_()
        terms = [CrossEntropy(torch.arange(T, device="cuda")), Entropy(0.1)]
        output = linear_objective(hidden, OutputHead(weight, softcap=softcap), terms, weights_T=weights_T)
        output.loss.backward()
        results.append((output.loss.detach(), hidden.grad, weight.grad))
    for clean, poisoned in zip(*results, strict=True):
        assert clean is not None
        assert torch.equal(clean, poisoned)


def test_weights_on_the_cpu_name_the_valid_rows() -> None:
    weights_T = (torch.arange(T) % 3 > 0).float()
    here = gradients(linear_objective, torch.float32, weights_T=weights_T)
    there = gradients(linear_objective, torch.float32, weights_T=weights_T.cuda())
    for one, other in zip(here, there, strict=True):
        assert distance(one, other) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    logits = normal(5, T, V).to("cuda", dtype).requires_grad_()
    exact = logits.detach().cpu().double().requires_grad_()
    teacher = normal(6, T, V)
    for leaf in (logits, exact):
        labels_T = torch.arange(T, device=leaf.device)
        signal = DenseLogits(teacher.to(leaf.device, leaf.dtype))
        logits_objective(
            leaf, [CrossEntropy(labels_T), Distill(signal, forward_kl())], normalizer=3.0
        ).loss.backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert logits.grad.dtype == dtype
    assert distance(logits.grad, exact.grad) < 3 * torch.finfo(dtype).eps
