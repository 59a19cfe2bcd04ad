"""Tasks with verifiable answers. Their problems are generated from a seed.

Configurations and scripts use the names of this module, as in `rollout.reward: stillhouse.tasks:exact_match`. A new
task needs a function that makes its problems, and an entry in `TASKS`. A task, a seed and a number give the same
problem on every machine. The hash of a problem's prompt decides whether the problem is held out. So the training
split and the held-out split have no common problem, for any seeds and lengths.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: about this share of all problems is held out
HELD_OUT_SHARE = 0.2
#: the terms of sums are from 1 to this number
LARGEST_TERM = 19
LETTERS = "abcdefghijklmnopqrstuvwxyz"
BRACKETS = {"(": ")", "[": "]", "{": "}"}
#: the range of allowed lengths. There are too few shorter problems for two splits, and longer problems exceed the
#: context of small models
SHORTEST, LONGEST = 2, 256


@dataclass(frozen=True)
class TaskSpec:
    """The name of a task, and the smallest and largest length of its problems.

    Raises ValueError for an unknown name and for lengths that are not in order or out of range.
    """

    name: str
    shortest: int
    longest: int

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise ValueError(f"got task {self.name!r}, expected one of {', '.join(TASKS)}")
        if not SHORTEST <= self.shortest <= self.longest <= LONGEST:
            raise ValueError(
                f"got lengths {self.shortest}:{self.longest} for task {self.name}, expected a range from {SHORTEST} "
                f"to {LONGEST}, the smaller number first, such as 2:6"
            )

    @classmethod
    def parse(cls, text: str) -> "TaskSpec":
        """Read a task from a text, `name` or `name(shortest:longest)`."""
        match = re.fullmatch(r"([^(]*)(?:\((.*)\))?", text, re.DOTALL)
        if match is None:
            raise ValueError(f"got task {text!r}, expected a name, or a name with lengths such as sums(2:4)")
        return cls.of(match[1], match[2])

    @classmethod
    def of(cls, name: str, lengths: str | None = None) -> "TaskSpec":
        """Return a task by its name. lengths: a range such as 2:6, or None for the task's default lengths."""
        if lengths is None:
            return cls(name, *(TASKS[name].lengths if name in TASKS else (SHORTEST, LONGEST)))
        match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", lengths)
        if match is None:
            raise ValueError(f"got lengths {lengths!r} for task {name}, expected shortest:longest, such as 2:6")
        return cls(name, int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Problem:
    """A prompt with its only right answer.

    length: the number of terms of a sum, of letters to reverse, or of brackets to close.
    """

    prompt: str
    answer: str
    length: int

    def record(self, task: str) -> dict[str, str | int]:
        """Return the problem as a record of training data."""
        return {"prompt": self.prompt, "completion": self.answer, "task": task, "length": self.length}


def problem(task: TaskSpec, seed: int, number: int, *, held_out: bool) -> Problem:
    """Return problem `number` of a split. Consecutive numbers cycle through the lengths of the task.

    Problems with different numbers may be equal. This is likely only for short lengths, with few possible problems.

    held_out: whether the problem is from the held-out split or, if it is false, from the training split.
    """
    length = task.shortest + number % (task.longest - task.shortest + 1)
    random = RandomNumbers(task.name, seed, number)
    while True:
        prompt, answer = TASKS[task.name].write(random, length)
        if is_held_out(task.name, prompt) == held_out:
            return Problem(prompt, answer, length)


def is_held_out(task: str, text: str) -> bool:
    """Return whether a problem is in the held-out split.

    text: a text that identifies the problem in its task, such as its prompt.
    """
    digest = hashlib.sha256(f"{task}\n{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < int(HELD_OUT_SHARE * 2**64)


def exact_match(prompt: str, completion: str, record: Mapping[str, Any]) -> float:
    """Return 1 if a completion (without special tokens) equals the record's completion, and 0 if not. This is a
    function for `rollout.reward`.

    The completion of a record with `messages` is the text of the last message. White space around the two texts is
    ignored.
    """
    answer = record["completion"] if "completion" in record else record["messages"][-1]["content"]
    text = answer if isinstance(answer, str) else "".join(part["text"] for part in answer)
    return float(completion.strip() == text.strip())


class RandomNumbers:
    """Random integers that are the same in all versions of numpy, because they are made from raw 64-bit integers."""

    def __init__(self, task: str, seed: int, number: int):
        import numpy as np  # not at the top: the configuration imports this module, and must not import numpy

        name = int.from_bytes(hashlib.sha256(task.encode()).digest()[:4], "big")
        self._bits = np.random.PCG64(np.random.SeedSequence([name, seed, number]))

    def below(self, end: int) -> int:
        """Return a random integer from 0 to end - 1. The modulo bias is below 2**-56 if `end` is at most 256."""
        return int(self._bits.random_raw()) % end


def _sum(random: RandomNumbers, length: int) -> tuple[str, str]:
    """Return a prompt such as `3+14-5=`, and its answer `12`."""
    total = 1 + random.below(LARGEST_TERM)
    text = str(total)
    for _ in range(length - 1):
        sign, term = 1 - 2 * random.below(2), 1 + random.below(LARGEST_TERM)
        total += sign * term
        text += f"{'+' if sign > 0 else '-'}{term}"
    return f"{text}=", str(total)


def _reversal(random: RandomNumbers, length: int) -> tuple[str, str]:
    """Return a prompt such as `reverse: abcde =`, and its answer `edcba`."""
    letters = "".join(LETTERS[random.below(len(LETTERS))] for _ in range(length))
    return f"reverse: {letters} =", letters[::-1]


def _brackets(random: RandomNumbers, length: int) -> tuple[str, str]:
    """Return a prompt such as `close: ([]{ =`, and its answer `})`. About half of the open brackets follow a closed
    pair, such as `[]`.
    """
    kinds, text, answer = list(BRACKETS), "", ""
    for _ in range(length):
        if random.below(2):
            pair = kinds[random.below(len(kinds))]
            text += pair + BRACKETS[pair]
        kind = kinds[random.below(len(kinds))]
        text, answer = text + kind, BRACKETS[kind] + answer
    return f"close: {text} =", answer


@dataclass(frozen=True)
class Task:
    """A task. lengths: the default range, (shortest, longest). write: (random numbers, length) → (prompt, answer)."""

    lengths: tuple[int, int]
    write: Callable[[RandomNumbers, int], tuple[str, str]]


TASKS = {"sums": Task((2, 6), _sum), "reversal": Task((2, 12), _reversal), "brackets": Task((2, 12), _brackets)}
