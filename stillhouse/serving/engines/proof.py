"""Proves that a server's log-probabilities are those that training needs: after the temperature, and over the whole
vocabulary. An engine gives others if it was started so, and nothing in its answers tells.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from stillhouse.generation.sample import Sampling

#: so many likeliest tokens are asked for: between the first and the last one is a wider gap than to the second one
MOST_LIKELY = 5
#: the log-probabilities of at least two of the likeliest tokens after a prompt, the largest first
TopLogProbs = Callable[[Sequence[int], Sampling], list[float]]
#: two explanations of a number must differ by so many nats to be told apart
_APART = 0.02
_PROMPTS = ((1,), (2, 3), (5, 7, 11), (13,), (17, 19, 23), (29, 31), (37,), (41, 43, 47))

_BEFORE = (
    "{url} gives log-probabilities before the temperature, and the temperature is {temperature:g}: expected a vLLM "
    "that was started with --logprobs-mode processed_logprobs, an SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, or "
    "a temperature of 1"
)
_CUT = (
    "{url} gives log-probabilities among the tokens that top_p, top_k and min_p leave, and training needs those over "
    "the whole vocabulary: expected top_p=1, top_k=0 and min_p=0, or for a temperature of 1 a vLLM that was started "
    "without --logprobs-mode processed_logprobs"
)
_UNKNOWN = (
    "{url} writes every token with nearly the same probability or with certainty, so that it cannot be proved which "
    "log-probabilities it gives: expected a model that was trained, or a temperature of 1 and all tokens"
)


def prove_log_probs(url: str, top: TopLogProbs, sampling: Sampling, vocabulary: int) -> None:
    """Raise ValueError if the server's log-probabilities are not those of `Completion`.

    The gap between the likeliest tokens is divided by the temperature. Among two tokens that top_k leaves, the
    likeliest one's log-probability is larger than among all.
    """
    temperature = sampling.temperature
    if temperature == 0 or (temperature == 1 and sampling.is_whole):
        return
    plain = Sampling(1, temperature=1.0)
    for prompt in _PROMPTS:
        ids = [each % vocabulary for each in prompt]
        before = _likeliest(url, top(ids, plain))
        after = _likeliest(url, top(ids, replace(plain, temperature=temperature)))
        if temperature != 1:
            gap, found = before[0] - before[-1], after[0] - after[-1]
            if abs(gap / temperature - gap) < _APART:
                continue
            if abs(found - gap) < abs(found - gap / temperature):
                raise ValueError(_BEFORE.format(url=url, temperature=temperature))
        if not sampling.is_whole:
            among_two = -math.log1p(math.exp((before[1] - before[0]) / temperature))
            if abs(among_two - after[0]) < _APART:
                continue
            cut = _likeliest(url, top(ids, replace(plain, temperature=temperature, top_k=2)), 2)[0]
            if abs(cut - among_two) < abs(cut - after[0]):
                raise ValueError(_CUT.format(url=url))
        return
    raise ValueError(_UNKNOWN.format(url=url))


def _likeliest(url: str, found: list[float], count: int = MOST_LIKELY) -> list[float]:
    """The log-probabilities of the `count` likeliest tokens: the answer may have more of them."""
    found = found[:count]
    if len(found) < 2 or not all(map(math.isfinite, found)):
        raise ValueError(f"{url} gives {found} for the likeliest tokens: expected at least two log-probabilities")
    return found
