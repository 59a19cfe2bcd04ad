"""The files of a run to try: models, data and a configuration to edit. Nothing is downloaded or trained."""

from pathlib import Path
from typing import Any

from stillhouse.config.yaml_text import write_yaml
from stillhouse.images import digit_models
from stillhouse.images.digit_strips import parquet_file
from stillhouse.tools.demo.corpus import collect_split, write_jsonl
from stillhouse.tools.demo.student import TEACHER, save_new_student

#: the best of 2e-3, 3e-3 and 4e-3 for the demo's student that trains without a teacher (docs/log.md)
LEARNING_RATE = 3e-3
#: steps of the run to try, which takes about two minutes on two cores
TRIAL_STEPS = 200
#: numbers of pictures, and steps of the teacher and of the student
PICTURES, HELD_OUT_PICTURES, TEACHER_STEPS, STUDENT_STEPS = 8_000, 200, 400, 500
_ALL_PARTS = ["language", "projector", "vision"]

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
    return _write_configuration(folder / "run.yaml", what, "train.steps=50", settings)


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


def write_image_run(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write pictures of digits, two new vision-language models, teacher.yaml and run.yaml, unless they exist.

    teacher.yaml trains the larger model by cross-entropy, and run.yaml distills the result into the smaller one.
    Returns the paths of the two. Raises ValueError if Pillow is not installed.
    """
    pictures = {
        name: parquet_file(seed, count, held_out=name == "held_out")
        for name, count in (("train", PICTURES), ("held_out", HELD_OUT_PICTURES))
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in pictures.items():
        (folder / f"{name}.parquet").write_bytes(content)
    for name, sizes in (("new_teacher", digit_models.TEACHER), ("student", digit_models.STUDENT)):
        digit_models.save(digit_models.new_model(*sizes, seed), folder / name)
    of_teacher = _image_settings(folder, "new_teacher", TEACHER_STEPS, 1e-3)
    of_teacher |= {"objective": {"loss": "cross_entropy"}, "out": str(folder / "teacher")}
    of_student = _image_settings(folder, "student", STUDENT_STEPS, 2e-3)
    of_student |= {"teacher": {"model": str(folder / "teacher" / "model"), "dtype": "float32"}}
    of_student |= {"objective": {"loss": "forward_kl"}, "out": str(folder / "first")}
    key = "train.learning_rate=5e-4"
    what = "A vision-language model learns to read digits; it is the teacher of run.yaml"
    teacher = _write_configuration(folder / "teacher.yaml", what, key, of_teacher)
    what = "A vision-language student learns from the model that teacher.yaml trains"
    return teacher, _write_configuration(folder / "run.yaml", what, key, of_student)


def _image_settings(folder: Path, student: str, steps: int, learning_rate: float) -> dict[str, Any]:
    return {
        "student": {"model": str(folder / student), "train": _ALL_PARTS},
        "data": {"train": str(folder / "train.parquet"), "eval": str(folder / "held_out.parquet"), "max_tokens": 64},
        "train": {
            "tokens_per_step": 1600,
            "micro_batch_tokens": 1600,
            "steps": steps,
            "learning_rate": learning_rate,
            "warmup": 0.1,
            "precision": "fp32",
        },
        "eval": {"every": 100, "samples": 4},
        "checkpoint": {"every": 0, "keep": 1},
    }


def _write_configuration(path: Path, what: str, key: str, settings: dict[str, Any]) -> Path:
    """Write a configuration, unless it exists, because the user may have changed it."""
    if not path.exists():
        path.write_text(_HEADER.format(what=what, key=key) + write_yaml(settings), encoding="utf-8")
    return path
