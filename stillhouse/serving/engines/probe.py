"""Tells by a few short completions with which weights a server writes: no other answer of a server proves it."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillhouse.generation.sample import Completion, Sampling

#: prompts after which the likeliest tokens tell one model from another
KNOWN_BY = ((1,), (2, 3), (5, 7, 11), (13, 17, 19, 23), (29, 31, 37, 41, 43), (47, 53), (59, 61, 67), (71,))
#: completions of a probe, and the most tokens of each
PROBES, PROBE_TOKENS = 4, 8
#: a difference of log-probabilities that rounding in bfloat16 stays below
ROUNDED = 0.1


@dataclass(frozen=True, eq=False)
class Probe:
    """What a server writes after each of some prompts with the version of this label.

    completions: drawn, for the trainer to score. likeliest: the likeliest token and its log-probability, which these
    weights give at any time and on any server.
    """

    label: str = ""
    completions: tuple[Completion, ...] = ()
    likeliest: tuple[tuple[int, float], ...] = ()


def probing(sampling: Sampling) -> Sampling:
    """How the completions of a probe are drawn. At a temperature of 1 and over all tokens, a server's
    log-probabilities are the model's own, however it was started; a likeliest token is often certain and says less.
    """
    return Sampling(min(PROBE_TOKENS, sampling.max_new_tokens), eos_ids=sampling.eos_ids)


def same_weights(
    before: Sequence[tuple[int, float]], now: Sequence[tuple[int, float]], most: float = ROUNDED
) -> bool:
    """Whether the likeliest tokens after the same prompts can be those of the same weights, but for rounding.

    Two tokens may be nearly as likely, so that most ids must be the same, and their log-probabilities. most: nats.
    """
    gaps = [abs(one[1] - other[1]) for one, other in zip(before, now, strict=False) if one[0] == other[0]]
    return len(before) == len(now) and 2 * len(gaps) > len(now) and max(gaps) < most
