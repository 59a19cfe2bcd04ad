"""The completions on the page, by token for steps of an on-policy run and over time for held-out prompts, and the
text of tokens, shaded by divergence.

The text is unchanged; invisible characters (newlines, tabs, control characters) get a mark. A shade represents a
range of nats, and each range begins at twice the beginning of the previous one. All reports have the same ranges, so
that they can be compared.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stillhouse.output.records import EvalSample, HeldOutDocument, HeldOutTokens, SampleRecord, SampleToken, Token

STALEST = 12  # this and larger values of staleness are counted together
EVALUATIONS = 6  # the number of completions of a held-out prompt that are visible at first; the others are folded


@dataclass(frozen=True)
class ShownSample:
    """tokens: (token, its facts, whether its version differs from the previous token's). cut: tokens not shown."""

    facts: list[str]
    prompt: str
    tokens: list[tuple[SampleToken, str, bool]]
    cut: int


@dataclass(frozen=True)
class ShownStep:
    step: int
    summary: str
    samples: list[ShownSample]


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt with its completions, in the order of steps."""

    last: EvalSample
    shown: list[EvalSample]
    folded: list[EvalSample]


def shown_step(step: int, samples: Sequence[SampleRecord]) -> ShownStep:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    targets = [token for sample in samples for token in sample.tokens if token.target]
    divergences = [token.divergence for token in targets if token.divergence is not None]
    facts = [f"{len(samples)} completions" if len(samples) > 1 else "1 completion"]
    if rewards:
        facts.append(f"mean reward {sum(rewards) / len(rewards):.3g}")
    facts.append(f"mean length {sum(sample.length for sample in samples) / len(samples):,.0f}")
    if divergences:
        facts.append(f"mean divergence {sum(divergences) / len(divergences):.3g} nats")
    return ShownStep(step, ", ".join(facts), [_sample(sample) for sample in samples])


def _sample(sample: SampleRecord) -> ShownSample:
    before = [None, *(token.version for token in sample.tokens)]
    tokens = [
        (token, _title(token), version is not None and token.version not in (None, version))
        for token, version in zip(sample.tokens, before, strict=False)
    ]
    return ShownSample(sample.facts, sample.prompt, tokens, max(0, sample.length - len(tokens)))


def _title(token: SampleToken) -> str:
    parts = [] if token.target else ["not a target"]
    if token.divergence is not None:
        parts.append(f"{token.divergence:.3g} nats")
    if token.version is not None:
        parts.append(f"version {token.version}")
    return ", ".join(parts)


def staleness_rows(counts: Mapping[int, int]) -> list[tuple[str, int, float]]:
    """Return (steps, completions, share) for each staleness up to the largest one."""
    rows = {str(steps): counts.get(steps, 0) for steps in range(min(max(counts, default=-1) + 1, STALEST))}
    oldest = sum(count for steps, count in counts.items() if steps >= STALEST)
    if oldest:
        rows[f"{STALEST} or more" if max(counts) > STALEST else str(STALEST)] = oldest
    return [(steps, count, count / sum(counts.values())) for steps, count in rows.items()]


def over_time(samples: Sequence[EvalSample]) -> list[Prompt]:
    """Return the held-out prompts with their completions."""
    by_prompt: dict[tuple[str, int], list[EvalSample]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.key, sample.number, sample.step)):
        by_prompt.setdefault((sample.key, sample.number), []).append(sample)
    return [_prompt(completions) for completions in by_prompt.values()]


def _prompt(completions: list[EvalSample]) -> Prompt:
    count = min(EVALUATIONS, len(completions))
    # evenly chosen, with the first and the last one
    chosen = {round(index * (len(completions) - 1) / max(1, count - 1)) for index in range(count)}
    folded = [sample for index, sample in enumerate(completions) if index not in chosen]
    return Prompt(completions[-1], [completions[index] for index in sorted(chosen)], folded)


# The lower bounds in nats of all shades but the first. The style sheet has a colour per shade: --kl-0 … --kl-8.
SHADES = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)

_MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def shade(nats: float) -> int:
    return bisect.bisect_right(SHADES, nats)


def shade_class(nats: float | None, target: bool) -> str:
    """Return the style class of a token; "" if it has no divergence or is not a target."""
    return f"k{shade(nats)}" if target and nats is not None else ""


def label(text: str) -> str:
    """Return a token's text on one line, with visible spaces."""
    marked = "".join("␣" if character == " " else _mark(character) or character for character in text)
    return marked or "∅"


def pieces(text: str) -> list[tuple[str, str]]:
    """Split the text at characters that need a mark; return pairs (text, mark). Either part of a pair may be empty.

    Newlines and tabs also stay in the text beside their mark.
    """
    if not text:
        return [("", "∅")]
    parts = [("", "")]
    for character in text:
        mark = _mark(character)
        if mark:
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


def term_names(held_out: HeldOutTokens) -> list[str]:
    """Return the terms of the objective whose gradients are known."""
    tokens = (token for document in held_out.documents for token in document.tokens)
    return list(dict.fromkeys(name for token in tokens for name in token.terms))


def readouts(held_out: HeldOutTokens, terms: list[str]) -> list[list[list[object]]]:
    """Return the values that the page shows for the token under the pointer, for each token of each document:

    [label, KL, teacher's top, student's top, for each of `terms` (value, gradient, raises, lowers) or null]
    """
    return [[_readout(token, terms) for token in document.tokens] for document in held_out.documents]


def _readout(token: Token, names: list[str]) -> list[object]:
    kl = None if token.kl is None else float(f"{token.kl:.4g}")
    terms = []
    for name in names:
        term = token.terms.get(name)
        figures = [] if term is None else [float(f"{value:.4g}") for value in (term.value, term.gradient)]
        terms.append(None if term is None else [*figures, _labelled(term.raises), _labelled(term.lowers)])
    return [label(token.text), kl, _labelled(token.teacher), _labelled(token.student), terms]


def _labelled(pairs: list[tuple[str, float]]) -> list[list[object]]:
    return [[label(text), round(value, 5)] for text, value in pairs]


def _mark(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    return chr(0x2400 + ord(character)) if ord(character) < 0x20 else ""  # the control pictures, in the same order
