"""The compiled pointwise functions on a CPU, compared with float64, and what a pass costs.

Tiles of `COMPILED_FROM` columns or more are compiled; the other tests of the objective are smaller. Compiling costs
seconds per plan, so `make test` compiles the plan of one divergence, and the others are marked slow. The cost is the
number of compilations, matrix products and memory.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import first_is_quick, slow
from kit.objective_cases import (
    ALL_DIVERGENCES,
    HEADS,
    Leaves,
    Result,
    T,
    assert_accurate,
    distance,
    exact,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_mixture,
    make_signal,
    run,
)
from kit.tensors import assert_equal_tensors, assert_near
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    FullVocab,
    OutputHead,
    Term,
    forward_kl,
    jsd,
    linear_objective,
    logits_objective,
    parse_divergence,
    reverse_kl,
)
from stillhouse.objective.tile import compiled, sweeps
from stillhouse.objective.tile.logits_provider import HeadLogits

#: an odd size, just above the smallest one that is compiled
V = 2053


def leaves_of(tokens: int = T, dtype: torch.dtype = torch.float32, **options: Any) -> Leaves:
    return make_leaves(tokens, V, dtype=dtype, **options)


def plain_terms(tokens: int = T, dtype: torch.dtype = torch.float32) -> list[Term]:
    """Return the terms that most tests share. The objects are new, but equal to those of every other call."""
    return [Distill(make_full(tokens, V, dtype=dtype), forward_kl())]


def full_terms(tokens: int = T, dtype: torch.dtype = torch.float32) -> list[Term]:
    """Return terms that use every part of a plan: both kinds of pairs, a mixture, two temperatures, a bucket.

    The kernels do not compute the divergence of a sparse signal, and the tail "bucket" needs the most of them.
    """
    full = make_full(tokens, V, dtype=dtype)
    return [
        CrossEntropy(make_labels(tokens, V), 0.3, label_smoothing=0.1, z_loss=1e-2),
        Distill(full, parse_divergence("forward_kl"), 0.7, 1.5),
        Distill(full, parse_divergence("jsd(0.3)"), 0.5),
        Distill(make_mixture(tokens, V, dtype=dtype), parse_divergence("total_variation"), 0.7),
        Distill(make_signal("bucket", tokens, V, dtype=dtype), reverse_kl(), 0.4),
        Entropy(-0.05, 1.5),
    ]


PLANS: dict[str, Callable[..., list[Term]]] = {"plain": plain_terms, "full": full_terms}


def assert_close(actual: Result, expected: Result) -> None:
    """Assert that two results differ by at most a few units in the last place of float32."""
    assert_near(actual.gradients, expected.gradients, 4 * torch.finfo(torch.float32).eps)
    # a small divergence is a difference of large sums
    torch.testing.assert_close(actual.output.metrics, expected.output.metrics, rtol=1e-5, atol=1e-6)


pytestmark = pytest.mark.filterwarnings("error:.*torch.compile:UserWarning")
EVERY_PLAN = first_is_quick(PLANS)


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


def assert_accurate_compiled(leaves: Leaves, terms: list[Term], **options: Any) -> None:
    assert_accurate(leaves, terms, chunk_tokens=None, tiny=1e-6, **options)


SLOW_HEADS = [slow("full", "plain"), slow("plain", "scaled"), slow("plain", "capped"), slow("full", "both")]


@pytest.mark.parametrize(("plan", "head"), [("plain", "plain"), *SLOW_HEADS])
def test_plans_against_float64(plan: str, head: str, ran_compiled: list[str]) -> None:
    assert_accurate_compiled(leaves_of(), PLANS[plan](), head=HEADS[head], normalizer=29.0)
    sweeps = {"raw_sums", "gradient"} if plan == "plain" else {"raw_sums", "log_mean", "normalized_sums", "gradient"}
    assert set(ran_compiled) == sweeps


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
@pytest.mark.parametrize("start", range(4))
def test_every_divergence_against_float64(start: int, sharpness: float) -> None:
    """In four sums, because each sum compiles. The scales give all terms of a sum gradients of the same norm."""
    leaves, teacher = leaves_of(sharpness=sharpness), make_full(T, V, dtype=torch.float32, sharpness=sharpness)
    terms = [Distill(teacher, parse_divergence(expression)) for expression in ALL_DIVERGENCES[start::4]]
    norms = [float(exact(leaves, [term]).gradients["weight"].norm()) for term in terms]
    assert_accurate_compiled(leaves, [replace(term, scale=1 / norm) for term, norm in zip(terms, norms, strict=True)])


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_compiled_results_equal_uncompiled_ones(
    plan: str, ran_compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled if it is turned off (TORCH_COMPILE_DISABLE), for a small vocabulary, or under a dispatch
    mode, which counts operations or memory.
    """
    fast = run(linear_objective, leaves_of(), PLANS[plan]())
    ran_compiled.clear()
    with torch._dynamo.config.patch(disable=True):
        results = [run(linear_objective, leaves_of(), PLANS[plan]())]
    with FlopCounterMode(display=False):
        results.append(run(linear_objective, leaves_of(), PLANS[plan]()))
    monkeypatch.setattr(compiled, "COMPILED_FROM", 1 << 60)
    results.append(run(linear_objective, leaves_of(), PLANS[plan]()))
    for result in results:
        assert_close(fast, result)
    assert not ran_compiled


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_few_rows_and_none(plan: str, ran_compiled: list[str]) -> None:
    """torch treats a size of 1 as a constant, so one row is not compiled."""
    for tokens in (0, T):
        fast = run(linear_objective, leaves_of(tokens), PLANS[plan](tokens), weights_T=torch.zeros(tokens))
        assert fast.output.loss == 0
        assert all((gradient == 0).all() for gradient in fast.gradients.values())
    for tokens in (1, 2):
        ran_compiled.clear()
        assert_accurate_compiled(leaves_of(tokens), PLANS[plan](tokens))
        assert bool(ran_compiled) == (tokens > 1)


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
    return {"hidden": logits_TV.grad @ weight, "weight": logits_TV.grad.T @ hidden}


@pytest.mark.slow
@pytest.mark.parametrize("rounds_operands", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_student_close_to_its_teacher(
    dtype: torch.dtype, rounds_operands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient's error is at most 0.5 %; rounding the logits to half precision would cost ten times as much.

    A GPU rounds operands to bfloat16 before its products. The range of float16 is too small for gradients.
    """
    if rounds_operands and dtype == torch.bfloat16:
        monkeypatch.setattr(
            HeadLogits, "rounded_buffer", lambda head, rows: torch.empty(rows, head.columns).bfloat16()
        )
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
        assert all(torch.equal(gradients[name] * normalizer, gradient) for name, gradient in plain.items())


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_compiles_once_for_a_plan(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other row counts, blocks, chunks, weights, or equal objects do not compile again."""
    terms = PLANS[plan]
    run(linear_objective, leaves_of(), terms())
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (2, 5, 41, 300):
            run(linear_objective, leaves_of(tokens), terms(tokens))
        run(linear_objective, leaves_of(), terms(), chunk_tokens=12)  # the last chunk has one row
        run(linear_objective, leaves_of(), terms(), weights_T=torch.rand(T, generator=generator(0)), normalizer=3.0)
        run(linear_objective, leaves_of(), terms(), valid_index=torch.tensor([7, 3, 30]))
        monkeypatch.setattr(sweeps, "BLOCK_BYTES", 5 * V * 4)
        run(linear_objective, leaves_of(), terms())
    assert counters["stats"]["unique_graphs"] == before


@pytest.fixture
def captured_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch.compile without its compiler: torch counts the same graphs in a tenth of the time."""
    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, *, options, **rest: original(function, backend="eager", **rest)
    )
    monkeypatch.setattr(compiled, "_compiled", cache(compiled._compiled.__wrapped__))
    monkeypatch.setattr(compiled, "_without_compiler", set())


@pytest.mark.usefixtures("captured_only")
def test_the_first_row_count_is_no_constant() -> None:
    run(linear_objective, leaves_of(), plain_terms())
    before = counters["stats"]["unique_graphs"]
    run(linear_objective, leaves_of(41), plain_terms(41))
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.slow
@pytest.mark.usefixtures("captured_only")
def test_more_plans_than_torch_compiles_of_one_function() -> None:
    """Numbers that differ between plans stay constants, although torch turns a number into a variable if it differs
    between calls of the same function.
    """
    before = counters["stats"]["unique_graphs"]
    plans: list[list[Term]] = [[Entropy(1.0, 1.0 + number / 8)] for number in range(3)]
    plans += [[Distill(make_full(T, V, dtype=torch.float32), jsd(beta))] for beta in (0.3, 0.4)]
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for terms in plans:
            run(linear_objective, leaves_of(), terms)
        run(linear_objective, make_leaves(T, V + 2, dtype=torch.float32), plans[0])
    # an entropy has two sweeps, a jsd three
    assert counters["stats"]["unique_graphs"] - before == 3 * 2 + 2 * 3 + 2
    assert not compiled._without_compiler


@pytest.mark.filterwarnings("ignore")  # torch warns about the parts that it does not compile
def test_a_caller_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = leaves_of()
    expected = run(linear_objective, leaves, plain_terms())

    def loss(hidden_TD: Tensor) -> Tensor:
        return linear_objective(2 * hidden_TD, OutputHead(leaves.weight, leaves.bias), plain_terms()).loss

    hidden_TD = (leaves.hidden / 2).requires_grad_()
    torch.compile(loss, backend="eager")(hidden_TD).backward()
    assert distance(hidden_TD.grad / 2, expected.gradients["hidden"]) <= 1e-6


def save_gradients(folder: str) -> None:
    """Run two passes. A test runs this function in a separate process."""
    torch.save([run(linear_objective, leaves_of(), plain_terms()).gradients for _ in range(2)], Path(folder, "g.pt"))


@pytest.mark.slow
def test_without_a_compiler(tmp_path: Path) -> None:
    """There is one warning, and the results are the same."""
    here = Path(__file__).parent
    paths = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{here}:{here.parent}:{here.parents[1]}"}
    code = f"import test_objective_compiled as here; here.save_gradients({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | paths | {"CXX": "/nonexistent/c++"},
        cwd=here.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning: ") == done.stderr.count("on cpu") == 1, done.stderr
    first, second = torch.load(tmp_path / "g.pt")
    assert_near(first, run(linear_objective, leaves_of(), plain_terms()).gradients, 1e-6)
    assert_equal_tensors(first, second)


def flops(**options: Any) -> int:
    leaves = leaves_of(100)
    # FlopCounterMode does not count addmm_ by default
    known = {torch.ops.aten.addmm_: lambda _, left, right, **rest: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        run(linear_objective, leaves, plain_terms(100), **options)
    return counter.get_total_flops()


@pytest.mark.parametrize("chunk_tokens", [None, 17])
def test_masked_tokens_cost_no_products(chunk_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED_FROM", 1 << 60)  # kernels contain no products
    valid_index = torch.randperm(100, generator=generator(0))[:30]
    weights_T = torch.zeros(100).index_fill(0, valid_index, 1.0)
    everything = flops(chunk_tokens=chunk_tokens)
    assert everything == 2 * 100 * V * (3 * 16 + 24)  # student: logits and two gradients; teacher: logits
    assert flops(weights_T=weights_T, chunk_tokens=chunk_tokens) <= 0.31 * everything
    assert flops(valid_index=valid_index, chunk_tokens=chunk_tokens) <= 0.31 * everything


def allocations(work: Callable[[], object]) -> list[int]:
    """Return the bytes allocated (> 0) and freed (< 0) on the CPU, in order; allocations in kernels are included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@pytest.mark.parametrize(("plan", "tiles"), [("plain", 3), slow("full", 7)])
def test_a_pass_holds_a_few_tiles(plan: str, tiles: int) -> None:
    """2,048 tokens in chunks of 128 need one tile for each model, but neither all logits nor log-probabilities.

    In the full plan, a mixture of three teachers needs one tile for all of them, and one more for their logits; the
    kernels need some for intermediate results.
    """
    tokens, width, rows = 2048, 32, 128
    leaves = make_leaves(tokens, V, width, dtype=torch.float32, bias=False)
    hidden, weight, terms = leaves.hidden.requires_grad_(), leaves.weight.requires_grad_(), PLANS[plan](tokens)

    def work() -> None:
        linear_objective(hidden, OutputHead(weight), terms, chunk_tokens=rows).loss.backward()

    work()  # the first call compiles
    taken = allocations(work)
    tile_bytes, weight_bytes = rows * V * 4, V * width * 4
    assert max(taken) <= max(tile_bytes, weight_bytes)
    gradients = 2 * (weight_bytes + tokens * width * 4)
    assert max(accumulate(taken)) <= gradients + tiles * tile_bytes
