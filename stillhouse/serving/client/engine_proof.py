"""Proves which log-probabilities a server of completions gives, and with which weights it generates.

Training needs log-probabilities after the temperature and over the full vocabulary. Some options of an engine change
the log-probabilities, and its answers do not show these options. A server's weights can be proved only by its
completions; a few short completions are enough.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stillhouse.rollout.records import Completion, Sampling

if TYPE_CHECKING:
    from stillhouse.serving.servers import HttpServer

#: prompts. The log-probabilities of the top tokens after them identify a model, and show the options of its server
PROMPTS = ((1,), (2, 3), (5, 7, 11), (13, 17, 19, 23), (29, 31, 37, 41, 43), (47, 53), (59, 61, 67), (71,))
#: the most tokens of a probe's completion
PROBE_TOKENS = 8
#: the number of requested top tokens: the gap between the first and the fifth is wider than to the second
TOP = 5
#: returns the log-probabilities of two or more top tokens after a prompt, in descending order
TopLogProbs = Callable[[Sequence[int], Sampling], list[float]]
#: if two options would give log-probabilities with a smaller difference, in nats, they cannot be distinguished
_APART = 0.02

_BEFORE = (
    "{url} gives log-probabilities before the temperature, and the temperature is {temperature:g}: expected "
    "{after_temperature}, or a temperature of 1"
)
_CUT = (
    "{url} gives log-probabilities among the tokens that top_p, top_k and min_p leave, and training needs those over "
    "the whole vocabulary: expected top_p=1, top_k=0 and min_p=0"
)
_UNPROVABLE = (
    "{url} writes every token with nearly the same probability or with certainty, so that it cannot be proved which "
    "log-probabilities it gives: expected a model that was trained, or a temperature of 1 and all tokens"
)


@dataclass(frozen=True, eq=False)
class Probe:
    """A server's completions of some prompts, generated with the version of the weights that `label` names.

    completions: sampled completions, which the trainer scores. top_tokens: for each prompt, the top token after it
    and its log-probability. Both depend only on the weights.
    """

    label: str = ""
    completions: tuple[Completion, ...] = ()
    top_tokens: tuple[tuple[int, float], ...] = ()


def probe_sampling(sampling: Sampling) -> Sampling:
    """The sampling of a probe's completions: temperature 1 and all tokens. So the server's options do not change the
    log-probabilities. Top tokens would prove less, because their probability is often nearly 1 for any weights.
    """
    return Sampling(min(PROBE_TOKENS, sampling.max_new_tokens), eos_ids=sampling.eos_ids)


def log_probs_sampling(sampling: Sampling) -> Sampling:
    """The part of a sampling on which the log-probabilities of a server may depend."""
    return replace(sampling, max_new_tokens=1, stop=(), eos_ids=())


def prove_log_probs(kind: "HttpServer", url: str, top: TopLogProbs, sampling: Sampling, vocabulary: int) -> None:
    """Raise ValueError unless the server's log-probabilities are those that `Completion` needs.

    The gap between the first and the last top token must be the gap at temperature 1, divided by the temperature. If
    a request has top_k=2 and the server normalises over two tokens, the first log-probability is too large.
    """
    temperature = sampling.temperature
    if temperature == 0 or (temperature == 1 and sampling.samples_all_tokens):
        return
    plain = Sampling(1, temperature=1.0)
    for prompt in PROMPTS:
        ids = [token % vocabulary for token in prompt]
        before = _top(url, top(ids, plain))
        after = _top(url, top(ids, replace(plain, temperature=temperature)))
        if temperature != 1:
            gap, scaled_gap = before[0] - before[-1], after[0] - after[-1]
            if abs(gap / temperature - gap) < _APART:
                continue
            if abs(scaled_gap - gap) < abs(scaled_gap - gap / temperature):
                raise ValueError(
                    _BEFORE.format(url=url, temperature=temperature, after_temperature=kind.after_temperature)
                )
        if not sampling.samples_all_tokens:
            among_two = -math.log1p(math.exp((before[1] - before[0]) / temperature))
            if abs(among_two - after[0]) < _APART:
                continue
            cut = _top(url, top(ids, replace(plain, temperature=temperature, top_k=2)), 2)[0]
            if abs(cut - among_two) < abs(cut - after[0]):
                at_one = kind.over_all_tokens and f", or for a temperature of 1 {kind.over_all_tokens}"
                raise ValueError(_CUT.format(url=url) + at_one)
        return
    raise ValueError(_UNPROVABLE.format(url=url))


def _top(url: str, log_probs: list[float], count: int = TOP) -> list[float]:
    log_probs = log_probs[:count]
    if len(log_probs) < 2 or not all(map(math.isfinite, log_probs)):
        raise ValueError(f"{url} gives {log_probs} for the top tokens: expected at least two log-probabilities")
    return log_probs
