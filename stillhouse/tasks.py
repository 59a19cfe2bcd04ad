"""Tasks with verifiable answers. Their problems are generated from a seed.

Configurations and scripts use the names of this module, as in `rollout.reward: stillhouse.tasks:exact_match`. A new
task is a function and its entry in `TASKS`. A task, a seed and a number give the same problem on every machine. The
hash of a problem's prompt decides whether the problem is held out. Therefore no problem is in both splits, for any
seeds and lengths.
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
#: limits of lengths: too few shorter problems exist for two splits; longer ones exceed the context of small models
SHORTEST, LONGEST = 2, 256


@dataclass(frozen=True)
class TaskSpec:
    """A task and the range of lengths of its problems, inclusive.

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
        """A task from `name` or `name(shortest:longest)`."""
        match = re.fullmatch(r"([^(]*)(?:\((.*)\))?", text, re.DOTALL)
        if match is None:
            raise ValueError(f"got task {text!r}, expected a name, or a name with lengths such as sums(2:4)")
        return cls.of(match[1], match[2])

    @classmethod
    def of(cls, name: str, lengths: str | None = None) -> "TaskSpec":
        """A task from its name and `lengths`, such as 2:6. If `lengths` is None, the task has its default lengths."""
        if lengths is None:
            return cls(name, *(TASKS[name].lengths if name in TASKS else (SHORTEST, LONGEST)))
        match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", lengths)
        if match is None:
            raise ValueError(f"got lengths {lengths!r} for task {name}, expected shortest:longest, such as 2:6")
        return cls(name, int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Problem:
    """A prompt with its only right answer.

    length: the number of a sum's terms, of letters to reverse, or of brackets to close.
    """

    prompt: str
    answer: str
    length: int

    def record(self, task: str) -> dict[str, str | int]:
        """The problem as a record of training data."""
        return {"prompt": self.prompt, "completion": self.answer, "task": task, "length": self.length}


def problem(task: TaskSpec, seed: int, number: int, *, held_out: bool) -> Problem:
    """Problem `number` of a split. With `number`, the length cycles through the range of lengths.

    Problems with different numbers may be equal. This is likely only for short lengths, because few problems exist.
    """
    length = task.shortest + number % (task.longest - task.shortest + 1)
    random = RandomNumbers(task.name, seed, number)
    while True:
        prompt, answer = TASKS[task.name].write(random, length)
        if is_held_out(task.name, prompt) == held_out:
            return Problem(prompt, answer, length)


def is_held_out(task: str, text: str) -> bool:
    """Whether a problem is in the held-out split. text: a text that identifies it in its task, such as its prompt."""
    digest = hashlib.sha256(f"{task}\n{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < int(HELD_OUT_SHARE * 2**64)


def exact_match(prompt: str, completion: str, record: Mapping[str, Any]) -> float:
    """1 if a completion (without special tokens) equals the record's completion, otherwise 0. For `rollout.reward`.

    The completion of a record with `messages` is the text of the last message. White space around the two texts is
    ignored.
    """
    answer = record["completion"] if "completion" in record else record["messages"][-1]["content"]
    text = answer if isinstance(answer, str) else "".join(part["text"] for part in answer)
    return float(completion.strip() == text.strip())


class RandomNumbers:
    """Random integers, made from raw 64-bit integers, which are the same in all versions of numpy."""

    def __init__(self, task: str, seed: int, number: int):
        import numpy as np  # here, because the configuration imports this module without numpy

        name = int.from_bytes(hashlib.sha256(task.encode()).digest()[:4], "big")
        self._bits = np.random.PCG64(np.random.SeedSequence([name, seed, number]))

    def below(self, end: int) -> int:
        """A random integer from 0 to end - 1. The modulo bias is below 2**-56, because `end` is small here."""
        return int(self._bits.random_raw()) % end


def _sum(random: RandomNumbers, length: int) -> tuple[str, str]:
    """`3+14-5=` with the answer `12`."""
    total = 1 + random.below(LARGEST_TERM)
    text = str(total)
    for _ in range(length - 1):
        sign, term = 1 - 2 * random.below(2), 1 + random.below(LARGEST_TERM)
        total += sign * term
        text += f"{'+' if sign > 0 else '-'}{term}"
    return f"{text}=", str(total)


def _reversal(random: RandomNumbers, length: int) -> tuple[str, str]:
    """`reverse: abcde =` with the answer `edcba`."""
    letters = "".join(LETTERS[random.below(len(LETTERS))] for _ in range(length))
    return f"reverse: {letters} =", letters[::-1]


def _brackets(random: RandomNumbers, length: int) -> tuple[str, str]:
    """`close: ([]{ =` with the answer `})`. About half of the open brackets follow a pair that is already closed."""
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
    """A task. lengths: its default (shortest, longest). write: (random numbers, length) → (prompt, answer)."""

    lengths: tuple[int, int]
    write: Callable[[RandomNumbers, int], tuple[str, str]]


TASKS = {"sums": Task((2, 6), _sum), "reversal": Task((2, 12), _reversal), "brackets": Task((2, 12), _brackets)}
