"""A run with two teachers of different widths, and texts of which each is the subject of one of them."""

from pathlib import Path

from kit.runs import save_model, write_records, write_run

SUBJECTS = ("math", "code")
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
