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
    "own_reverse_kl": ("reverse KL, own text", "{:.3f}"),
    "sums": ("sums", "{:.2f}"),
    "divisors": ("common divisors", "{:.2f}"),
}
#: the result file of served.py
SERVED = RESULTS / "real-served.json"
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
[the answers side by side](real_answers.csv). The figures of all tables but the last two are measured with
transformers alone, in float32, on {cores} cores of {cpu}, with torch {torch}.
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
    for experiment, results in measured.items():
        sections += _section(experiment, results)
    if SERVED.exists():
        sections += _served_section(_read(SERVED)["figures"])
    every_run = {name: seeds for results in measured.values() for name, seeds in results.items()}
    sections += ["## Claims of the field\n", CLAIMS_REMARK, *claims_table(every_run), ""]
    pictures = {f"real-{experiment}.svg": _picture(experiment, results) for experiment, results in measured.items()}
    return {"real.md": "\n".join(sections), "real_answers.csv": _answers_table(measured), **pictures}


def results_of(experiment: str) -> dict[str, list[dict[str, Any]]]:
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


def _section(experiment: str, results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    plan, rows = EXPERIMENTS[experiment], _rows(experiment, results)
    names = [name for name in FIGURES if name in rows[-1][1][0]["figures"]]
    written = "answers" in rows[-1][1][0]
    headings = [FIGURES[name][0] for name in names] + (["repeated"] if written else []) + ["seeds"]
    yield f"## {plan['title']}\n\n{textwrap.fill(plan['about'], WIDTH)}\n"
    yield f"![{plan['title']}](real-{experiment}.svg)\n"
    yield f"| | {' | '.join(headings)} |\n| --- |{' --- |' * len(headings)}"
    for title, runs in rows:
        cells = [_spread([run["figures"][name] for run in runs], FIGURES[name][1]) for name in names]
        shares = [repeated(run["answers"]) for run in runs] if written else []
        cells += [_spread(shares, "{:.0%}") if all(map(math.isfinite, shares)) else "no words"] if written else []
        cells += [str(len(runs)) if "trained" in runs[0] else ""]
        yield f"| {title} | {' | '.join(cells)} |"
    yield "\n" + textwrap.fill(" ".join([_tokens(rows), plan.get("shows", "")]), WIDTH) + "\n"


def _tokens(rows: list[tuple[str, list[dict[str, Any]]]]) -> str:
    """A sentence with the number of tokens that the models of a table have learned to predict."""
    titles: dict[int, list[str]] = {}
    for title, runs in rows:
        if "trained" in runs[0]:
            titles.setdefault(runs[0]["trained"]["tokens"], []).append(title)
    (usual, _), *others = sorted(titles.items(), key=lambda item: -len(item[1]))
    exceptions = (f"; {count:,} of “{title}”" for count, names in others for title in names)
    return f"Tokens to be predicted, in all steps: {usual:,}{''.join(exceptions)}."


def _rows(experiment: str, results: dict[str, list[dict[str, Any]]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The models of a table by their titles: those without training, then those of each run, of all seeds."""
    models, runs = _read(start_path(experiment))["models"], EXPERIMENTS[experiment]["runs"]
    rows = [(f"before: {name}", [model]) for name, model in models.items()]
    return rows + [(runs[name]["title"], seeds) for name, seeds in results.items()]


def _served_section(figures: dict[str, dict[str, float]]) -> Iterator[str]:
    """The section about the exported student in a stock vLLM. figures: by the dtype of the server."""
    yield "## The exported student in a stock vLLM\n"
    yield (
        "The student with 24 layers, exported and served on a CPU. Greedy tokens are compared with "
        "those of transformers in the same dtype, log-probabilities of held-out tokens with transformers in "
        "float32. In bfloat16, the error of transformers itself stands beside that of vLLM.\n"
    )
    yield "| dtype | equal greedy tokens | largest difference, nats | mean | transformers: largest | mean |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for dtype, row in figures.items():
        cells = [f"{row['same']:,} of {row['tokens']:,}"]
        keys = [f"{who}_{kind}" for who in ("vllm", "transformers") for kind in ("largest", "mean")]
        cells += [f"{row[key]:.2g}" if key in row else "" for key in keys]
        yield f"| {dtype} | {' | '.join(cells)} |"
    yield ""


def _spread(values: list[float], form: str) -> str:
    """The mean, and the smallest and largest of several values."""
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def repeated(answers: dict[str, str]) -> float:
    """The share of sequences of `SEQUENCE` words that the same answer has had before; NaN without any sequence."""
    again = count = 0
    for answer in answers.values():
        words = answer.split()
        sequences = list(zip(*(words[start:] for start in range(SEQUENCE)), strict=False))
        again += len(sequences) - len(set(sequences))
        count += len(sequences)
    return again / count if count else math.nan


def _answers_table(measured: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """The greedy answers of the first seed side by side: a row for each question, a column for each model."""
    columns = {
        f"{experiment}: {title}": runs[0]["answers"]
        for experiment, results in measured.items()
        for title, runs in _rows(experiment, results)
        if "answers" in runs[0]
    }
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["question", *columns])
    rows.writerows([prompt, *(answers[prompt] for answers in columns.values())] for prompt in PROMPTS)
    return text.getvalue()


def _picture(experiment: str, results: dict[str, list[dict[str, Any]]]) -> str:
    """Bars of the figure that the experiment is about, one for each run."""
    plan = EXPERIMENTS[experiment]
    name = plan["picture"]
    values = {plan["runs"][run]["title"]: [seed["figures"][name] for seed in seeds] for run, seeds in results.items()}
    means = {title: statistics.mean(figures) for title, figures in values.items()}
    scale, height = 300 / max(*means.values(), 1e-9), 34 * len(means) + 40
    parts = [f'<text x="10" y="20" font-weight="bold">{escape(FIGURES[name][0])}</text>']
    for number, (title, value) in enumerate(means.items()):
        y = 34 * number + 36
        parts += [
            f'<text x="340" y="{y + 16}" text-anchor="end">{escape(title)}</text>',
            f'<rect x="350" y="{y}" width="{value * scale:.0f}" height="22" fill="#3b6ea5"/>',
            f'<text x="{356 + value * scale:.0f}" y="{y + 16}">{FIGURES[name][1].format(value)}</text>',
        ]
    content = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {height}" font-family="sans-serif" '
        f'font-size="14">\n<rect width="740" height="{height}" fill="white"/>\n{content}\n</svg>\n'
    )
