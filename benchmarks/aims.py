"""The targets of the objective's benchmark with their measured values."""

from collections.abc import Iterator
from typing import Any

from benchmarks.peers import TOP_K

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "jsd+0.3*cross_entropy")
#: memory is constant over T if the largest value divided by the smallest is at most this
FLAT = 1.25


def aims(result: dict[str, Any], on_cpu: bool) -> list[dict[str, Any]]:
    """Return the targets of this benchmark with their measured values."""
    cases = result["cases"]
    aims = [aim for case in DIVERGENCES if case in cases for aim in speed_aims(case, cases[case], on_cpu)]
    if on_cpu and f"top{TOP_K}" in cases:
        ratio = cases[f"top{TOP_K}"]["stillhouse"]["over_floor"]
        aims.append(aim(f"top{TOP_K}: time / floor of the student", ratio, at_most=1.15))
    if on_cpu and all("extra_bytes" in entries["stillhouse"] for entries in cases.values()):
        aims += memory_aims(cases, result["memory_over_tokens"])
    if result["first_call"]:
        aims += first_call_aims(result["first_call"])
    return aims


def speed_aims(case: str, entries: dict[str, dict[str, Any]], on_cpu: bool) -> Iterator[dict[str, Any]]:
    over, most = ("over_floor", 1.15) if on_cpu else ("over_floor_by_flops", 1.25)
    yield aim(f"{case}: time / floor", entries["stillhouse"][over], at_most=most)
    for peer, least in least_advantage(case, on_cpu).items():
        if peer in entries:
            yield aim(f"{case}: time of {peer} / ours", entries[peer]["over_ours"], at_least=least)


def memory_aims(cases: dict[str, dict[str, Any]], over_tokens: dict[int, int]) -> Iterator[dict[str, Any]]:
    for case in (case for case in DIVERGENCES if case in cases):
        ratio = cases[case]["stillhouse"]["extra_bytes"] / cases[case]["pytorch"]["extra_bytes"]
        yield aim(f"{case}: extra memory / plain PyTorch's", ratio, at_most=1 / 6)
    if not over_tokens:
        return
    growth = max(over_tokens.values()) / min(over_tokens.values())
    yield aim(f"extra memory over T = {', '.join(map(str, over_tokens))}, largest / smallest", growth, at_most=FLAT)


def first_call_aims(first_call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    difference = first_call["largest_difference_of_loss"]
    yield aim("without a compiler: relative difference of losses", difference, at_most=1e-5)
    ours = [
        warning for warning in first_call["no_compiler"]["warnings"] if warning not in first_call["cold"]["warnings"]
    ]
    yield aim("without a compiler: warnings that it brings", len(ours), at_least=1, at_most=1)


def least_advantage(case: str, on_cpu: bool) -> dict[str, float]:
    """Return the factor by which a peer's time should be longer than ours."""
    if not on_cpu:
        return {"trl": 1.6, "liger_chunked": 1.6, "liger_fused": 1.6}
    return {"trl": 3.5, "pytorch": 1.5} if case.startswith("jsd") else {"trl": 2.5, "pytorch": 1.0}


def aim(what: str, value: float, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return {"aim": what, "value": value, "at_least": at_least, "at_most": at_most, "met": met}
