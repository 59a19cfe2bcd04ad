"""Compares two recordings, and returns one line for each difference.

What one process computes has to be equal to the bit. Under a layout and with a served teacher, numbers may differ by
the case's tolerance, relative to themselves or, if they are smaller, to SMALL. Collectives, compilations and verdicts
of parity have to be equal, and peaks of memory may differ by MEMORY.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.unchanged.cases import CASES, LAYOUT_TOLERANCE, SERVED_TOLERANCE

SMALL = 1e-2
MEMORY = 0.05
EXACT_KEYS = ("error", "parity", "compilations", "collectives")

TOLERANCES = (
    f"one process: equal to the bit; layouts: {LAYOUT_TOLERANCE:g} and served teachers: {SERVED_TOLERANCE:g} of a "
    f"number or {SMALL:g}; collectives, compilations, parity: equal; peak memory: {MEMORY:.0%}"
)


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float = 0.0) -> Iterator[str]:
    """Yield a line for each difference between the cases of two recordings. tolerance: of all cases, at least."""
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            yield f"{name}: only in the {'first' if name in before else 'second'} file"
            continue
        yield from (
            f"{name}: {line}"
            for line in differences(before[name], after[name], max(CASES[name].tolerance, tolerance))
        )


def differences(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    for key in EXACT_KEYS:
        yield from unequal(key, before.get(key), after.get(key))
    if "error" in before or "error" in after:
        return
    yield from number_differences("metrics", before.get("metrics"), after.get("metrics"), tolerance)
    yield from weight_differences(before.get("weights", {}), after.get("weights", {}), tolerance)
    for key in () if tolerance else ("cache", "weights_sha256"):
        yield from unequal(key, before.get(key), after.get(key))
    peaks = zip(before.get("peak_bytes", ()), after.get("peak_bytes", ()), strict=True)
    for rank, (one, other) in enumerate(peaks):
        if abs(other / one - 1) > MEMORY:
            yield f"peak memory of rank {rank}: {one >> 20} MiB became {other >> 20} MiB (tolerance {MEMORY:.0%})"


def equal_bits(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Return the number of cases, of both recordings, whose metrics and weights are equal to the bit."""
    keys = ("metrics", "weights_sha256", "cache", "parity")
    return sum(all(case.get(key) == after[name].get(key) for key in keys) for name, case in before.items())


def unequal(path: str, before: Any, after: Any) -> Iterator[str]:
    """Yield the innermost differences of two values."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted(before.keys() | after.keys()):
            yield from unequal(f"{path} {key}", before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for at, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from unequal(f"{path}[{at}]", one, other)
    elif before != after:
        yield f"{path}: {before} became {after} (expected: equal)"


def number_differences(path: str, before: Any, after: Any, tolerance: float) -> Iterator[str]:
    """Yield the lists of numbers that differ, each with its largest difference."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted(before.keys() | after.keys()):
            yield from number_differences(f"{path} {key}", before.get(key), after.get(key), tolerance)
    elif not isinstance(before, list) or not isinstance(after, list) or len(before) != len(after):
        if before != after:
            yield f"{path}: {before} became {after}"
    elif (largest := max_difference(before, after)) > tolerance:
        at = next(at for at, pair in enumerate(zip(before, after, strict=True)) if distance(*pair) == largest)
        allowed = f"tolerance {tolerance:g}" if tolerance else "expected: equal"
        yield f"{path}[{at}]: {before[at]!r} became {after[at]!r}, relative difference {largest:.1e} ({allowed})"


def weight_differences(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], tolerance: float
) -> Iterator[str]:
    """Yield the tensors that only one side has, and one line for all that differ.

    Each tensor has its norm and its product with a fixed tensor; both are compared relative to the norm.
    """
    if names := sorted(before.keys() ^ after.keys()):
        yield f"weights: only one side has {', '.join(names)}"
    apart = {
        name: max(abs(one - other) for one, other in zip(before[name], after[name], strict=True))
        / max(before[name][0], SMALL)
        for name in before.keys() & after.keys()
    }
    differing = {name: value for name, value in apart.items() if not value <= tolerance}
    if differing:
        worst = max(differing, key=lambda name: differing[name])
        allowed = f"tolerance {tolerance:g}" if tolerance else "expected: equal"
        yield (
            f"weights: {len(differing)} of {len(apart)} tensors differ; the largest relative difference is "
            f"{differing[worst]:.1e}, of {worst} ({allowed})"
        )


def max_difference(before: Sequence[Any], after: Sequence[Any]) -> float:
    return max((distance(one, other) for one, other in zip(before, after, strict=True)), default=0.0)


def distance(one: Any, other: Any) -> float:
    """Return the relative difference of two numbers; it is infinite if one of them is not a finite number."""
    if one == other or (one != one and other != other):
        return 0.0
    if not all(isinstance(value, int | float) for value in (one, other)):
        return float("inf")
    relative = abs(one - other) / max(abs(one), SMALL)
    return relative if relative < float("inf") else float("inf")
