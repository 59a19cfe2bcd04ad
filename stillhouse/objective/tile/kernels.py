"""Calls the Triton kernels for each `PointwisePlan` that they support, after a test of their precision, the proof.

The kernels compute the same numbers as the plain functions of `pointwise.py`, which all other plans use. Before the
first tile of a plan, the proof computes rows with difficult numbers by the kernels, by the plain functions and in
float64. If the kernels' error is much larger than that of the plain functions, the plan uses the plain functions, and
a warning is given.

B or C rows, V vocabulary on this rank, P pieces of a row, X statistics of a row, in the plan's order.
"""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from stillhouse.dry_run import replaceable
from stillhouse.objective.divergences import ForwardKL, JensenShannon, ReverseKL
from stillhouse.objective.numerics import SERIES_TERMS, log_one_plus_series
from stillhouse.objective.tile.compiled import run_rows
from stillhouse.objective.tile.pointwise import gradient, normalized_sums, raw_sums
from stillhouse.objective.tile.statistics import RowStatistics, merged, statistics
from stillhouse.objective.tile.tile_plan import PointwisePlan

Kernels = Literal["auto", "compiled", "triton"]

#: the types of devices that have the kernels
DEVICES = {"cuda"}
#: (columns of a piece, warps of a program) of the kernels of sums and of the gradient kernel
SUMS, GRADIENT = (1024, 1), (2048, 4)
#: CUDA's limit for the second dimension of a grid, which is the number of a tile's rows
MOST_ROWS = 65_535
#: the range of a Jensen–Shannon divergence's beta in which `numerics.interpolation_logs` uses a series
SERIES_BETA = (0.05, 0.95)
#: the errors that the proof allows: a multiple of the plain functions' error, and a relative and an absolute error
TIMES, ROUNDING, SMALLEST = 4.0, 3e-5, 1e-14

_choice: Kernels = "auto"
_report: Callable[[str], object] | None = None
_reported: set[str] = set()


def use_kernels(choice: Kernels, report: Callable[[str], object] | None = None) -> None:
    """Choose the kernels of all later passes of this process on a GPU.

    auto: Triton kernels for the plans that they support, if they pass their proof. compiled: `torch.compile` alone.
    triton: like auto, but a pass raises ValueError if Triton is missing or a proof fails.
    report: a function that is called once with each line about the kernels that a plan uses.
    """
    global _choice, _report
    if choice not in get_args(Kernels):
        raise ValueError(f"kernels {choice!r}: expected auto, compiled or triton")
    _choice, _report = choice, report
    _reported.clear()


def has_kernels(plan: PointwisePlan, tiles_CV: Sequence[Tensor]) -> bool:
    """Return True if the Triton kernels compute this plan on these tiles. For the ValueError, see `use_kernels`."""
    student_CV = tiles_CV[0]
    is_fitting = student_CV.dtype == torch.float32 and 0 < len(student_CV) <= MOST_ROWS and student_CV.shape[1] > 0
    if student_CV.device.type not in DEVICES or not is_fitting:
        return False
    if _choice == "compiled" or not _is_supported(plan):
        _say(plan, "torch.compile (objective.kernels=compiled)" if _choice == "compiled" else "torch.compile")
        return False
    return are_proven(plan, student_CV.shape[1], student_CV.device)


@replaceable
def are_proven(plan: PointwisePlan, columns: int, device: torch.device) -> bool:
    """Return True if the Triton kernels of a plan pass their proof. For the ValueError, see `use_kernels`."""
    reason = _refusal(plan, columns, device)
    if reason and _choice == "triton":
        raise ValueError(f"objective.kernels=triton: {reason}: expected auto or compiled")
    if reason:
        _warn(reason)
    _say(plan, f"torch.compile ({reason})" if reason else "Triton, proven against float64")
    return not reason


def _say(plan: PointwisePlan, kernels: str) -> None:
    divergences = " + ".join(str(divergence) for divergence, _, _ in plan.pairs)
    line = f"kernels of the objective for {divergences or 'softmaxes'}: {kernels}"
    if _report is not None and line not in _reported:
        _reported.add(line)
        _report(line)


def _is_supported(plan: PointwisePlan) -> bool:
    """Return True for one temperature, ≤ 1 dense teacher, and ≤ 1 divergence of each kind that has a kernel."""
    temperatures = {*plan.temperatures, *(temperature for _, temperature in plan.teachers)}
    kinds = {type(divergence) for divergence, _, _ in plan.pairs}
    has_one_teacher = plan.tiles <= 2 and len(plan.teachers) == plan.tiles - 1 and not plan.buckets
    betas = [divergence.beta for divergence, _, _ in plan.pairs if isinstance(divergence, JensenShannon)]
    return (
        has_one_teacher
        and len(temperatures) == 1
        and len(kinds) == len(plan.pairs)
        and kinds <= {ForwardKL, ReverseKL, JensenShannon}
        and all(SERIES_BETA[0] <= beta <= SERIES_BETA[1] for beta in betas)
    )


def kernel_raw_sums(plan: PointwisePlan, tiles_BV: Sequence[Tensor]) -> Tensor:
    """Return `pointwise.raw_sums`, [B, X], by the Triton kernel."""
    return run_rows(merged_pieces, plan, kernel_piece_sums(plan, tiles_BV).transpose(0, 1))


def merged_pieces(plan: PointwisePlan, pieces_BPX: Tensor) -> Tensor:
    """Return the raw sums of whole rows, [B, X], from those of their pieces."""
    return merged(plan, pieces_BPX.transpose(0, 1))


def kernel_piece_sums(plan: PointwisePlan, tiles_BV: Sequence[Tensor]) -> Tensor:
    """Return the raw sums of all pieces, [P, B, X]."""
    student_BV, teacher_BV = tiles_BV[0], tiles_BV[-1]
    (rows, columns), (block, warps), names = student_BV.shape, SUMS, plan.raw_sums
    pieces = -(-columns // block)
    sums_PBX = student_BV.new_empty(pieces, rows, len(names))
    renormalizable = {type(kl): names.index(("excess", at)) for at, kl in plan.renormalizable.items()}
    strides = student_BV.stride(0), teacher_BV.stride(0)
    arguments = [student_BV, teacher_BV, sums_PBX, rows, columns, *strides, plan.temperatures[0]]
    launch(
        "raw_sums_kernel",
        (pieces, rows),
        tiles_BV,
        sums_PBX,
        *arguments,
        X=len(names),
        HAS_TEACHER=plan.tiles == 2,
        IS_UNIT=plan.temperatures[0] == 1.0,
        AT_REFERENCE=names.index(("reference", 0)),
        AT_BOTH_TOP=_index(names, ("both_top", 1)),
        AT_LARGEST=names.index(("largest", 0)),
        AT_STUDENT=names.index(("student_others", 0)),
        AT_TEACHER=_index(names, ("teacher_others", 0)),
        AT_MASS_GAP=_index(names, ("mass_gap", 0)),
        AT_FORWARD=renormalizable.get(ForwardKL, -1),
        AT_REVERSE=renormalizable.get(ReverseKL, -1),
        AT_UNIFORM=_index(names, ("logits_sum", 0)),
        BLOCK=block,
        num_warps=warps,
    )
    return sums_PBX


def kernel_normalized_sums(plan: PointwisePlan, tiles_BV: Sequence[Tensor], normalizers_BX: Tensor) -> Tensor:
    """Return `pointwise.normalized_sums`, [B, 2], by the Triton kernel."""
    student_BV, teacher_BV = tiles_BV
    (rows, columns), (block, warps) = student_BV.shape, SUMS
    pieces = -(-columns // block)
    sums_PB2 = student_BV.new_empty(pieces, rows, 2)
    read = [student_BV, teacher_BV, normalizers_BX]
    strides = [tensor.stride(0) for tensor in read]
    arguments = [*read, sums_PB2, rows, columns, *strides, plan.temperatures[0]]
    launch(
        "normalized_sums_kernel",
        (pieces, rows),
        read,
        sums_PB2,
        *arguments,
        IS_UNIT=plan.temperatures[0] == 1.0,
        **_jsd_constants(plan),
        BLOCK=block,
        num_warps=warps,
    )
    return sums_PB2.sum(0)


def kernel_gradient(
    plan: PointwisePlan, tiles_BV: Sequence[Tensor], rows_BX: Tensor, out_BV: Tensor | None = None
) -> None:
    """Write `pointwise.gradient` of a plan without buckets, by the Triton kernel."""
    student_BV, teacher_BV = tiles_BV[0], tiles_BV[-1]
    out_BV = student_BV if out_BV is None else out_BV
    (rows, columns), (block, warps) = student_BV.shape, GRADIENT
    names = [*plan.normalizers, *plan.coefficients]
    slopes = {type(pair[0]): names.index(("slope", at)) for at, pair in enumerate(plan.pairs)}
    constants = _jsd_constants(plan)
    del constants["WEIGHT_P"]
    tensors = [student_BV, teacher_BV, rows_BX, out_BV]
    strides = [tensor.stride(0) for tensor in tensors]
    launch(
        "gradient_kernel",
        (-(-columns // block), rows),
        [*(tiles_BV if plan.pairs else tiles_BV[:1]), rows_BX],
        out_BV,
        *(*tensors, columns, *strides, plan.temperatures[0], plan.softcap or 1.0, plan.scale),
        HAS_PAIR=bool(plan.pairs),
        IS_UNIT=plan.temperatures[0] == 1.0,
        IS_CAPPED=plan.softcap is not None,
        AT_STUDENT_MASS=names.index(("student_log_mass", 0)),
        AT_COUNTED=names.index(("counted", 0)),
        AT_PROBABILITY=names.index(("probability", 0)),
        AT_LOG_PROBABILITY=_index(names, ("log_probability", 0)),
        AT_FORWARD=slopes.get(ForwardKL, -1),
        AT_REVERSE=slopes.get(ReverseKL, -1),
        AT_JSD=slopes.get(JensenShannon, -1),
        AT_UNIFORM=_index(names, ("uniform", 0)),
        **constants,
        BLOCK=block,
        num_warps=warps,
    )


@replaceable
def launch(
    name: str, grid: tuple[int, int], read: Sequence[Tensor], written: Tensor, *arguments: Any, **constants: Any
) -> None:
    """Launch a kernel of `triton_kernels.py`. read, written: for a dry run, the tensors that it reads and writes."""
    from stillhouse.objective.tile import triton_kernels

    getattr(triton_kernels, name)[grid](*arguments, **constants)


def _index(names: Sequence[Any], name: Any) -> int:
    return names.index(name) if name in names else -1


def _jsd_constants(plan: PointwisePlan) -> dict[str, Any]:
    jsd = next((pair[0] for pair in plan.pairs if isinstance(pair[0], JensenShannon)), JensenShannon(0.5))
    weight_p, weight_q = jsd.weights()
    series = log_one_plus_series(1 - jsd.beta, SERIES_TERMS[torch.float32])
    return {"BETA": jsd.beta, "WEIGHT_P": weight_p, "WEIGHT_Q": weight_q, "SERIES": tuple(series)}


@cache
def _refusal(plan: PointwisePlan, columns: int, device: torch.device) -> str:
    """Return the reason not to use the kernels, or "" if they pass the proof. The first call waits for the GPU."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return _difference(plan, columns, device)


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"the objective's Triton kernels are not used, torch.compile takes their place ({reason})", stacklevel=2
    )


def _difference(plan: PointwisePlan, columns: int, device: torch.device) -> str:
    """Return the reason why the kernels do not pass the proof, or "" if they pass it."""
    tiles_BV = hard_tiles(plan.tiles, columns, device)
    exact_tiles_BV = [tile_BV.double() for tile_BV in tiles_BV]
    plain = statistics(plan, raw_sums(plan, tiles_BV)[None])
    # `merged_pieces` is not compiled here: that takes seconds, and a run mostly compiles it inside `sums_and_logits`
    piece_sums_BN = kernel_piece_sums(plan, tiles_BV).transpose(0, 1)
    fused = statistics(plan, merged_pieces(plan, piece_sums_BN)[None])
    exact = statistics(plan, raw_sums(plan, exact_tiles_BV)[None])
    if not _is_as_exact(_numbers(fused), _numbers(plain), _numbers(exact)):
        return "the sums of the kernels differ from those of the plain functions"
    normalizers_BX = plain.normalizers_CX
    if plan.two_sweep:
        results = (
            kernel_normalized_sums(plan, tiles_BV, normalizers_BX),
            normalized_sums(plan, tiles_BV, normalizers_BX),
            normalized_sums(plan, exact_tiles_BV, normalizers_BX.double()),
        )
        if not _is_as_exact(*results):
            return "the normalized sums of the kernels differ from those of the plain functions"
    numbers_B1 = torch.linspace(0.1, 1, len(normalizers_BX), device=device)[:, None]
    rows_BX = torch.cat([normalizers_BX, numbers_B1.repeat(1, len(plan.coefficients))], 1)
    rows_BX[0, len(plan.normalizers) + plan.coefficients.index(("counted", 0))] = 0
    gradients = [tiles_BV[0].clone(), tiles_BV[0].clone(), exact_tiles_BV[0].clone()]
    kernel_gradient(plan, [gradients[0], *tiles_BV[1:]], rows_BX)
    gradient(plan, [gradients[1], *tiles_BV[1:]], rows_BX)
    gradient(plan, [gradients[2], *exact_tiles_BV[1:]], rows_BX.double())
    fused_B1, plain_B1, zero_B1 = ((result - gradients[2]).norm(dim=1, keepdim=True) for result in gradients)
    if not _is_as_exact(fused_B1, plain_B1, zero_B1, gradients[2].norm(dim=1, keepdim=True)):
        return "the gradient of the kernels differs from that of the plain functions"
    return ""


def hard_tiles(tiles: int, columns: int, device: torch.device) -> list[Tensor]:
    """Return logits [B, V] of a student and of a teacher, which are far apart in three rows, and close in six.

    In three of the six close rows, both distributions are also peaked. In each of these groups of three rows, the
    second row has −inf at the last logit and in a whole piece, and the third row has two equal largest logits.
    """
    draw = torch.Generator(device="cpu").manual_seed(0)
    student_BV = torch.randn(9, columns, generator=draw)
    teacher_BV = student_BV.clone()
    noise_BV = torch.randn(9, columns, generator=draw)
    for rows, scale, distance in ((slice(0, 3), 3.0, 1.0), (slice(3, 6), 3.0, 0.02), (slice(6, 9), 12.0, 0.02)):
        student_BV[rows] *= scale
        teacher_BV[rows] = student_BV[rows] + distance * noise_BV[rows]
    for tile_BV in (student_BV, teacher_BV):
        tile_BV[1::3, -1] = -torch.inf
        tile_BV[1::3, : min(SUMS[0], columns // 2)] = -torch.inf
        tile_BV[2::3, [0, -1]] = 40.0
    teacher_BV[2::3, columns // 2] = -torch.inf
    return [student_BV.to(device), teacher_BV.to(device)][:tiles]


def _numbers(rows: RowStatistics) -> Tensor:
    """Return the statistics that the proof compares, [B, X]."""
    columns = [*rows.references, *rows.student_log_mass, *rows.student_entropy, *rows.teacher_log_mass]
    columns += [*rows.teacher_entropy, *rows.both_top, *rows.values.values()]
    # a mass ratio is subtracted in log(q/p), so its absolute error counts: 3e-8 becomes 3e-5 (ROUNDING)
    columns += [1 + 1e3 * mass_ratio_B for mass_ratio_B in rows.mass_ratio]
    columns += [] if rows.mean_log_prob is None else [rows.mean_log_prob]
    return torch.stack(columns, 1)


def _is_as_exact(computed_BX: Tensor, plain_BX: Tensor, exact_BX: Tensor, size_BX: Tensor | None = None) -> bool:
    """Return True if the computed numbers are as exact as the plain ones, within the errors that the proof allows.

    The errors are relative to `size_BX`, by default the exact numbers. Each of the three kinds of rows of
    `hard_tiles` is compared separately.
    """
    finite_BX = exact_BX.isfinite()
    if not computed_BX[finite_BX].isfinite().all():
        return False
    others = computed_BX[~finite_BX].double(), exact_BX[~finite_BX]
    if not torch.allclose(*others, rtol=0.0, atol=0.0, equal_nan=True):
        return False
    size_BX = exact_BX.abs() if size_BX is None else size_BX
    errors = []
    for result_BX in (computed_BX, plain_BX):
        error_BX = torch.where(finite_BX, (result_BX.double() - exact_BX).abs(), 0.0)
        relative_BX = ((error_BX - SMALLEST).clamp(min=0) / size_BX).nan_to_num(0.0, torch.inf)
        errors.append(relative_BX.unflatten(0, (3, -1)).amax(1))
    return bool((errors[0] <= TIMES * errors[1] + ROUNDING).all())
