"""A run with two teachers of different widths, and texts of which each is the subject of one of them."""

import json
from pathlib import Path
from typing import Any

from kit.runs import save_model, session_of, write_records, write_run

from stillhouse.loops.session import Session

LOSS = {"objective.loss": "0.3*cross_entropy + 0.7*jsd(0.5)", "data.eval": 0.0}
SUBJECTS = ("math", "code")
PREFIXES = {"math": "You know the answer: {answer}. ", "code": "{answer}! "}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def write_subject_teachers(folder: Path, *, tied: bool | None = None) -> Path:
    """Write a run whose column `subject` names the teacher of a text; `answer` is for a prefix. tied: the student."""
    records = [
        {
            "text": f"{number} " + " ".join(WORDS[number % 7 : number % 7 + 1 + number % 5]),
            "subject": SUBJECTS[number % 3 == 0],
            "answer": WORDS[number % 11],
        }
        for number in range(40)
    ]
    write_records(folder / "train.jsonl", records)
    write_run(folder, tied=tied)
    save_model(folder / "math", "qwen3", seed=5)
    save_model(folder / "code", "llama", seed=6, tied=False)
    return folder


def named(folder: Path, math: dict[str, Any] | None = None, code: dict[str, Any] | None = None) -> dict[str, Any]:
    """The settings of both teachers; None leaves one out."""
    by_teacher = {"math": math, "code": code}
    return {
        f"teachers.{name}": {"model": str(folder / name), **keys} if not {"url", "student"} & keys.keys() else keys
        for name, keys in by_teacher.items()
        if keys is not None
    }


def answer_of(source: str, folder: Path) -> str:
    """The column `answer` of the record at `file:line`."""
    line = int(source.rpartition(":")[2].partition(" ")[0])
    return json.loads((folder / "train.jsonl").read_text().splitlines()[line - 1])["answer"]


def session_with(folder: Path, **settings: Any) -> Session:
    return session_of(folder, cached=True, **LOSS, **settings)
