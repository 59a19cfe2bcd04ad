"""`stillhouse demo`: distillation on text that is part of every Python installation.

A student with a quarter of the shipped teacher's parameters is trained twice on a small text that the teacher has not
seen: once with the teacher and once without it, for the same number of tokens. Both trainings are ordinary runs of
`stillhouse distill`, and their folders are kept.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from stillhouse.config import RunConfig, load_config
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.loops.held_out_metrics import held_out_metrics
from stillhouse.parallel import single_process_runner
from stillhouse.registry import load
from stillhouse.run.run import distill
from stillhouse.run.session import prepare
from stillhouse.signals import InStageTeacher
from stillhouse.tools.demo.run_files import LEARNING_RATE, text_settings, write_text_run
from stillhouse.tools.demo.student import TEACHER

#: the two runs: folder name and objective; all other settings are the same
OBJECTIVES = {"cross_entropy": "cross_entropy", "distilled": "forward_kl"}
LABELS = {"teacher": "teacher", "cross_entropy": "student, text alone", "distilled": "student, distilled"}
STEPS = 600

Row = dict[str, Any]


def demo(out: Path, *, seed: int = 0, steps: int = STEPS, learning_rate: float = LEARNING_RATE) -> list[Row]:
    """Execute both runs, print the table and the report's path, and return the table's rows."""
    trial = write_text_run(out, seed)
    configs = {name: demo_config(out, name, seed, steps, learning_rate) for name in OBJECTIVES}
    for config in configs.values():
        print()
        distill(config)
    rows = [_teacher_row(configs["distilled"])]
    rows += [_student_row(name, Path(config.out)) for name, config in configs.items()]
    print("\n" + table(rows))
    distilled, text_only = (Path(configs[name].out) for name in ("distilled", "cross_entropy"))
    print("\nreport: ", end="", flush=True)
    arguments = [str(distilled), "--compare", str(text_only), "--out", str(distilled / "report.html")]
    load("stillhouse.commands", "report").main(arguments, standalone_mode=False)
    print(f"a run of your own with these models, to edit: {trial}; then `stillhouse distill {trial}`")
    return rows


def demo_config(out: Path, name: str, seed: int, steps: int, learning_rate: float) -> RunConfig:
    """Return the configuration of one of the two runs, as a user would write it."""
    settings = text_settings(out, steps)
    settings["train"]["learning_rate"] = learning_rate
    return load_config(
        None, settings=settings | {"objective": {"loss": OBJECTIVES[name]}, "out": str(out / name), "seed": seed}
    )


def table(rows: list[Row]) -> str:
    """Return the rows as aligned text."""
    columns = {
        "": lambda row: LABELS[row["run"]],
        "parameters": lambda row: f"{row['parameters']:,}",
        "held-out cross-entropy": lambda row: f"{row['cross_entropy']:.3f}",
        "forward KL": lambda row: f"{row['forward_kl']:.3f}",
        "agreement": lambda row: f"{row['agreement']:.1%}",
        "tokens": lambda row: f"{row['tokens']:,}" if row["tokens"] else "",
        "seconds": lambda row: f"{row['seconds']:.0f}" if row["seconds"] else "",
    }
    cells = [list(columns)] + [[show(row) for show in columns.values()] for row in rows]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(form.format(*line) for line in cells)


def _teacher_row(config: RunConfig) -> Row:
    session = prepare(config, announce=False)
    models, held_out, spec = session.models, session.data.evaluation, session.loss.spec
    assert models.teacher is not None
    assert held_out is not None
    runner = single_process_runner(models.teacher, models.teacher)
    engine = TorchEngine(runner, spec, autocast=models.engine.autocast)
    models = replace(models, engine=engine, source=InStageTeacher(runner))
    figures = held_out_metrics(models, held_out, spec, session.schedule.held_out_tokens)
    return _row("teacher", TEACHER, figures, tokens=0, seconds=0.0)


def _student_row(name: str, run: Path) -> Row:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if "eval/cross_entropy" in record][-1]
    return _row(name, run / "model", last, tokens=last["tokens"], seconds=last["seconds"])


def _row(run: str, model: Path, figures: dict[str, float], *, tokens: int, seconds: float) -> Row:
    return {
        "run": run,
        "parameters": count_parameters(model),
        "cross_entropy": figures["eval/cross_entropy"],
        "forward_kl": figures["eval/forward_kl"],
        "agreement": figures["eval/agreement"],
        "tokens": tokens,
        "seconds": seconds,
    }


def count_parameters(model: Path) -> int:
    """Count the parameters of a saved model; tied weights count once."""
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
