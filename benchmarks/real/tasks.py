"""Problems of reasoning-gym with their own verifiers, as chats that a small model understands."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

#: name → the task of reasoning-gym, its difficulty, and the sentence before its question
TASKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sums": ("chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 2}, "Answer with the number alone."),
    "divisors": ("gcd", {"max_value": 20}, "Answer with the number alone."),
    "long_words": ("spell_backward", {"min_word_len": 9, "max_word_len": 10}, "Answer with the word alone."),
}
#: the tasks that are learned; SmolLM2 gets no problem of long words right
LEARNED = "sums", "divisors"
#: problems of a task for training, and for the held-out figures
TRAINED, HELD_OUT = 300, 32


def problems(task: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Problems of a task with different questions; `entry` is what its verifier reads."""
    import reasoning_gym

    name, difficulty, instruction = TASKS[task]
    for entry in reasoning_gym.create_dataset(name, seed=seed, size=count, **difficulty):
        prompt = [{"role": "user", "content": f"{instruction} {entry['question']}"}]
        yield {"prompt": prompt, "completion": [{"role": "assistant", "content": entry["answer"]}], "entry": entry}


def write_problems(path: Path, names: Sequence[str]) -> None:
    """The problems for training, of several tasks in turn, without those that are held out."""
    held_out = {record["prompt"][0]["content"] for name in names for record in held_out_problems(name)}
    tasks = [problems(name, 1, TRAINED) for name in names]
    records = (record for turn in zip(*tasks, strict=True) for record in turn)
    lines = (json.dumps(record) + "\n" for record in records if record["prompt"][0]["content"] not in held_out)
    path.write_text("".join(lines), encoding="utf-8")


def held_out_problems(task: str) -> list[dict[str, Any]]:
    return list(problems(task, 0, HELD_OUT))


def score(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """The verifier's score, from 0 to 1: 1 for the right answer alone, less for one that is partly right."""
    return float(_verifier(record["entry"]["metadata"]["source_dataset"])(completion.strip(), record["entry"]))


def exact(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """1 for the right answer alone, 0 for any other."""
    return float(completion.strip() == record["entry"]["answer"])


@cache
def _verifier(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)
