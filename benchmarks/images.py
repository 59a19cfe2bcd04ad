"""A task that needs its images: a vision-language teacher reads strips of digits, and a small student learns it.

The teacher is a tiny Qwen3-VL with random weights that this project trains by cross-entropy. The student has the
teacher's vision tower, which stays frozen, with a new projector and a new, small language model. It is trained twice
on the same pictures, in the same steps of equal tokens:

    distilled     forward KL to the teacher over the whole vocabulary
    SFT           cross-entropy on the right answers

The result is the exact match on held-out strips, by plain transformers, also with black pictures of the same sizes.

    python -m benchmarks.images        # about 15 minutes on one quiet core

Writes benchmarks/results/images-<date>.json and prints a table. With --keep, runs that
were finished before are not repeated.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.digit_models import TEACHER, exact_matches, new_model, new_student, parameters, save
from benchmarks.digit_pictures import parquet_file
from benchmarks.record import result_file, write_result
from benchmarks.training_runs import run_config
from stillhouse.run.run import distill

TEACHER_PICTURES, STUDENT_PICTURES, HELD_OUT = 16_000, 4_000, 600
TEACHER_STEPS, STUDENT_STEPS = 600, 400
COMMON: dict[str, Any] = {
    "data.eval": 0,
    "data.max_tokens": 64,
    "train.tokens_per_step": 1600,
    "train.micro_batch_tokens": 1600,
    "train.warmup": 50,
    "train.precision": "fp32",
    "train.learning_rate": 1e-3,
    "checkpoint.every": 0,
    "device": "cpu",
}
WAYS = {"distilled": "forward_kl", "SFT": "cross_entropy"}


def run(out: Path, settings: dict[str, Any]) -> Path:
    """One run, unless it is complete; returns the folder of its last model."""
    distill(run_config(COMMON | settings | {"out": str(out)}))
    return out / "model"


def write_pictures(path: Path, seed: int, count: int) -> Path:
    if not path.exists():
        path.write_bytes(parquet_file(seed, count, held_out=False))
    return path


def train_teacher(folder: Path) -> Path:
    """Train a new model on all its parts by cross-entropy, and return its folder."""
    start = folder / "new-teacher"
    if not start.exists():
        save(new_model(*TEACHER, 0), start)
    settings = {
        "student.model": str(start),
        "student.train": ["language", "projector", "vision"],
        "data.train": str(write_pictures(folder / "teacher.parquet", 0, TEACHER_PICTURES)),
        "objective.loss": "cross_entropy",
        "train.steps": TEACHER_STEPS,
    }
    return run(folder / "teacher", settings)


def train_students(folder: Path, teacher: Path, seed: int) -> dict[str, Path]:
    """Train a new student in each way on the same pictures, and return the folders of the models."""
    folder.mkdir(parents=True, exist_ok=True)
    start = folder / "new-student"
    if not start.exists():
        save(new_student(teacher, seed), start)
    settings = {
        "student.model": str(start),
        "student.train": ["language", "projector"],
        "data.train": str(write_pictures(folder / "student.parquet", seed, STUDENT_PICTURES)),
        "train.steps": STUDENT_STEPS,
        "seed": seed,
    }
    teachers = {"distilled": {"teacher.model": str(teacher)}, "SFT": {}}
    return {
        name: run(folder / name, settings | teachers[name] | {"objective.loss": loss}) for name, loss in WAYS.items()
    }


def figures_of(model: Path) -> dict[str, Any]:
    return {
        "parameters": parameters(model),
        "exact match": exact_matches(model, HELD_OUT),
        "black pictures": exact_matches(model, HELD_OUT, black=True),
    }


def table(figures: dict[str, list[dict[str, Any]]]) -> str:
    """figures: those of each seed, by the name of the model."""
    lines = [
        "| | parameters | exact match: mean (each seed) | with black pictures, largest |",
        "| --- | --- | --- | --- |",
    ]
    for name, of_seeds in figures.items():
        shares = [of["exact match"]["all"] for of in of_seeds]
        black = max(of["black pictures"]["all"] for of in of_seeds)
        each = ", ".join(f"{share:.3f}" for share in shares)
        lines.append(f"| {name} | {of_seeds[0]['parameters']:,} | {fmean(shares):.3f} ({each}) | {black:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        teacher = train_teacher(folder)
        students = [train_students(folder / f"seed{seed}", teacher, seed) for seed in arguments.seeds]
        figures = {"teacher": [figures_of(teacher)]}
        figures |= {name: [figures_of(models[name]) for models in students] for name in WAYS}
    print(table(figures))
    settings = {
        "task": "digits(2:4)",
        "settings": COMMON,
        "steps": {"teacher": TEACHER_STEPS, "student": STUDENT_STEPS},
    }
    pictures = {"teacher": TEACHER_PICTURES, "student": STUDENT_PICTURES, "held out": HELD_OUT}
    write_result(
        result_file("images"), settings | {"pictures": pictures, "seeds": arguments.seeds, "figures": figures}
    )


if __name__ == "__main__":
    main()
