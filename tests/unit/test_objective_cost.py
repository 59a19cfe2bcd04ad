"""The cost of a pass of the objective: matrix products of masked tokens, and memory inside and outside kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.compiled_cases import PLANS, V, assert_close, full_terms, leaves_of, mixture_terms, plain_terms
from kit.objective_cases import (
    generator,
    make_leaves,
    run,
)
from torch.utils.flop_counter import FlopCounterMode

from stillhouse.objective import (
    OutputHead,
    linear_objective,
)
from stillhouse.objective.tile import compiled

pytestmark = pytest.mark.filterwarnings("error:.*torch.compile:UserWarning")


def flops(**options: Any) -> int:
    leaves = leaves_of(100)
    # FlopCounterMode does not count addmm_ by default
    known = {torch.ops.aten.addmm_: lambda _, left, right, **rest: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        run(linear_objective, leaves, plain_terms(100), **options)
    return counter.get_total_flops()


def test_results_are_the_same_under_a_dispatch_mode() -> None:
    """Under a dispatch mode, which counts operations or memory, torch compiles nothing; the results are the same."""
    expected = run(linear_objective, leaves_of(), full_terms())
    with FlopCounterMode(display=False):
        actual = run(linear_objective, leaves_of(), full_terms())
    assert_close(actual, expected)


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
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    return [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]


def peak(bytes_taken: list[int]) -> int:
    total = highest = 0
    for each in bytes_taken:
        total += each
        highest = max(highest, total)
    return highest


@pytest.mark.parametrize(("plan", "tiles"), [*((each, 3) for each in PLANS), ("mixture", 4)])
def test_a_pass_holds_a_few_tiles(plan: str, tiles: int) -> None:
    """2,048 tokens in chunks of 128 need one tile for each model, but neither all logits nor log-probabilities.

    A mixture of three teachers needs one tile for all of them, and one more for their logits.
    """
    tokens, width, rows = 2048, 32, 128
    leaves = make_leaves(tokens, V, width, dtype=torch.float32, bias=False)
    terms = mixture_terms(tokens) if plan == "mixture" else PLANS[plan](tokens)
    leaf = [each.requires_grad_() for each in (leaves.hidden, leaves.weight)]

    def work() -> None:
        linear_objective(leaf[0], OutputHead(leaf[1]), terms, chunk_tokens=rows).loss.backward()

    work()  # the first call compiles
    taken = allocations(work)
    tile_bytes, weight_bytes = rows * V * 4, V * width * 4
    assert max(taken) <= max(tile_bytes, weight_bytes)
    gradients = 2 * (weight_bytes + tokens * width * 4)
    assert peak(taken) <= gradients + tiles * tile_bytes
