"""The objective's kernels on fake tensors: one operation for each launch, with the tensors that it reads and writes.

Here the fake tensors are on the CPU, because a CUDA device needs more than torch offers without CUDA.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stillhouse.dry_run import dry_run
from stillhouse.objective import (
    Distill,
    Divergence,
    FullVocab,
    OutputHead,
    forward_kl,
    jsd,
    linear_objective,
    total_variation,
)
from stillhouse.objective.tile import kernels
from stillhouse.objective.tile.kernels import SUMS
from stillhouse.objective.tile.statistics import statistics
from stillhouse.objective.tile.tile_plan import PointwisePlan
from stillhouse.plan.fake_cuda import ANSWERS, call_as_one_kernel, fake_kernel

T, V, D, E = 20, 5 * SUMS[0] + 8, 16, 24
TILE = T * V * 4
PIECES = 6


class Launches(TorchDispatchMode):
    """Records each launch: the kernel's name, and the bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.stillhouse.kernel.default:
            name, read, written = args
            self.kernels.append((name, *(sum(tensor.nbytes for tensor in tensors) for tensors in (read, written))))
        return func(*args, **(kwargs or {}))


def launches(divergence: Divergence) -> list[tuple[str, int, int]]:
    """Record a pass of one chunk on fake tensors."""
    with dry_run(ANSWERS), FakeTensorMode(), Launches() as recorded:
        teacher = FullVocab(torch.empty(T, E), OutputHead(torch.empty(V, E)))
        hidden_TD, weight_VD = torch.empty(T, D, requires_grad=True), torch.empty(V, D, requires_grad=True)
        output = linear_objective(hidden_TD, OutputHead(weight_VD), [Distill(teacher, divergence)])
        output.loss.backward()  # type: ignore[no-untyped-call]
        assert hidden_TD.grad is not None
        assert hidden_TD.grad.shape == hidden_TD.shape
        assert output.per_token[str(divergence)].shape == (T,)
    return recorded.kernels


@pytest.mark.parametrize(
    ("divergence", "sums", "sweeps"),
    [(forward_kl(), 12, []), (jsd(0.5), 10, [("normalized_sums_kernel", 2 * TILE + T * 5 * 4, PIECES * T * 2 * 4)])],
    ids=str,
)
def test_a_triton_kernel_is_one_launch(
    divergence: Divergence, sums: int, sweeps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no proof: it would compare numbers, and a fake tensor has none."""
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    monkeypatch.setattr(kernels, "_refusal", None)
    assert launches(divergence) == [
        ("raw_sums_kernel", 2 * TILE, PIECES * T * sums * 4),
        *sweeps,
        # the gradient overwrites the student's tile and reads five normalizers and three coefficients per row
        ("gradient_kernel", TILE + T * 8 * 4, TILE),
    ]


def test_a_compiled_function_is_one_launch() -> None:
    # two softmaxes with two sums each, two references, two numbers of largest logits, two other numbers
    assert launches(total_variation()) == [
        ("raw_sums", 2 * TILE, T * 10 * 4),
        ("normalized_sums", 2 * TILE + T * 5 * 4, T * 2 * 4),
        ("gradient", TILE + T * 8 * 4, TILE),
    ]


def test_the_statistics_are_one_launch() -> None:
    """It allocates every number per row that the function returns."""
    pairs = ((forward_kl(), 0, 0),)
    plan = PointwisePlan(tiles=2, temperatures=(1.0,), teachers=((1, 1.0),), pairs=pairs)
    real = statistics(plan, torch.zeros(1, T, len(plan.raw_sums)))
    with dry_run(ANSWERS), FakeTensorMode(), Launches() as recorded:
        known = call_as_one_kernel(statistics, plan, torch.empty(1, T, len(plan.raw_sums)), [])
    assert known.values[0].shape == real.values[0].shape == (T,)
    assert known.values[0].device.type == "cpu"
    assert len(known.references) == len(real.references) == 2
    # five normalizers, references, log masses, entropies, both_top, mass_ratio, value and slope
    assert recorded.kernels == [("statistics", T * len(plan.raw_sums) * 4, T * 15 * 4)]


def test_real_tensors_are_refused() -> None:
    tensor = Tensor([1.0])
    with pytest.raises(NotImplementedError, match="the kernel sums on real tensors: expected fake tensors"):
        fake_kernel("sums", [tensor], [tensor])
