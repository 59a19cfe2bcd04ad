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

from stillhouse.config import load_config
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.loops.held_out import held_out_metrics
from stillhouse.parallel import single_process_runner
from stillhouse.registry import load
from stillhouse.run.run import distill, prepare
from stillhouse.signals import InStageTeacher
from stillhouse.tools.demo.student import LEARNING_RATE, TEACHER, text_settings, write_text_run

#: the folder names and the objectives of the two runs; all other settings are the same
OBJECTIVES = {"cross_entropy": "cross_entropy", "distilled": "forward_kl"}
LABELS = {"teacher": "teacher", "cross_entropy": "student, text alone", "distilled": "student, distilled"}
PURPOSES = {"cross_entropy": "the student learns from the text alone", "distilled": "it learns from the teacher, too"}
STEPS = 600

Row = dict[str, Any]


def run_demo(out: Path, *, seed: int = 0, steps: int = STEPS, learning_rate: float = LEARNING_RATE) -> list[Row]:
    """Execute the two runs of `OBJECTIVES`, print the table and the report's path, and return the table's rows."""
    trial = write_text_run(out, seed)
    configs = {}
    for name, loss in OBJECTIVES.items():
        settings = text_settings(out, steps) | {"objective": {"loss": loss}, "out": str(out / name), "seed": seed}
        settings["train"]["learning_rate"] = learning_rate
        configs[name] = load_config(None, settings=settings)
    print(introduction(parameter_count(TEACHER), parameter_count(out / "student"), steps))
    for number, (name, config) in enumerate(configs.items(), start=1):
        print(f"\nrun {number} of {len(configs)}, {config.out}: {PURPOSES[name]}")
        distill(config, later_steps=steps * (len(configs) - number))
    session = prepare(configs["distilled"], announce=False)
    models, held_out, spec = session.models, session.data.evaluation, session.loss.spec
    assert models.teacher is not None
    assert held_out is not None
    runner = single_process_runner(models.teacher, models.teacher)
    engine = TorchEngine(runner, spec, autocast=models.engine.autocast)
    models = replace(models, engine=engine, source=InStageTeacher())
    teacher_metrics = held_out_metrics(models, held_out, spec, session.schedule.held_out_tokens)
    measured = {"teacher": (TEACHER, teacher_metrics | {"tokens": 0, "seconds": 0.0})}
    for name, config in configs.items():
        lines = map(json.loads, (Path(config.out) / "metrics.jsonl").read_text().splitlines())
        last = [record for record in lines if "eval/cross_entropy" in record][-1]
        measured[name] = Path(config.out) / "model", last
    rows = []
    for name, (model, metrics) in measured.items():
        figures = {figure: metrics[f"eval/{figure}"] for figure in ("cross_entropy", "forward_kl", "agreement")}
        counts = {count: metrics[count] for count in ("tokens", "seconds")}
        rows.append({"run": name, "parameters": parameter_count(model)} | figures | counts)
    print("\n" + aligned_rows(rows))
    distilled, text_only = (configs[name].out for name in ("distilled", "cross_entropy"))
    print(f"\nfor a run of your own with these models, edit {trial}, then start `stillhouse distill {trial}`")
    print(conclusion(*rows[1:]))
    arguments = ["--label", "report: ", distilled, "--compare", text_only, "--out", f"{distilled}/report.html"]
    load("stillhouse.commands", "report").main(arguments, standalone_mode=False)
    return rows


def parameter_count(model: Path) -> int:
    """Return the number of parameters in a model's folder; tied weights count once."""
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        return sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118


def introduction(teacher: int, student: int, steps: int) -> str:
    """Describe the demo before its runs. teacher, student: the numbers of parameters. steps: the steps of a run."""
    return (
        f"The demo trains a small language model, the student ({student:,} parameters), on Python's documentation.\n"
        f"It trains the same new student twice, {steps:,} steps each: first on the text alone, then with a teacher.\n"
        f"The teacher has {teacher:,} parameters and was trained on other parts of the documentation.\n"
        "At the end, the demo compares both students on text that no model was trained on."
    )


def conclusion(text_only: Row, distilled: Row) -> str:
    """Compare the held-out cross-entropies of the two students in a sentence."""
    values = text_only["cross_entropy"], distilled["cross_entropy"]
    gain = values[0] - values[1]
    return (
        f"The distilled student's held-out cross-entropy is {abs(gain):.2f} nats per token "
        f"{'lower' if gain > 0 else 'higher'} than without a teacher ({values[1]:.2f} instead of {values[0]:.2f})."
    )


def aligned_rows(rows: list[Row]) -> str:
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
