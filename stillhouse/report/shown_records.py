"""Prepares a run's records for the page: completions, the text of tokens, and the timeline of an on-policy run.

A text is shaded by divergence. Its invisible characters (newlines, tabs, control characters) get a mark, and nothing
else in it is changed. In all reports, shade 0 begins at 0 nats, and shade n > 0 begins at 2**(n - 6) nats.
In the timeline, each part of the job has a lane. Spans of one lane that overlap in time are in different rows.
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from stillhouse.display import counted, escaped
from stillhouse.output.records import (
    LANES,
    WAIT,
    EvalSample,
    HeldOutDocument,
    SampleRecord,
    SampleToken,
    TimelineSpan,
    Token,
)

STALEST = 12  # this and larger values of staleness are counted together
EVALUATIONS = 6  # the number of completions of a held-out prompt that are visible at first; the others are folded
STEPS = 12  # the number of the trainer's steps that the timeline shows
ROWS = 8  # the maximum number of rows of a lane; if more spans overlap in time, their boxes overlap
STEP_LABELS = 8
SHORTEST = 1e-4  # seconds; no timeline is drawn for a shorter time
WHAT = 60  # the maximum number of characters of a span's name
# The lower bounds in nats of all shades but the first. The style sheet has a colour per shade: --kl-0 … --kl-8.
SHADES = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
#: the mark of each control character: Unicode has its control pictures in the order of the characters
_MARKS = {chr(code): chr(0x2400 + code) for code in range(0x20)} | {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def step_summary(samples: Sequence[SampleRecord]) -> str:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    targets = [token for sample in samples for token in sample.tokens if token.target]
    divergences = [token.divergence for token in targets if token.divergence is not None]
    facts = [counted(len(samples), "completion")]
    if rewards:
        facts.append(f"mean reward {sum(rewards) / len(rewards):.3g}")
    facts.append(f"mean length {sum(sample.length for sample in samples) / len(samples):,.0f}")
    if divergences:
        facts.append(f"mean divergence {sum(divergences) / len(divergences):.3g} nats")
    return ", ".join(facts)


def shown_tokens(sample: SampleRecord) -> Iterator[tuple[SampleToken, str, bool]]:
    """Yield (token, its facts, whether the previous token was generated with other weights)."""
    before = None
    for token in sample.tokens:
        parts = [] if token.target else ["not a target"]
        if token.divergence is not None:
            parts.append(f"{token.divergence:.3g} nats")
        if token.version is not None:
            parts.append(f"version {token.version}")
        yield token, ", ".join(parts), before is not None and token.version not in (None, before)
        before = token.version


def staleness_rows(counts: Mapping[int, int]) -> list[tuple[str, int, float]]:
    """Return (staleness in steps, completions, share of all completions) for each staleness up to the largest."""
    rows = {str(steps): counts.get(steps, 0) for steps in range(min(max(counts, default=-1) + 1, STALEST))}
    oldest = sum(count for steps, count in counts.items() if steps >= STALEST)
    if oldest:
        rows[f"{STALEST} or more" if max(counts) > STALEST else str(STALEST)] = oldest
    return [(steps, count, count / sum(counts.values())) for steps, count in rows.items()]


def over_time(samples: Sequence[EvalSample]) -> list[tuple[EvalSample, list[EvalSample], list[EvalSample]]]:
    """Return for each held-out prompt: the last completion, the visible completions, the folded completions."""
    by_prompt: dict[tuple[str, int], list[EvalSample]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.key, sample.number, sample.step)):
        by_prompt.setdefault((sample.key, sample.number), []).append(sample)
    prompts = []
    for completions in by_prompt.values():
        count = min(EVALUATIONS, len(completions))
        # evenly spaced completions, including the first and the last one
        chosen = {round(index * (len(completions) - 1) / max(1, count - 1)) for index in range(count)}
        folded = [sample for index, sample in enumerate(completions) if index not in chosen]
        prompts.append((completions[-1], [completions[index] for index in sorted(chosen)], folded))
    return prompts


def shade_class(nats: float | None, target: bool = True) -> str:
    """Return the style class of a token; "" if it has no divergence or is not a target."""
    return f"k{bisect.bisect_right(SHADES, nats)}" if target and nats is not None else ""


def label(text: str) -> str:
    """Return a token's text on one line, with visible spaces."""
    return "".join("␣" if character == " " else _MARKS.get(character, character) for character in text) or "∅"


def pieces(text: str) -> list[tuple[str, str]]:
    """Split the text at characters that need a mark; return pairs (text, mark). Either part of a pair may be empty.

    A newline or a tab has a mark, and is also kept as the text of its pair.
    """
    if not text:
        return [("", "∅")]
    parts = [("", "")]
    for character in text:
        if mark := _MARKS.get(character):
            parts.append((character if character in "\n\t" else "", mark))
        elif parts[-1][1]:
            parts.append((character, ""))
        else:
            parts[-1] = (parts[-1][0] + character, "")
    return [part for part in parts if part != ("", "")]


def mean_kl(document: HeldOutDocument) -> float | None:
    """Return the mean KL of the targets in nats per token; None if no target has a KL."""
    divergences = [token.kl for token in document.tokens if token.target and token.kl is not None]
    return sum(divergences) / len(divergences) if divergences else None


def readout(token: Token, names: list[str]) -> list[object]:
    """Return the values that the page shows when the pointer is on the token:

    [label, KL, teacher's top, student's top, for each term in `names` [value, gradient, raises, lowers] or null]
    """

    def labelled(pairs: list[tuple[str, float]]) -> list[list[object]]:
        return [[label(text), round(value, 5)] for text, value in pairs]

    terms: list[list[object] | None] = []
    for term in map(token.terms.get, names):
        if term is not None:
            figures = [float(f"{value:.4g}") for value in (term.value, term.gradient)]
            terms.append([*figures, labelled(term.raises), labelled(term.lowers)])
        else:
            terms.append(None)
    kl = None if token.kl is None else float(f"{token.kl:.4g}")
    return [label(token.text), kl, labelled(token.teacher), labelled(token.student), terms]


class Box(NamedTuple):
    """One span in the timeline. left, width: in percent of the shown time."""

    left: float
    width: float
    row: int
    label: str
    title: str
    waits: bool
    odd: bool


class Lane(NamedTuple):
    """A lane. shares: its activities, each with its percentage of the shown time; the percentages add up to 100."""

    name: str
    boxes: list[Box]
    rows: int
    shares: list[tuple[str, int]]


class ShownTimeline(NamedTuple):
    """The timeline that the page shows.

    first, last: the range of shown steps.
    start, seconds: the shown time, in seconds of the run.
    waiting: the seconds that the trainer waited in its steps, divided by the seconds of its steps. This is the mean
        of `speed/waiting`, weighted by the seconds of the steps. None if there is no trainer.
    marks (of steps), ticks (of times): pairs (left in percent, text).
    """

    first: int
    last: int
    start: float
    seconds: float
    waiting: float | None
    lanes: list[Lane]
    marks: list[tuple[float, str]]
    ticks: list[tuple[float, str]]


def timeline(spans: Sequence[TimelineSpan]) -> ShownTimeline | None:
    """Return the timeline of the trainer's last steps, or of the last steps of all lanes if there is no trainer."""
    step_spans = [span for span in spans if span.lane == "trainer"] or list(spans)
    shown = sorted({span.step for span in step_spans})[-STEPS:]
    begins = {step: min(span.start for span in step_spans if span.step == step) for step in shown}
    if not shown:
        return None
    start = min(begins.values())
    inside = [span for span in spans if span.stop > start]
    seconds = max((span.stop for span in inside), default=start) - start
    if seconds < SHORTEST:
        return None
    every = math.ceil(len(shown) / STEP_LABELS)
    marks = [
        (_percent(begins[step] - start, seconds), f"{step:,}" if index % every == 0 else "")
        for index, step in enumerate(shown)
    ]
    lanes = [_lane(name, [span for span in inside if span.lane == name], start, seconds) for name in LANES]
    trainer_spans = [span for span in inside if span.lane == "trainer"]
    in_steps = _covered(_whole_steps(trainer_spans), start)
    waits = [span for span in trainer_spans if span.what.startswith(WAIT)]
    waiting = _covered(waits, start) / in_steps if in_steps else None
    # at most six round times since the timeline's start
    power = 10 ** math.floor(math.log10(seconds / 5))
    distance = next(size * power for size in (1, 2, 5, 10) if seconds / (size * power) <= 5)
    times = [number * distance for number in range(int(seconds / distance) + 1)]
    ticks = [(_percent(time, seconds), f"{time:.6g} s") for time in times]
    return ShownTimeline(shown[0], shown[-1], start, seconds, waiting, lanes, marks, ticks)


def _lane(name: str, spans: list[TimelineSpan], start: float, seconds: float) -> Lane:
    boxes: list[Box] = []
    free_at: list[float] = []  # for each row, the end of its last span
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        row = next((row for row, free in enumerate(free_at) if free <= span.start), len(free_at))
        if row == ROWS:
            row = free_at.index(min(free_at))
        free_at[row:] = [span.stop, *free_at[row + 1 :]]
        begin = max(span.start, start)
        what = escaped(span.what if len(span.what) <= WHAT else f"{span.what[: WHAT - 3]}...")
        boxes.append(
            Box(
                left=_percent(begin - start, seconds),
                width=_percent(span.stop - begin, seconds),
                row=row,
                label=what,
                title=f"step {span.step:,}, {what}: {span.stop - span.start:.3g} s, "
                f"from {span.start:.2f} to {span.stop:.2f}",
                waits=name == "trainer" and span.what.startswith(WAIT),
                odd=span.step % 2 == 1,
            )
        )
    covered = _covered(_whole_steps(spans) if name == "trainer" else spans, start)
    if name == "trainer":
        waited = _covered([span for span in spans if span.what.startswith(WAIT)], start)
        parts = {"busy": covered - waited, "waiting": waited, "between its steps": seconds - covered}
    else:
        parts = {"busy": covered, "idle": seconds - covered}
    # whole percentages that add up to 100: the percentages with the largest remainders are rounded up
    exact = {part: 100 * part_seconds / seconds for part, part_seconds in parts.items()}
    whole = {part: math.floor(percent) for part, percent in exact.items()}
    for part in sorted(exact, key=lambda part: whole[part] - exact[part])[: 100 - sum(whole.values())]:
        whole[part] += 1
    return Lane(name, boxes, max(1, len(free_at)), list(whole.items()))


def _whole_steps(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Return one span for each step, from its first start to its last stop, without the time between two steps."""
    steps = dict[int, TimelineSpan]()
    for span in spans:
        step = steps.get(span.step, span)
        steps[span.step] = replace(span, start=min(step.start, span.start), stop=max(step.stop, span.stop))
    return list(steps.values())


def _covered(spans: list[TimelineSpan], start: float) -> float:
    """Return how many seconds after `start` are covered by at least one span."""
    covered, until = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.stop - max(span.start, until))
        until = max(until, span.stop)
    return covered


def _percent(part: float, total: float) -> float:
    return round(100 * part / total, 3)
