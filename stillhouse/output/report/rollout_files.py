"""Reads timeline.jsonl and samples.jsonl, which on-policy runs write, without holding more of them than is shown.

Every line is checked. As in metrics.jsonl, only a last line without a newline may be unreadable; it is left out. The
lines of these files are not in the order of the steps.
"""

import json
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, field_validator

from stillhouse.output.report.validation import json_lines, validated

LANES = ("rollout", "teacher", "trainer", "weights")
OPTIONAL_FILES = {
    "timeline.jsonl": "what each part of the job did, and when the trainer waited",
    "samples.jsonl": "some of the completions that the run was trained on",
}
SPANS = 4000  # the newest ones, of which the page shows those of the last steps
STEPS = 200  # at most so many steps whose samples are shown
TOKENS = 40_000  # of all samples that are shown together: more make a page slow

_LARGEST = 2**53  # every smaller integer is a float, too


class Span(BaseModel):
    """One line of timeline.jsonl. start, stop: seconds of the run."""

    step: int = Field(ge=0, le=_LARGEST)
    lane: Literal["rollout", "teacher", "trainer", "weights"]
    what: str
    start: float = Field(ge=0, le=_LARGEST)
    stop: float = Field(ge=0, le=_LARGEST)

    @field_validator("stop")
    @classmethod
    def _not_before_start(cls, stop: float, info: Any) -> float:
        if stop < info.data.get("start", stop):
            raise ValueError(f"expected at least start, {info.data['start']}")
        return stop


class SampleToken(BaseModel):
    """One token of a completion. divergence: in nats, or None. version: of the weights that wrote it, or None."""

    text: str
    divergence: FiniteFloat | None
    version: int | None = Field(ge=-_LARGEST, le=_LARGEST)
    target: bool


class _SampleHead(BaseModel):
    """What is kept of every line of samples.jsonl."""

    step: int = Field(ge=0, le=_LARGEST)
    source: Literal["student", "dataset", "teacher"]
    staleness: int = Field(ge=0, le=_LARGEST)
    tokens: list[Any]


class Sample(_SampleHead):
    """One line of samples.jsonl. length: of the completion in tokens; `tokens` may be only the first of them."""

    prompt: str
    tokens: list[SampleToken]
    length: int = Field(ge=0, le=_LARGEST)
    reward: FiniteFloat | None
    advantage: FiniteFloat | None
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Rollouts:
    """What an on-policy run recorded.

    spans: the newest ones, in the order of the file. samples: of some steps, in the order of steps. sampled_steps:
    how many steps have samples. staleness: how many of the student's own completions in the file have which
    staleness.
    """

    spans: list[Span]
    samples: dict[int, list[Sample]]
    sampled_steps: int
    staleness: dict[int, int]


def read_rollouts(folder: Path, *, expected: bool) -> tuple[Rollouts | None, list[str]]:
    """Return what is in the two files, None if there are none; and notes for the page.

    expected: whether the run is an on-policy run, so that missing files are noted.

    Raises:
        ValueError: a line is malformed (with file and line).
    """
    notes: list[str] = []
    missing = [name for name in OPTIONAL_FILES if not (folder / name).is_file()]
    if expected or len(missing) < len(OPTIONAL_FILES):
        notes += [f"{name} is missing: {OPTIONAL_FILES[name]}." for name in missing]
    if len(missing) == len(OPTIONAL_FILES):
        return None, notes
    spans: deque[Span] = deque(maxlen=SPANS)
    for where, _, value in json_lines(folder / "timeline.jsonl", notes):
        spans.append(validated(Span, value, where))
    return Rollouts(list(spans), *_read_samples(folder / "samples.jsonl", notes)), notes


def _read_samples(path: Path, notes: list[str]) -> tuple[dict[int, list[Sample]], int, dict[int, int]]:
    places: dict[int, list[tuple[str, int, int]]] = {}  # by step, of each sample: line, offset, number of tokens
    staleness: Counter[int] = Counter()
    for where, offset, value in json_lines(path, notes):
        head = validated(_SampleHead, value, where)
        places.setdefault(head.step, []).append((where, offset, len(head.tokens)))
        if head.source == "student":
            staleness[head.staleness] += 1
    samples: dict[int, list[Sample]] = {}
    if places:
        with path.open("rb") as file:
            for step in _shown({step: sum(tokens for *_, tokens in each) for step, each in places.items()}):
                samples[step] = []
                for where, offset, _ in places[step]:
                    file.seek(offset)
                    samples[step].append(validated(Sample, json.loads(file.readline()), where))
    return samples, len(places), dict(sorted(staleness.items()))


def _shown(tokens: dict[int, int]) -> list[int]:
    """Choose at most `STEPS` steps with at most `TOKENS` tokens together, evenly. The last step is one of them.

    tokens: how many tokens the samples of each step have.
    """
    steps = sorted(tokens)
    count = min(STEPS, len(steps))
    while True:
        # from the end, so that the last step is chosen
        chosen = [steps[-1 - number * len(steps) // count] for number in range(count)]
        if count == 1 or sum(tokens[step] for step in chosen) <= TOKENS:
            return chosen[::-1]
        count -= max(1, count // 10)
