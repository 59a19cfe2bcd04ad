"""Claims whose figures are results that exist: they are read from their committed files and not measured again.

The losses `uld` and `acceptance` do not exist any more; 68748665 is the last commit that has them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.claims.claim import Claim, Difference, Figures

SAMPLED_IDS = Claim(
    name="sampled-ids",
    metrics={
        "cross_entropy": "held-out cross-entropy",
        "forward_kl": "held-out forward KL",
        "calibration_error": "calibration error",
    },
    differences=(
        Difference(
            "forward KL: top ids, renormalised − sampled ids",
            lambda figures: figures["top_k, renormalize"]["forward_kl"] - figures["draws"]["forward_kl"],
            0.01,
        ),
        Difference(
            "forward KL: exact + 0.1 − sampled ids",
            lambda figures: figures["hidden"]["forward_kl"] + 0.1 - figures["draws"]["forward_kl"],
        ),
        Difference(
            "calibration error: top ids, renormalised − sampled ids",
            lambda figures: (
                figures["top_k, renormalize"]["calibration_error"] - figures["draws"]["calibration_error"]
            ),
            0.002,
        ),
    ),
    earlier="sparse_signals-2026-11-22.json",
    read=lambda result: list(result["runs"].values()),
)


def _student_init(result: Mapping[str, Any]) -> Sequence[Figures]:
    seeds: dict[int, dict[str, dict[str, float]]] = {}
    for run in result["runs"]:
        last = run["curve"][-1]
        seeds.setdefault(run["seed"], {})[run["start"]] = {
            key: last[f"eval/{key}"] for key in ("cross_entropy", "forward_kl", "agreement")
        }
    return list(seeds.values())


STUDENT_INIT = Claim(
    name="student-init",
    metrics={
        "cross_entropy": "held-out cross-entropy",
        "forward_kl": "held-out forward KL",
        "agreement": "agreement",
    },
    differences=(
        Difference(
            "forward KL: random − every second layer",
            lambda figures: figures["random"]["forward_kl"] - figures["every 2"]["forward_kl"],
            0.1,
        ),
        Difference(
            "forward KL: the better one of first and last three − every second layer",
            lambda figures: (
                min(figures["first 3"]["forward_kl"], figures["last 3"]["forward_kl"])
                - figures["every 2"]["forward_kl"]
            ),
            0.05,
        ),
    ),
    earlier="student_init-2026-11-23.json",
    read=_student_init,
)


def _cross_tokenizer(result: Mapping[str, Any]) -> Sequence[Figures]:
    return [{way: {"cross_entropy": value} for way, value in run.items()} for run in result["runs"].values()]


CROSS_TOKENIZER = Claim(
    name="cross-tokenizer",
    metrics={"cross_entropy": "held-out cross-entropy"},
    differences=(
        Difference(
            "cross-entropy: text alone − `uld`",
            lambda figures: figures["alone"]["cross_entropy"] - figures["uld"]["cross_entropy"],
            0.05,
        ),
    ),
    earlier="cross_tokenizer-2026-11-22.json",
    read=_cross_tokenizer,
)


def _gain(way: str) -> Callable[[Figures], float]:
    return lambda figures: figures["acceptance"][way] - figures["forward_kl"][way]


DRAFT_HEADS = Claim(
    name="acceptance",
    metrics={
        "sampled": "accepted share, sampled",
        "greedy": "accepted share, greedy",
        "expected": "held-out Σ min(p, q)",
    },
    differences=[
        Difference(f"accepted share, {way}: acceptance − forward KL", _gain(way), 0.01)
        for way in ("sampled", "greedy")
    ],
    earlier="claim-acceptance-2026-11-27.json",
)

WAYS = ("on-policy", "off-policy", "SFT", "GRPO")


def _reinforcement(result: Mapping[str, Any]) -> Sequence[Figures]:
    """Only seeds in which GRPO and on-policy distillation have reached the target, from both starts."""
    seeds = [seed for start in result["starts"].values() for seed in start.values()]
    return [
        {way: {"steps": float(seed[way]["until"]["steps"])} for way in WAYS}
        for seed in seeds
        if all(seed[way]["until"] is not None for way in WAYS)
    ]


REINFORCEMENT = Claim(
    name="reinforcement",
    metrics={"steps": "steps until 90 %"},
    differences=(
        Difference(
            "GRPO's steps / the steps of on-policy distillation − 2",
            lambda figures: figures["GRPO"]["steps"] / figures["on-policy"]["steps"] - 2,
        ),
    ),
    earlier="on_policy-2026-11-23.json",
    read=_reinforcement,
)
