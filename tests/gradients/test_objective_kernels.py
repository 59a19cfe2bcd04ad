"""The Triton kernels of the objective on a CPU, in Triton's interpreter, and compiled for a GPU that is not here.

`kernels._difference` is the proof that a run on a GPU makes; the tests show that it passes for every plan that has
kernels, and that it fails for kernels that are slightly wrong.

T tokens, V vocabulary.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from kit.objective_cases import assert_accurate, generator, make_full, make_leaves, make_mixture, run
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    Divergence,
    Entropy,
    Term,
    TopK,
    forward_kl,
    jsd,
    linear_objective,
    reverse_kl,
    total_variation,
    use_kernels,
)
from stillhouse.objective.tile import kernels
from stillhouse.objective.tile.kernels import SUMS, has_kernels
from stillhouse.objective.tile.logits_provider import HeadLogits
from stillhouse.objective.tile.pointwise import raw_sums
from stillhouse.objective.tile.statistics import merged, statistics
from stillhouse.objective.tile.tile_plan import PointwisePlan

#: the logarithm of a Jensen–Shannon divergence's sums alone has 25
MOST_INSTRUCTIONS = {
    "raw_sums of forward_kl": 60,
    "raw_sums of jsd(0.5)": 60,
    "normalized_sums of jsd(0.5)": 95,
    "gradient of forward_kl": 40,
    "gradient of jsd(0.5)": 66,
}
CPU = torch.device("cpu")
PIECE = SUMS[0]


def plan_of(*divergences: Divergence, temperature: float = 1.0, **others: Any) -> PointwisePlan:
    pairs = tuple((divergence, 0, 0) for divergence in divergences)
    teachers = ((1, temperature),)
    return PointwisePlan(tiles=2, temperatures=(temperature,), teachers=teachers, pairs=pairs, **others)


EVERYTHING = {"uniform": True, "entropic": (0,), "softcap": 30.0, "scale": 0.5}
PLANS = {
    "forward_kl": plan_of(forward_kl()),
    "reverse_kl": plan_of(reverse_kl(), temperature=1.5),
    "jsd": plan_of(jsd(0.3)),
    "jsd, normalized": plan_of(jsd(0.9, normalized=True), temperature=0.7),
    "everything": plan_of(jsd(0.5), reverse_kl(), forward_kl(), **EVERYTHING),
    "a teacher's entropy": plan_of(),
    "no teacher": PointwisePlan(temperatures=(1.0,), **EVERYTHING),
}
WITHOUT_KERNELS = {
    "two temperatures": PointwisePlan(temperatures=(1.0, 2.0)),
    "another divergence": plan_of(total_variation()),
    "two of a kind": plan_of(jsd(0.5), jsd(0.4)),
    "nearly one-sided": plan_of(jsd(0.01)),
    "two teachers": PointwisePlan(tiles=3, temperatures=(1.0,), teachers=((1, 1.0), (2, 1.0))),
    "tokens outside ids": PointwisePlan(temperatures=(1.0,), buckets=(0,)),
}


@pytest.fixture(autouse=True)
def _of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run on CPU tensors, in the interpreter that `conftest.py` turns on."""
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    kernels._refusal.cache_clear()
    kernels._warn.cache_clear()


@pytest.mark.parametrize("columns", [2 * PIECE + 3, PIECE, 41])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_kernels_are_as_exact_as_the_plain_functions(plan: PointwisePlan, columns: int) -> None:
    assert not kernels._difference(plan, columns, CPU)
    assert has_kernels(plan, kernels.hard_tiles(plan.tiles, columns, CPU))


def test_other_plans_float64_and_empty_tiles_have_no_kernels() -> None:
    for name, plan in WITHOUT_KERNELS.items():
        assert not has_kernels(plan, [torch.zeros(2, 41)] * plan.tiles), name
    for tile_CV in (torch.zeros(2, 41, dtype=torch.float64), torch.zeros(0, 41), torch.zeros(2, 0)):
        assert not has_kernels(PLANS["no teacher"], [tile_CV])


@pytest.mark.parametrize("tile", [0, 1])
def test_a_logit_that_is_not_a_number_is_seen(tile: int) -> None:
    """In its row only: the divergence and the gradient are NaN."""
    plan = plan_of(jsd(0.3), forward_kl())
    tiles_CV = kernels.hard_tiles(2, PIECE + 5, CPU)
    tiles_CV[tile][3, PIECE + 1] = torch.nan
    known = statistics(plan, kernels.kernel_raw_sums(plan, tiles_CV)[None])
    normalized_CX = kernels.kernel_normalized_sums(plan, tiles_CV, known.normalizers_CX)
    numbers_CX = torch.ones(len(normalized_CX), len(plan.coefficients))
    kernels.kernel_gradient(plan, tiles_CV, torch.cat([known.normalizers_CX, numbers_CX], 1))
    for numbers_CX in (known.values[1][:, None], normalized_CX, tiles_CV[0]):
        assert numbers_CX[3].isnan().any()
        assert not numbers_CX[[0, 4, 5, 6]].isnan().any()


@pytest.mark.parametrize("factor", [1.001, torch.nan])
@pytest.mark.parametrize("name", ["kernel_piece_sums", "kernel_normalized_sums", "kernel_gradient"])
def test_a_wrong_kernel_is_refused(name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is 0.1 % or NaN, in the rows in which student and teacher are close."""
    kernel = getattr(kernels, name)

    def wrong(plan: PointwisePlan, tiles_BV: list[Tensor], *rest: Tensor) -> Any:
        result = kernel(plan, tiles_BV, *rest)
        numbers = tiles_BV[0] if result is None else result
        rows = numbers.transpose(0, 1) if numbers.dim() == 3 else numbers
        rows[3:6] *= factor
        return result

    monkeypatch.setattr(kernels, name, wrong)
    plan, tiles_CV = plan_of(jsd(0.3), forward_kl()), [torch.zeros(2, PIECE + 5)] * 2
    with pytest.warns(UserWarning, match="Triton kernels are not used, torch.compile"):
        assert not has_kernels(plan, tiles_CV)
    use_kernels("triton")
    try:
        with pytest.raises(ValueError, match=r"triton: .* of the kernels differs? from .*: expected auto"):
            has_kernels(plan, tiles_CV)
    finally:
        use_kernels("auto")


def test_the_kernels_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    use_kernels("auto", lines.append)
    try:
        for _ in range(2):
            has_kernels(PLANS["a teacher's entropy"], [torch.zeros(2, 41)] * 2)
            has_kernels(WITHOUT_KERNELS["two of a kind"], [torch.zeros(2, 41)] * 2)
        assert lines == [
            "kernels of the objective for softmaxes: Triton, proven against float64",
            "kernels of the objective for jsd(0.5) + jsd(0.4): torch.compile",
        ]
        monkeypatch.setattr(kernels, "_refusal", lambda *_: "a reason")
        with pytest.warns(UserWarning, match="a reason"):
            has_kernels(PLANS["jsd"], [torch.zeros(2, 41)] * 2)
        use_kernels("compiled", lines.append)
        assert not has_kernels(PLANS["jsd"], [torch.zeros(2, 41)] * 2)
        assert lines[2:] == [
            "kernels of the objective for jsd(0.3): torch.compile (a reason)",
            "kernels of the objective for jsd(0.3): torch.compile (objective.kernels=compiled)",
        ]
    finally:
        use_kernels("auto")


def test_sums_of_pieces_are_merged_exactly() -> None:
    """In float64, merged sums of uneven pieces give the statistics of whole rows."""
    for divergence in (forward_kl(), reverse_kl(), jsd(0.3)):
        plan = plan_of(divergence, uniform=True)
        tiles_CV = [tile_CV.double() for tile_CV in kernels.hard_tiles(2, 300, CPU)]
        borders = [0, 1, 140, 150, 300]
        pieces = [[tile_CV[:, a:b] for tile_CV in tiles_CV] for a, b in pairwise(borders)]
        merged_CX = merged(plan, torch.stack([raw_sums(plan, piece) for piece in pieces]))
        of_pieces, of_rows = (statistics(plan, sums_CX[None]) for sums_CX in (merged_CX, raw_sums(plan, tiles_CV)))
        pair = kernels._numbers(of_pieces), kernels._numbers(of_rows)
        assert torch.allclose(*pair, rtol=1e-9, atol=1e-15, equal_nan=True)


T, V = 23, PIECE + 37
LABELS = torch.arange(T) * 31 % V


def sparse_terms() -> list[Term]:
    """Terms whose ids repeat: a label is also one of the teacher's ids, and an id occurs twice in a row."""
    labels_T = LABELS.masked_fill(torch.arange(T) % 5 == 0, -100)
    ids_TK = torch.randn(T, V, generator=generator(6)).topk(8, 1).indices
    ids_TK[:, 0] = labels_T
    ids_TK[::3, 2] = -1
    log_p_TK = torch.log_softmax(torch.randn(T, 9, generator=generator(7)), 1)[:, :8]
    return [
        CrossEntropy(labels_T, 0.3, 0.1, 1e-2),
        CrossEntropy(labels_T, 0.2),
        Distill(make_mixture(T, V, temperature=1.5, weights=(2, 1), dtype=torch.float32), jsd(0.3), 0.7, 1.5),
        Distill(TopK(ids_TK, log_p_TK), reverse_kl(), 0.4),
        Entropy(-0.05),
    ]


def dense_terms() -> list[Term]:
    """Terms that have kernels."""
    teacher = make_full(T, V, dtype=torch.float32)
    return [
        CrossEntropy(LABELS, 0.3, 0.1, 1e-2),
        Distill(teacher, 0.5 * forward_kl() + jsd(0.3), 0.7),
        Entropy(-0.05),
    ]


LEAVES = make_leaves(T, V, dtype=torch.float32, bias=False)
OPTIONS: dict[str, Any] = {"head": {"softcap": 20.0}, "normalizer": T, "chunk_tokens": 9}
OPTIONS["weights_T"] = torch.ones(T).index_fill(0, torch.tensor([4]), 0.0)


def test_a_pass_with_kernels_is_as_exact_as_plain_autograd() -> None:
    assert_accurate(LEAVES, dense_terms(), tiny=1e-7, **OPTIONS)
    calls = kernels._refusal.cache_info()
    assert calls.hits + calls.misses == 3 * 3  # three calls in each of three chunks


@pytest.mark.parametrize("terms", [sparse_terms, dense_terms])
def test_a_rounded_gradient_is_the_gradient_rounded_once(terms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[torch.dtype, list[Tensor]] = {torch.float32: [], torch.float16: []}
    pull_back = HeadLogits.pull_back

    def recorded(provider: HeadLogits, rows: Any, counted_C: Tensor, grad_CV: Tensor) -> None:
        received[grad_CV.dtype].append(grad_CV.clone())
        pull_back(provider, rows, counted_C, grad_CV)

    monkeypatch.setattr(HeadLogits, "pull_back", recorded)
    run(linear_objective, LEAVES, terms(), **OPTIONS)
    # float16, because Triton's interpreter rounds to bfloat16 by truncation
    monkeypatch.setattr(HeadLogits, "rounded_buffer", lambda _, rows: torch.full((rows, V), torch.nan).half())
    run(linear_objective, LEAVES, terms(), **OPTIONS)
    for exact_CV, rounded_CV in zip(received[torch.float32], received[torch.float16], strict=True):
        assert torch.equal(exact_CV.half(), rounded_CV)


def test_the_compiled_kernels_have_few_instructions() -> None:
    """For an H100: more than 60 instructions per element take longer than reading the element from memory."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "benchmarks.kernel_instructions"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    for name, most in MOST_INSTRUCTIONS.items():
        assert counted[name]["per element"] <= most, counted
        assert counted[name]["stack"] == 0, counted  # no registers are spilled to memory
