"""The files of a run to try: models, data and a configuration to edit. Nothing is downloaded or trained."""

from pathlib import Path
from typing import Any

from stillhouse.config.yaml_text import write_yaml
from stillhouse.tools.demo.corpus import collect_split, write_jsonl
from stillhouse.tools.demo.student import TEACHER, save_new_student

#: the best of 2e-3, 3e-3 and 4e-3 for the demo's student that trains without a teacher (docs/log.md)
LEARNING_RATE = 3e-3
#: steps of the run to try, which takes about two minutes on two cores
TRIAL_STEPS = 200

_HEADER = """\
# {what}.
# Change any key in this file, or on the command line, such as {key}; docs/config.md has all keys.
# A folder holds one run: for another one, change `out` as well.
"""


def write_text_run(folder: Path, seed: int = 0) -> Path:
    """Write the demo's texts, its new student, and run.yaml, unless there is one; returns the path of run.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(collect_split("student"), folder / "train.jsonl")
    write_jsonl(collect_split("held_out"), folder / "held_out.jsonl")
    save_new_student(folder / "student", seed)
    settings = text_settings(folder, TRIAL_STEPS) | {"out": str(folder / "first")}
    what = "The demo's student learns from the demo's teacher"
    return write_configuration(folder / "run.yaml", what, "train.steps=50", settings)


def text_settings(folder: Path, steps: int) -> dict[str, Any]:
    """The configuration of a run with the demo's models and texts, without its key `out`."""
    return {
        "student": {"model": str(folder / "student")},
        "teacher": {"model": str(TEACHER), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "held_out.jsonl"), "max_tokens": 256},
        "objective": {"loss": "forward_kl"},
        "train": {
            "tokens_per_step": 1024,
            "micro_batch_tokens": 1024,
            "steps": steps,
            "learning_rate": LEARNING_RATE,
            "warmup": 0.1,
            "weight_decay": 0.1,
            "precision": "fp32",
        },
        "eval": {"every": max(1, steps // 3), "micro_batch_tokens": 4096, "samples": 4},
        "checkpoint": {"every": 0, "keep": 1},
    }


def write_configuration(path: Path, what: str, key: str, settings: dict[str, Any]) -> Path:
    """Write a configuration, unless it exists, because the user may have changed it."""
    if not path.exists():
        path.write_text(_HEADER.format(what=what, key=key) + write_yaml(settings), encoding="utf-8")
    return path
