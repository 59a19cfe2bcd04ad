"""The tables and the plot of benchmarks/on_policy.py."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

WAYS = ("on-policy", "off-policy", "SFT", "GRPO")


def summary_of(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For each way, steps and tokens until the target of the seeds that reached it, and GRPO's steps in relation."""
    summary: dict[str, Any] = {}
    for name in WAYS:
        reached = [seed for seed in seeds if seed[name]["until"] is not None]
        ratios = [
            curves["GRPO"]["until"]["steps"] / curves[name]["until"]["steps"]
            for curves in reached
            if curves["GRPO"]["until"] is not None
        ]
        summary[name] = {
            "steps": [curves[name]["until"]["steps"] for curves in reached],
            "tokens": [curves[name]["until"]["tokens"] for curves in reached],
            "GRPO's steps / these": [round(ratio, 2) for ratio in ratios],
            "reached": f"{len(reached)} of {len(seeds)}",
        }
    return summary


def table(summary: Mapping[str, Any]) -> str:
    rows = [
        "| | steps: median (each seed) | tokens: median | GRPO's steps / these | seeds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, figures in summary.items():
        steps, tokens, ratios = figures["steps"], figures["tokens"], figures["GRPO's steps / these"]
        rows.append(
            f"| {name} | {_median(steps, '.0f')} ({', '.join(map(str, steps))}) | {_median(tokens, ',.0f')} "
            f"| {_median(ratios, '.1f')} ({', '.join(f'{ratio:.1f}' for ratio in ratios)}) | {figures['reached']} |"
        )
    return "\n".join(rows)


def length_table(seeds: Sequence[Mapping[str, Any]]) -> str:
    """The exact match by length after as many tokens, mean over seeds."""
    lengths = sorted({int(length) for seed in seeds for length in seed["on-policy"]["by length"]})
    head = "| | " + " | ".join(map(str, lengths)) + " |"
    rows = [head, "| --- " * (len(lengths) + 1) + "|"]
    for name in WAYS[:-1]:
        means = [statistics.fmean(seed[name]["by length"][str(length)] for seed in seeds) for length in lengths]
        rows.append(f"| {name} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    return "\n".join(rows)


def _median(values: Sequence[float], form: str) -> str:
    return format(statistics.median(values), form) if values else "not reached"


def draw(starts: Mapping[str, Mapping[int, Mapping[str, Any]]], path: Path, target: float) -> None:
    """The exact match over steps of every way and seed, one panel for each start."""
    figure, panels = pyplot.subplots(1, len(starts), figsize=(11, 4), sharey=True, squeeze=False)
    for panel, (start, seeds) in zip(panels[0], starts.items(), strict=True):
        for number, name in enumerate(WAYS):
            for at, seed in enumerate(seeds.values()):
                points = [point for point in seed[name]["curve"] if point[0] > 0]
                steps, shares = [point[0] for point in points], [point[2] for point in points]
                panel.plot(steps, shares, color=f"C{number}", linewidth=1.2, label=None if at else name)
        panel.axhline(target, color="grey", linewidth=0.8, linestyle="--")
        panel.set(title=start, xlabel="optimizer steps", xscale="log")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("exact match on held-out problems")
    panels[0][-1].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
