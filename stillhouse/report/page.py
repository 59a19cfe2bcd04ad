"""Writes the page: fills the template with the summary, the charts, the shaded text and the tables."""

import base64
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from stillhouse.display import duration, escaped, model_folder_name
from stillhouse.output.metrics import WITHOUT_BEST, ended_early, headline, known_metric
from stillhouse.report.curves import Chart, constant_in_words, draw_charts
from stillhouse.report.run_files import Run, read_run
from stillhouse.report.shown_records import (
    SHADES,
    mean_kl,
    over_time,
    pieces,
    readout,
    shade_class,
    shown_tokens,
    staleness_rows,
    step_summary,
    timeline,
)

ASSETS = Path(__file__).parent / "assets"
COLOURS = 8  # the style sheet's --run-0 … --run-7
RECENT_STEPS = 4  # the number of last steps whose samples are visible at first; earlier steps are folded

_DATA_LABELS = {
    "read": "documents read",
    "kept": "documents kept",
    "skipped": "skipped: malformed",
    "duplicates": "duplicates of earlier documents",
    "empty_answers": "with an empty answer",
    "without_target": "dropped: no token to predict",
    "cut_documents": "cut to the length limit",
    "cut_tokens": "tokens cut off",
    "form": "columns read as",
    "split_documents": "texts cut into pieces",
    "documents": "documents, each piece counted",
    "records": "documents used",
    "target_tokens": "tokens to predict",
    "trained_share": "share of the tokens to train on",
    "trained_ends": "token ids that end a trained text",
    "joined_turns": "turns that begin within a token of their prompt",
}


#: a number of the summary: its name, its unit, and its text for each run (None for a run without this number)
Figure = tuple[str, str, list[str | None]]


def write_report(run_dir: Path, compare: Sequence[Path] = (), out: Path | None = None) -> Path:
    """Write one self-contained page and return its path.

    run_dir: the folder of a run, finished or not.
    compare: the folders of at most 7 other runs, which are drawn into the same charts and named after their folders.
    out: the file to write. None: write `run_dir/report.html`, or `run_dir/compare.html` for several runs.

    Raises ValueError if a folder contains no run, a file is malformed, there are too many runs, a run is given twice,
    or the page cannot be written.
    """
    page = render(read_runs([Path(run_dir), *map(Path, compare)]))
    target = Path(run_dir) / ("compare.html" if compare else "report.html") if out is None else Path(out)
    partial = target.with_name(target.name + ".partial")
    # a token may contain half of a surrogate pair, which UTF-8 cannot encode; a browser then shows U+FFFD
    try:
        partial.write_bytes(page.encode("utf-8", errors="xmlcharrefreplace"))
        os.replace(partial, target)
    except OSError as error:
        raise ValueError(
            f"{target} cannot be written: {error.strerror}; the run itself is not changed, and `stillhouse report "
            f"{run_dir}` writes the page again"
        ) from error
    return target


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the run folders of one page. Raises ValueError in the cases that `write_report` lists."""
    if len(paths) > COLOURS:
        raise ValueError(
            f"got {len(paths) - 1} runs to compare: expected at most {COLOURS - 1}, which one chart can distinguish"
        )
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"a run is given twice: {', '.join(map(str, paths))}")
    return [read_run(path) for path in paths]


def render(runs: Sequence[Run], *, watching: bool = False) -> str:
    """Return the page of the first run, compared with the other runs. watching: whether the page updates itself."""
    run, rollouts, held_out = runs[0], runs[0].rollouts, runs[0].held_out
    names = run_names([run.path for run in runs])
    drawn = draw_charts(runs)
    charts = [chart for chart in drawn if not chart.constants]
    groups: dict[str, list[tuple[int, Chart]]] = {}
    for index, chart in enumerate(charts):
        groups.setdefault(chart.group, []).append((index, chart))
    documents = held_out.documents if held_out else []
    # the terms of the objective whose gradients the run has recorded
    terms = list(dict.fromkeys(name for shown in documents for token in shown.tokens for name in token.terms))
    embedded = {
        "runs": names,
        "charts": [
            {
                "title": f"{chart.group}: {chart.title}",
                "log": chart.log,
                "positive": chart.positive,
                "percent": chart.percent,
                "sides": list(chart.keys),
                "series": chart.series,
            }
            for chart in charts
        ],
        "documents": [[readout(token, terms) for token in document.tokens] for document in documents],
        "terms": terms,
        "shades": SHADES,
    }
    scripts = [_asset(name) for name in ("uplot.min.js", "report.js", *(["watch.js"] if watching else []))]
    # the page runs only its own scripts and loads nothing; a watched page may send requests to its own server
    script_hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{script_hash}'" for script_hash in script_hashes)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    policy += "; connect-src 'self'" if watching else ""
    has_images = any(sample.images for sample in run.eval_samples) or any(shown.images for shown in documents)
    policy += "; img-src data:" if has_images else ""
    return _template().render(
        run=run,
        names=names,
        of_first=f" of {names[0]}" if len(runs) > 1 else "",
        differences=config_differences(runs),
        watching=watching,
        models=models_in_words(run),
        ended_early=early_end(run),
        constants=[(chart, constant_in_words(chart, names)) for chart in drawn if chart.constants],
        objective=objective_in_words(run),
        figures=figures(runs),
        groups=groups,
        documents=documents,
        rollouts=rollouts,
        timeline=timeline(rollouts.spans) if rollouts else None,
        steps=[*reversed(rollouts.samples.items())] if rollouts else [],
        recent_steps=RECENT_STEPS,
        staleness=staleness_rows(rollouts.staleness) if rollouts else [],
        prompts=over_time(run.eval_samples),
        shades=SHADES,
        terms=terms,
        data_table=data_table(run.data or {}),
        data_notes=data_notes(run.data or {}),
        environment=[(key, _plain(value)) for key, value in (run.environment or {}).items() if key != "objective"],
        embedded=embedded,
        styles=[_asset(name) for name in ("uplot.min.css", "report.css", *(["rollouts.css"] if rollouts else []))],
        scripts=scripts,
        policy=policy,
    )


@functools.cache
def _template() -> Template:
    loader = FileSystemLoader(ASSETS)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = {"duration": duration, "mean_kl": mean_kl, "pieces": pieces, "shade_class": shade_class}
    environment.filters |= filters | {"shown_tokens": shown_tokens, "step_summary": step_summary}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template("report.html.jinja")


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return the folder names, with the fewest parent folders that make all names different."""
    resolved = [path.resolve().parts for path in paths]
    depth = 1
    while len({parts[-depth:] for parts in resolved}) < len(resolved):
        depth += 1
    return ["/".join(parts[-depth:]) for parts in resolved]


def models_in_words(run: Run) -> str:
    """Return `student ← teacher`, each as a hub id or by the model's folder; several teachers by section name."""
    names = []
    for section in (run.section("student"), run.section("teacher")):
        name = str(section.get("model") or "")
        is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
        names.append(model_folder_name(name) if is_path else name)
    student, teacher = names
    if isinstance(several := run.config.get("teachers"), dict):
        teacher = ", ".join(sorted(name for name, section in several.items() if isinstance(section, dict)))
    return f"{student} ← {teacher}" if teacher else student


def objective_in_words(run: Run) -> str:
    """Return the objective in words if the run has recorded it, otherwise the expression of its loss. The paths of a
    student and a single teacher are left out.
    """
    words = str((run.environment or {}).get("objective") or run.section("objective").get("loss", ""))
    student = run.section("student").get("model")
    return words if run.config.get("teachers") or not student else words.partition(f": {student}")[0]


def early_end(run: Run) -> str:
    """Return why and when eval.patience has ended the training; "" if it has not."""
    patience, best = run.section("eval").get("patience"), run.section("checkpoint").get("best")
    counts = [(line.values[WITHOUT_BEST], line.step) for line in run.lines if WITHOUT_BEST in line.values]
    if not isinstance(patience, int) or not counts or (counts[-1][0] or 0) < patience:
        return ""
    return f"Training ended after step {counts[-1][1]:,.0f}: {ended_early(str(best), patience)}."


def figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the numbers of the summary; a metric is shown by its first and its last value."""

    def figure(key: str) -> Figure:
        metric, pairs = known_metric(key), [run.first_and_last(key) for run in runs]
        texts = [" → ".join(map(metric.text, pair)) if pair else None for pair in pairs]
        return metric.title, metric.unit, texts

    last = [run.lines[-1] if run.lines else None for run in runs]
    steps = [f"{line.step:,}" if line else None for line in last]
    counts = [line.values.get("tokens") if line else None for line in last]
    tokens = [None if count is None else f"{count:,.0f}" for count in counts]
    times = [line.values.get("seconds") if line else None for line in last]
    seconds = [None if time is None else duration(time) for time in times]
    keys = dict.fromkeys(key for run in runs for line in run.lines for key in line.values)
    return [
        *map(figure, headline(keys)),
        ("Tokens", "predicted in training", tokens),
        ("Steps", "of the optimizer", steps),
        ("Time", "", seconds),
    ]


def data_table(data: dict[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the data reports side by side: (names of the splits, rows of a label and one value per split)."""
    reports = {name: report for name, report in data.items() if isinstance(report, dict)}
    items = [item for report in reports.values() for item in report.items()]
    rows: dict[str, list[str]] = {}
    for key, value in items:
        if not isinstance(value, dict | list) and value not in (None, ""):
            texts = ["" if report.get(key) is None else _plain(report[key]) for report in reports.values()]
            rows[_DATA_LABELS.get(key, key.replace("_", " "))] = texts
    return list(reports), list(rows.items())


def data_notes(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) for the values in the data reports that are not counts, such as reasons for skips."""
    notes = [(name, value) for name, value in data.items() if not isinstance(value, dict)]
    for name, report in data.items():
        for key, value in report.items() if isinstance(report, dict) else ():
            if isinstance(value, dict | list):
                notes.append((f"{name}, {_DATA_LABELS.get(key, key.replace('_', ' '))}", value))
    return [(name, _plain(value)) for name, value in notes if value not in (None, [], {}, "")]


def _asset(name: str) -> Markup:
    return Markup((ASSETS / name).read_text(encoding="utf-8"))  # style sheets and scripts are not escaped


def _plain(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return "\n".join(map(_plain, value))
    return escaped(json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value), lines=True)


ABSENT, NULL = "not set", "null"


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return (dotted key, one text per run) for every key whose value is not the same in all runs.

    A run without config.yaml differs in every key.
    """
    configs = [_flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        texts = [config.get(key, ABSENT) for config in configs]
        # a section that is null in some runs has no row of its own, because its values in other runs have rows
        is_section = any(nested.startswith(f"{key}.") for nested in keys)
        if len(set(texts)) > 1 and not (set(texts) == {ABSENT, NULL} and is_section):
            rows.append((escaped(key), texts))
    return rows


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return the values as text, by their dotted keys."""
    values: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values |= _flat(value, f"{before}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            values[f"{before}{key}"] = escaped(text)
    return values
