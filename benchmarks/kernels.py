"""Measures the parts of the objective on a GPU one by one: the Triton kernels, the compiled code, and the products.

    python -m benchmarks.kernels --device cuda

For each sweep over a tile of logits: the time, and the bandwidth for the bytes that the sweep must read and write,
beside the bandwidth of a copy on the same device. For each matrix product: its rate with the whole vocabulary, and
with a vocabulary that is not a multiple of 8, once as one product and once as the objective computes it.
Writes benchmarks/results/kernels-<date>.json.

C rows of a tile, V vocabulary, D student width, E teacher width.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import result_file, write_result
from stillhouse.objective import Divergence, OutputHead, forward_kl, jsd
from stillhouse.objective.head import Projection
from stillhouse.objective.tile.compiled import pointwise
from stillhouse.objective.tile.kernels import (
    has_kernels,
    kernel_gradient,
    kernel_normalized_sums,
    kernel_raw_sums,
)
from stillhouse.objective.tile.logits_provider import work_tile
from stillhouse.objective.tile.pointwise import gradient, normalized_sums, raw_sums
from stillhouse.objective.tile.tile_plan import PointwisePlan

REPEATS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=1768)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--teacher-width", type=int, default=4096)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    copied = torch.empty(max(arguments.rows * arguments.vocabulary, 1), device=device)
    copy_rate = 8 * copied.numel() / seconds(copied.clone, device)
    print(f"copy: {copy_rate / 1e9:.0f} GB/s")
    sweeps = [entry for divergence in (forward_kl(), jsd(0.5)) for entry in measure_sweeps(divergence, arguments)]
    products = [entry for missing in (0, 3) for entry in measure_products(arguments, missing)]
    for entry in sweeps:
        entry["share of a copy"] = entry["bytes per second"] / copy_rate
    for entry in (*sweeps, *products):
        print(
            "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else value for name, value in entry.items())
        )
    result = {"sizes": vars(arguments), "copy, bytes per second": copy_rate, "sweeps": sweeps, "products": products}
    write_result(result_file("kernels"), result, arguments.device)


def measure_sweeps(divergence: Divergence, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each sweep of a divergence with one dense teacher, with the compiled code and with the kernels."""
    device, shape = torch.device(arguments.device), (arguments.rows, arguments.vocabulary)
    pairs = ((divergence, 0, 0),)
    plan = PointwisePlan(tiles=2, temperatures=(1.0,), teachers=((1, 1.0),), pairs=pairs)
    tiles_CV = [work_tile(*shape, torch.float32, device).normal_() for _ in range(2)]
    operand_CV = work_tile(*shape, torch.bfloat16, device)
    normalizers_CX = torch.rand(arguments.rows, len(plan.normalizers), device=device)
    rows_CX = torch.rand(arguments.rows, len(plan.normalizers) + len(plan.coefficients), device=device)
    sweeps: list[tuple[str, int, Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = [
        ("sums", 8, raw_sums, kernel_raw_sums, ()),
        ("normalized sums", 8, normalized_sums, kernel_normalized_sums, (normalizers_CX,)),
        ("gradient", 10, gradient, kernel_gradient, (rows_CX, operand_CV)),
    ]
    entries = []
    for name, moved, plain, kernel, rest in sweeps:
        if plain is normalized_sums and not plan.two_sweep:
            continue
        ways = {"compiled": lambda: pointwise(plain, plan, tiles_CV, *rest)}  # noqa: B023
        if has_kernels(plan, tiles_CV):
            ways["kernel"] = lambda: kernel(plan, tiles_CV, *rest)  # noqa: B023
        for way, call in ways.items():
            taken = seconds(call, device)
            rate = moved * arguments.rows * arguments.vocabulary / taken
            entries.append({"sweep": f"{name} of {divergence}, {way}", "seconds": taken, "bytes per second": rate})
    return entries


def measure_products(arguments: argparse.Namespace, missing: int) -> list[dict[str, Any]]:
    """Measure the four products of a chunk. missing: the vocabulary has so many rows fewer."""
    device, rows, vocabulary = torch.device(arguments.device), arguments.rows, arguments.vocabulary - missing
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits_CV = work_tile(rows, vocabulary, torch.float32, device)
    operand_CV = work_tile(rows, vocabulary, dtype, device).normal_()
    entries = []
    for side, width in (("student", arguments.width), ("teacher", arguments.teacher_width)):
        weight_VD = torch.randn(vocabulary, width, device=device, dtype=dtype)
        hidden_CD = torch.randn(rows, width, device=device, dtype=dtype)
        total_VD = torch.zeros(vocabulary, width, device=device)
        projection = Projection(OutputHead(weight_VD), vocabulary, dtype)
        calls: dict[str, Callable[[], Any]] = {
            f"logits of the {side}": lambda: projection.logits(hidden_CD, logits_CV),  # noqa: B023
            f"logits of the {side}, as one product": lambda: product(hidden_CD, weight_VD, logits_CV),  # noqa: B023
        }
        if side == "student":
            calls["gradient of hidden states"] = lambda: projection.hidden_grad(operand_CV)  # noqa: B023
            calls["gradient of the weight"] = lambda: projection.add_weight_grad(total_VD, operand_CV, hidden_CD)  # noqa: B023
        for name, call in calls.items():
            taken = seconds(call, device)
            rate = 2 * rows * vocabulary * width / taken
            entries.append({"product": f"{name}, V={vocabulary}", "seconds": taken, "operations per second": rate})
    return entries


def product(hidden_CD: Tensor, weight_VD: Tensor, out_CV: Tensor) -> None:
    if hidden_CD.dtype == out_CV.dtype:
        torch.mm(hidden_CD, weight_VD.t(), out=out_CV)
    else:
        torch.mm(hidden_CD, weight_VD.t(), out_dtype=out_CV.dtype, out=out_CV)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of a call, after two calls that are not counted."""
    for _ in range(2):
        call()
    times = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            call()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
