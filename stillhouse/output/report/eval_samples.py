"""Held-out prompts with the student's completions at each evaluation, from eval_samples.jsonl."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from stillhouse.output.report.marks import pieces
from stillhouse.output.report.validation import json_lines, validated

STEPS = 6  # evaluations of a prompt that are shown directly; those between them are folded away
LINES = 4000  # of the file: the newest ones


class EvalSample(BaseModel):
    """One line of the file. reference: how the held-out document goes on. tokens: of the whole completion."""

    step: int = Field(ge=0)
    number: int = Field(ge=0)
    source: str
    prompt: str
    reference: str
    completion: str
    tokens: int = Field(ge=0)
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """What the student wrote at one evaluation. same: it is how the document goes on."""

    step: int
    pieces: list[tuple[str, str]]
    fact: str
    same: bool


@dataclass(frozen=True)
class Prompt:
    """A prompt with its completions, in the order of steps. folded: those of further evaluations."""

    source: str
    prompt: list[tuple[str, str]]
    reference: list[tuple[str, str]]
    shown: list[Completion]
    folded: list[Completion]


def read_eval_samples(path: Path, *, expected: bool) -> tuple[list[EvalSample], list[str]]:
    """Return the samples of a run, and notes for the page. expected: whether a missing file is noted.

    Raises ValueError for a malformed line, with file and line.
    """
    notes: list[str] = []
    if not path.is_file():
        return [], [f"{path.name} is missing: the student's completions of held-out prompts."] if expected else []
    samples = [validated(EvalSample, value, where) for where, _, value in json_lines(path, notes)]
    return samples[-LINES:], notes


def over_time(samples: list[EvalSample]) -> list[Prompt]:
    """Return the prompts with their completions."""
    numbers = sorted({each.number for each in samples})
    return [_prompt([each for each in samples if each.number == number]) for number in numbers]


def _prompt(samples: list[EvalSample]) -> Prompt:
    ordered = sorted(samples, key=lambda each: each.step)
    count = min(STEPS, len(ordered))
    # evenly chosen, with the first and the last one
    chosen = {round(at * (len(ordered) - 1) / max(1, count - 1)) for at in range(count)}
    completions = [_completion(each) for each in ordered]
    last = ordered[-1]
    return Prompt(
        last.source,
        pieces(last.prompt),
        pieces(last.reference),
        [each for at, each in enumerate(completions) if at in chosen],
        [each for at, each in enumerate(completions) if at not in chosen],
    )


def _completion(sample: EvalSample) -> Completion:
    ended = "" if sample.finish == "stop" else ", cut"
    same = sample.completion == sample.reference
    return Completion(sample.step, pieces(sample.completion), f"{sample.tokens:,} tokens{ended}", same)
