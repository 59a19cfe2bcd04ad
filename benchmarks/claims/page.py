"""docs/claims.md, written from claims.yaml and the result files."""

import json
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from benchmarks.claims.catalog import CLAIMS
from benchmarks.claims.claim import HOLDS, OPEN, RULE, WRONG, Claim, Figures, outcome, verdict_of
from benchmarks.record import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
TEXTS: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text(encoding="utf-8"))
OUTCOMES = {HOLDS: "confirmed", OPEN: "not shown", WRONG: "contradicted"}
NOT_MEASURED = "not measured yet"
TASKS = "data.md#tasks-with-answers-that-can-be-verified"
INTRODUCTION = f"""\
`python -m benchmarks.claims` writes this page from the result files, failures included. `make claims` measures every
claim that has no result file yet, and `python -m benchmarks.claims NAME --again --keep FOLDER` measures one again, in
a new folder. Each takes some minutes on one core, with one thread and without a GPU.

The models have 0.01 to 5 million parameters. So a verdict says what such models do in our setting. It does not say
that a source is right or wrong at its own size. What a source says is given in our words.

Most claims use tasks of [`stillhouse task`]({TASKS}):
`reversal(2:5)` is a text of 2 to 5 letters to be written backwards, `sums(2:2)` an addition or a subtraction of two
numbers, `brackets(2:3)` 2 or 3 open brackets to be closed. The exact match is the share of held-out problems whose
whole answer is right, with greedy decoding. A model that imitates answers is trained with cross-entropy on them.

**The rule.** {RULE}
The margins were chosen before the three seeds were measured, except those of the last four claims, whose results
existed. Two settings in which nothing was learned (brackets in the first claim, reversal with many prompts in the
second) were replaced by longer training; and so was one in which nothing could be balanced, because every step had
documents of a single task (several teachers). Figures are the mean over the seeds, with each seed's in brackets.
"""


def write_page() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page(results: Path = RESULTS) -> str:
    """The text of the page. results: the folder of result files."""
    rows = ["| claim | source | verdict |", "| --- | --- | --- |"]
    sections = []
    for name, texts in TEXTS.items():
        verdict, tables = NOT_MEASURED, ""
        claim = CLAIMS.get(name)
        path = claim.result_file(results) if claim else None
        if claim is not None and path is not None:
            seeds = claim.figures(json.loads(path.read_text(encoding="utf-8")))
            verdict, tables = verdict_of(claim, seeds), _tables(claim, path, seeds)
        elif "needs" in texts:
            verdict += f" (needs {texts['needs']})"
        anchor = re.sub(r"[^\w -]", "", texts["title"]).lower().replace(" ", "-")
        rows.append(f"| [{texts['title']}](#{anchor}) | {texts['source']} | {verdict} |")
        sections.append(_section(texts, tables, verdict))
    introduction = [_filled(paragraph) for paragraph in INTRODUCTION.split("\n\n")]
    return "\n".join(["# What the field says, tested small\n", *introduction, *rows, "", *sections])


def _section(texts: Mapping[str, str], tables: str, verdict: str) -> str:
    said = _filled(f"{texts['source']}: {texts['said']}")
    setting = _filled(f"**Setting.** {texts['setting']}")
    end = _filled(f"**Verdict: {verdict}.** {texts.get('remark', '')}")
    return f"## {texts['title']}\n\n{said}\n{setting}\n{tables}{end}"


def _filled(text: str) -> str:
    return textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False) + "\n"


def _tables(claim: Claim, path: Path, seeds: Sequence[Figures]) -> str:
    """Where the figures come from, the figures of each setting, and the differences that the claim predicts."""
    command = "An earlier result" if claim.earlier else f"`python -m benchmarks.claims {claim.name}`"
    lines = [f"{command}, {len(seeds)} seeds ([figures](../benchmarks/results/{path.name})):", ""]
    lines += ["| | " + " | ".join(claim.metrics.values()) + " |", "| --- " * (len(claim.metrics) + 1) + "|"]
    for name, values in seeds[0].items():
        cells = [
            spread([seed[name][metric] for seed in seeds]) if metric in values else "" for metric in claim.metrics
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| predicted to be positive | difference | margin | |", "| --- | --- | --- | --- |"]
    for difference in claim.differences:
        decided = OUTCOMES[outcome(difference, seeds)]
        values_S = [difference.of(figures) for figures in seeds]
        lines.append(f"| {difference.text} | {spread(values_S)} | {difference.margin:g} | {decided} |")
    return "\n".join(lines) + "\n\n"


def spread(values: Sequence[float]) -> str:
    """The mean, and each seed's value."""
    return f"{_number(statistics.fmean(values))} ({', '.join(map(_number, values))})"


def _number(value: float) -> str:
    return f"{value:.{3 if abs(value) < 10 else 1}f}".replace("-", "−")
