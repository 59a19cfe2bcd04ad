"""The completions on the page: by token for steps of an on-policy run, and over time for held-out prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stillhouse.output.records import EvalSample, Sample, SampleToken

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


def shown_step(step: int, samples: Sequence[Sample]) -> ShownStep:
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


def _sample(sample: Sample) -> ShownSample:
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
