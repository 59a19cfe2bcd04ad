"""The objective on a GPU: half-precision operands, float32 logits, compiled functions, no synchronisation."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    Leaves,
    Result,
    converted,
    distance,
    make_labels,
    make_leaves,
    make_sampled,
    make_signal,
    mapped,
    run,
)
from kit.tensors import no_waiting
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
    Term,
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

T, V = 123, 507
#: of the products of a GPU; twice the error of plain autograd on it is allowed, too
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-3, torch.bfloat16: 8e-3}
HALF = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
#: the divergences of cases that have one term
DIVERGENCES = {
    "forward_kl": "forward_kl",
    "jsd": "jsd(0.5)",
    "others": "reverse_kl + skew_forward_kl(0.1) + total_variation + alpha_beta(0.2, 0.7)",
}


def teacher(dtype: torch.dtype, vocabulary: int, seed: int = 2) -> FullVocab:
    leaves = make_leaves(T, vocabulary, 96, dtype=torch.bfloat16, bias=False, seed=seed)
    return converted(FullVocab(leaves.hidden, OutputHead(leaves.weight)), dtype)


def problem(name: str, dtype: torch.dtype, vocabulary: int = V, device: str = "cuda") -> tuple[Leaves, list[Term]]:
    """Make values that every dtype represents exactly, so that all dtypes start from the same numbers.

    Teachers' heads have five rows more than the student's. "all" needs all parts of the compiled functions.
    """
    wide = dtype if dtype == torch.float64 else torch.float32
    full = teacher(dtype, vocabulary + 5)
    if name == "mixture":
        terms = [Distill(Mixture([full, teacher(dtype, vocabulary, 7)], [2, 1], 1.5), jsd(0.3), 0.7, 1.5)]
    elif name in DIVERGENCES:
        terms = [Distill(full, parse_divergence(DIVERGENCES[name]))]
    else:
        terms = [
            CrossEntropy(make_labels(T, vocabulary), 0.3, 0.1, 1e-2),
            Distill(full, jsd(0.3), 0.7, 1.5),
            Distill(converted(make_signal("bucket", T, vocabulary, dtype=torch.float32), wide), reverse_kl(), 0.4),
            Distill(converted(make_sampled(T, vocabulary, torch.float32), wide), forward_kl(), 0.1),
            Entropy(-0.05),
        ]
    leaves = converted(make_leaves(T, vocabulary, 64, dtype=torch.bfloat16, bias=False), dtype)
    return mapped((leaves, terms), lambda tensor: tensor.to(device))


def result_of(
    name: str, dtype: torch.dtype, vocabulary: int = V, *, device: str = "cuda", plain: bool = False, **options: Any
) -> Result:
    objective = dense_objective if plain else linear_objective
    options = {"normalizer": T, "head": {"vocab_size": vocabulary}} | options
    return run(objective, *problem(name, dtype, vocabulary, device), **options)


@cache
def exact(name: str, vocabulary: int = V) -> Result:
    return result_of(name, torch.float64, vocabulary, device="cpu", plain=True)


def assert_near(actual: Result, expected: Result, within: float, plain: Result | None = None) -> None:
    """plain: of plain autograd in the same dtype, whose error twice is allowed, too."""
    for name, value in ({"loss": expected.output.loss} | expected.gradients).items():
        values = [({"loss": result.output.loss} | result.gradients)[name] for result in (actual, plain or actual)]
        assert values[0].dtype == values[1].dtype
        assert distance(values[0], value) <= max(within, 2 * distance(values[1], value) if plain else 0.0), name


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
@pytest.mark.parametrize("dtype", ROUNDING)
def test_loss_and_gradients_meet_the_float64_oracle(dtype: torch.dtype, chunk_tokens: int | None) -> None:
    plain = result_of("all", dtype, plain=True)
    assert_near(result_of("all", dtype, chunk_tokens=chunk_tokens), exact("all"), ROUNDING[dtype], plain)


@HALF
def test_a_mixture_of_teachers(dtype: torch.dtype) -> None:
    """It meets the float64 oracle, and the pass does not wait for the device."""
    result_of("mixture", dtype, chunk_tokens=50)  # the first pass compiles
    leaves, terms = problem("mixture", dtype)
    with no_waiting():
        actual = run(linear_objective, leaves, terms, normalizer=T, chunk_tokens=50)
    assert_near(actual, exact("mixture"), ROUNDING[dtype])


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [*((name, 2053) for name in (*DIVERGENCES, "all")), *((name, 50_021) for name in ("forward_kl", "jsd", "all"))],
)
@HALF
def test_compiled_functions_meet_the_float64_oracle(dtype: torch.dtype, name: str, vocabulary: int) -> None:
    """Only the first pass, which compiles, may wait for the device."""
    functions = compiled._compiled.cache_info().misses + compiled._compiled.cache_info().hits
    result_of(name, dtype, vocabulary, chunk_tokens=50)
    leaves, terms = problem(name, dtype, vocabulary)
    options: dict[str, Any] = {"normalizer": float(T), "head": {"vocab_size": vocabulary}}
    with no_waiting():
        actual = run(linear_objective, leaves, terms, chunk_tokens=50, **options)
    # each pass has three chunks, and at least two functions for each chunk
    assert compiled._compiled.cache_info().misses + compiled._compiled.cache_info().hits >= functions + 12
    assert not compiled._without_compiler
    plain = run(dense_objective, leaves, terms, **options)
    assert_near(actual, exact(name, vocabulary), ROUNDING[dtype], plain)


def test_float64_is_compiled_too() -> None:
    actual = result_of("all", torch.float64, 2053, chunk_tokens=50)
    assert not compiled._without_compiler
    assert_near(actual, exact("all", 2053), 1e-10)


def test_float16_gradients_survive_until_the_loss_scale() -> None:
    """The logits' gradients of 1e-8, too small for float16, enter their products in float32; results fit float16."""
    assert_near(result_of("all", torch.float16), result_of("all", torch.float64), 2e-3)


def test_half_precision_operands_stay_and_logits_are_float32() -> None:
    with Products() as products:
        result_of("all", torch.bfloat16)
    # student logits, teacher logits, hidden gradient, weight gradient: each of the aligned columns and of the rest
    assert len(products.dtypes) == 8
    assert set(products.dtypes) == {(torch.bfloat16, torch.bfloat16, torch.float32)}


def test_autocast_takes_half_precision_operands_of_a_student_with_float32_weights() -> None:
    with torch.autocast("cuda", torch.bfloat16), Products() as products:
        actual = result_of("all", torch.float32)
    # the teacher's logits, of the aligned columns and of the rest, keep the teacher's dtype
    assert [left for left, _, _ in products.dtypes].count(torch.float32) == 2
    assert {left for left, _, _ in products.dtypes} == {torch.bfloat16, torch.float32}
    assert {gradient.dtype for gradient in actual.gradients.values()} == {torch.float32}
    assert_near(actual, exact("all"), 8e-3)


@HALF
def test_a_pass_does_not_wait_for_the_device(dtype: torch.dtype) -> None:
    leaves, terms = problem("all", dtype)
    options: dict[str, Any] = {
        "weights_T": torch.ones(T, device="cuda"),
        "chunk_tokens": 50,
        "head": {"vocab_size": V},
    }
    valid_index, normalizer = torch.arange(T, device="cuda"), torch.tensor(float(T), device="cuda")
    run(linear_objective, leaves, terms, **options)  # the first pass compiles
    torch.cuda.synchronize()
    with no_waiting():
        run(linear_objective, leaves, terms, valid_index=valid_index, normalizer=normalizer, **options)
        result = run(linear_objective, leaves, terms, normalizer=7.0, **options)
    assert result.output.loss.isfinite()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_rows_of_weight_zero_may_hold_nan_without_an_index_of_valid_rows(softcap: float | None) -> None:
    dead, leaves = torch.tensor([0, 7, 122], device="cuda"), problem("all", torch.bfloat16)[0]
    weights_T = torch.ones(T, device="cuda").index_fill(0, dead, 0.0)
    terms = [CrossEntropy(torch.arange(T, device="cuda")), Entropy(0.1)]
    results = []
    for poison in (0.0, math.nan):
        poisoned = Leaves(leaves.hidden.index_fill(0, dead, poison), leaves.weight, None)
        results.append(run(linear_objective, poisoned, terms, head={"softcap": softcap}, weights_T=weights_T))
    assert torch.equal(*(result.output.loss for result in results))
    for name, gradient in results[0].gradients.items():
        assert torch.equal(gradient, results[1].gradients[name]), name


def test_weights_on_the_cpu_name_the_valid_rows() -> None:
    weights_T = (torch.arange(T) % 3 > 0).float()
    here, there = (result_of("all", torch.float32, weights_T=weights) for weights in (weights_T, weights_T.cuda()))
    assert_near(here, there, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    logits, teacher_TV = (make_leaves(T, 1, V, seed=seed).hidden for seed in (5, 6))
    gradients: list[Tensor] = []
    for device, of_dtype in (("cuda", dtype), ("cpu", torch.float64)):
        leaf = logits.to(dtype).to(device, of_dtype).requires_grad_()
        signal, labels_T = DenseLogits(teacher_TV.to(device, of_dtype)), torch.arange(T, device=device)
        terms = [CrossEntropy(labels_T), Distill(signal, forward_kl())]
        logits_objective(leaf, terms, normalizer=3.0).loss.backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert gradients[0].dtype == dtype
    assert distance(*gradients) < 3 * torch.finfo(dtype).eps
