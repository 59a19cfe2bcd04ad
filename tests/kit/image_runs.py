"""Runs whose data has images: conversations about pictures, and models that read them."""

import json
from pathlib import Path
from typing import Any

from kit.image_models import picture, write_image_model
from kit.runs import write_records

SETTINGS = {"data.max_tokens": 160, "train.tokens_per_step": 640, "train.micro_batch_tokens": 320}
RECORDS = 24


def turns_of(number: int) -> list[dict[str, Any]]:
    """A conversation with the picture `number`.png; without one if the number is a multiple of 3."""
    image = [{"type": "image", "image": f"{number}.png"}] if number % 3 else []
    question = [{"type": "text", "text": f"what is {number}?"}, *image]
    answer = [{"type": "text", "text": f"number {number}"}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_data(folder: Path) -> None:
    for number in range(RECORDS):
        picture(number, 8 + 4 * (number % 4), 8 + 4 * (number % 3)).save(folder / f"{number}.png")
    lines = [json.dumps({"messages": turns_of(number)}) for number in range(RECORDS)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "eval.jsonl").write_text("\n".join(lines[:4]))


def write_image_run(folder: Path, family: str) -> None:
    """Write a student, a teacher and data with images. The settings are `SETTINGS`."""
    for seed, name in enumerate(("student", "teacher")):
        write_image_model(family, folder / name, seed=seed)
    write_data(folder)


def write_on_policy(folder: Path, family: str, **settings: Any) -> dict[str, Any]:
    """Write models and prompts, every third one without an image; return the settings of a run."""
    write_image_model(family, folder / "student")
    write_image_model(family, folder / "teacher", seed=3)
    write_data(folder)
    records = [{"prompt": turns[:1], "completion": turns[1:]} for turns in map(turns_of, range(9))]
    write_records(folder / "train.jsonl", records)
    return {
        "data.max_tokens": 160,
        "data.eval": 0,
        "objective.loss": "reverse_kl",
        "train.tokens_per_step": 160,
        "train.micro_batch_tokens": 320,
        "train.steps": 2,
        "rollout.prompts_per_step": 6,
        "rollout.samples_per_prompt": 2,
        "rollout.max_new_tokens": 8,
        **settings,
    }
