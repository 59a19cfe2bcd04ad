"""Writes docs/results/real.md and its picture from the result files."""

import json
import statistics
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.real.recovery import OBJECTIVES, PROMPTS, RESULTS

FOLDER = Path(__file__).parents[2] / "docs" / "results"
NAMES = {
    "forward_kl": "forward KL",
    "reverse_kl": "reverse KL",
    "jsd": "JSD(0.5)",
    "cross_entropy": "cross-entropy on text",
    "answers": "cross-entropy on the teacher's own answers",
}
FIGURES = {"perplexity": "perplexity", "forward_kl": "forward KL, nats", "agreement": "agreement"}


def write_page(folder: Path = FOLDER) -> None:
    """Write the page, of those objectives that have a result file."""
    results: dict[str, list[dict[str, Any]]] = {}
    for objective in OBJECTIVES:
        paths = sorted(RESULTS.glob(f"real-recovery-{objective}-seed*.json"))
        if paths:
            results[objective] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    if not results:
        raise ValueError(f"{RESULTS} has no result file real-recovery-*.json: run `make real` first")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "real.svg").write_text(_picture(results), encoding="utf-8")
    (folder / "real.md").write_text(_page(results), encoding="utf-8")
    print(folder / "real.md")


def _mean(runs: list[dict[str, Any]], key: str, when: str = "end") -> float:
    return statistics.mean(run[when][key] for run in runs)


def _page(results: dict[str, list[dict[str, Any]]]) -> str:
    first = next(iter(results.values()))[0]
    settings, text = first["settings"], first["text"]
    lines = [
        "# Half of a real language model, recovered",
        "",
        "`make real` measures this page and writes it. The teacher is SmolLM2-135M-Instruct. The student begins with "
        "every second of its 30 layers, "
        f"and learns in {settings['steps']} steps of {settings['tokens_per_step']:,} tokens.",
        f"The text is the documentation of Python's standard library ({text['trained']['characters']:,} characters; "
        f"{text['held_out']['characters']:,} others are held out). Float32, {first['cores']} cores, {first['cpu']}, "
        f"torch {first['torch']}, {first['date'][:10]}, commit {str(first['commit'])[:8]}.",
        "",
        "![held-out forward KL](real.svg)",
        "",
        f"| objective | {' | '.join(FIGURES.values())} | seeds |",
        f"| --- {'| --- ' * (len(FIGURES) + 1)}|",
        f"| before training {_cells([first], 'start')} | |",
    ]
    lines += [f"| {NAMES[name]} {_cells(runs, 'end')} | {len(runs)} |" for name, runs in results.items()]
    lines += ["", "## Greedy answers", "", "The answers of the first seed, unedited.", ""]
    for prompt in PROMPTS:
        lines += [f"**{prompt}**", ""]
        lines += [f"- {NAMES[name]}: {_quoted(runs[0]['answers'][prompt])}" for name, runs in results.items()]
        lines += [""]
    return "\n".join(lines)


def _cells(runs: list[dict[str, Any]], when: str) -> str:
    values = {key: _mean(runs, key, when) for key in FIGURES}
    return f"| {values['perplexity']:,.1f} | {values['forward_kl']:.3f} | {values['agreement']:.1%}"


def _quoted(text: str) -> str:
    return f"`{' '.join(text.replace('`', chr(39)).split()) or ' '}`"


def _picture(results: dict[str, list[dict[str, Any]]]) -> str:
    """Bars of the held-out forward KL, one for each objective."""
    values = {NAMES[name]: _mean(runs, "forward_kl") for name, runs in results.items()}
    scale, height = 360 / max(values.values()), 34 * len(values) + 40
    parts = ['<text x="10" y="20" font-weight="bold">Held-out KL(teacher ‖ student), nats per token</text>']
    for number, (name, value) in enumerate(values.items()):
        y = 34 * number + 36
        parts += [
            f'<text x="300" y="{y + 16}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="310" y="{y}" width="{value * scale:.0f}" height="22" fill="#3b6ea5"/>',
            f'<text x="{316 + value * scale:.0f}" y="{y + 16}">{value:.2f}</text>',
        ]
    content = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {height}" font-family="sans-serif" '
        f'font-size="14">\n<rect width="740" height="{height}" fill="white"/>\n{content}\n</svg>\n'
    )
