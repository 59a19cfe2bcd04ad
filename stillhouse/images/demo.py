"""The files of a run on images to try: pictures of digits, two new vision-language models and two configurations."""

from pathlib import Path
from typing import Any

from stillhouse.images import digit_models
from stillhouse.images.digit_strips import parquet_file
from stillhouse.tools.demo.run_files import write_configuration

#: numbers of pictures, and steps of the teacher and of the student
PICTURES, HELD_OUT_PICTURES, TEACHER_STEPS, STUDENT_STEPS = 8_000, 200, 400, 500
_ALL_PARTS = ["language", "projector", "vision"]


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
    teacher = write_configuration(folder / "teacher.yaml", what, key, of_teacher)
    what = "A vision-language student learns from the model that teacher.yaml trains"
    return teacher, write_configuration(folder / "run.yaml", what, key, of_student)


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
