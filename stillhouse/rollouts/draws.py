"""Draws the tokens of a batch of completions and records their log-probabilities, inside transformers' `generate`.

`generate` calls a `Draws` with the logits of a step and an `Ends` with the tokens so far. `Draws` chooses the tokens
itself and gives `generate` scores that leave it no other choice. So each completion has random numbers of its own: it
does not depend on the completions that it shares a batch with (but for rounding), and the global random state is
neither read nor changed.

B completions, S tokens of prompt and completion so far, V rows of the head, N most tokens of a completion.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stillhouse.rollouts.sample import Sampling

#: the constants of splitmix64 (Steele et al. 2014), as signed numbers: each step of `_uniform` is one of its steps
_GOLDEN, _FIRST, _SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Draws(LogitsProcessor):
    """Draws one token of each completion per call.

    seeds: of each completion. vocabulary: rows of the head from this one on are never drawn; they count in the
    log-probabilities, as they do in the objective.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], tokens: int, vocabulary: int, device: torch.device):
        self._vocabulary = vocabulary
        self._is_greedy = sampling.temperature == 0
        self._temperature = sampling.temperature or 1.0
        self._filters = _filters(sampling)
        raw_BN = np.stack([np.random.PCG64(seed).random_raw(tokens) for seed in seeds])
        self._seeds_BN = torch.from_numpy(raw_BN.view(np.int64)).to(device)
        self._ids_B: list[Tensor] = []
        self._log_probs_B: list[Tensor] = []

    def __call__(self, input_ids_BS: Tensor, logits_BV: Tensor) -> Tensor:
        scores_BV = logits_BV / self._temperature
        log_probs_BV = scores_BV.log_softmax(-1)
        scores_BV[:, self._vocabulary :] = -torch.inf
        ids_B = scores_BV.argmax(-1) if self._is_greedy else self._draw(input_ids_BS, scores_BV)
        self._ids_B.append(ids_B)
        self._log_probs_B.append(log_probs_BV.gather(1, ids_B[:, None])[:, 0])
        return torch.full_like(logits_BV, -torch.inf).scatter_(1, ids_B[:, None], 0.0)

    def _draw(self, input_ids_BS: Tensor, scores_BV: Tensor) -> Tensor:
        """Draw by the largest sum of a score and Gumbel noise. Every token of a completion has noise of its own, so a
        difference in the last digits of the scores, as of another batch or layout, hardly ever draws another token.
        """
        for each in self._filters:
            scores_BV = each(input_ids_BS, scores_BV)
        uniform_BV = _uniform(self._seeds_BN[:, len(self._ids_B)], scores_BV.shape[1])
        return (scores_BV.double() - (-uniform_BV.log()).log()).argmax(-1)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids, int32, and their log-probabilities, float32, [B, steps]; after its end, a row holds anything."""
        ids_BN, log_probs_BN = torch.stack(self._ids_B, 1), torch.stack(self._log_probs_B, 1)
        return ids_BN.int().cpu().numpy(), log_probs_BN.float().cpu().numpy()


class Ends(StoppingCriteria):
    """Finds where each completion ends: at an end of sequence, a stop text, or its most tokens `limit_B`.

    Tokens of the prompt do not count: a prompt may contain the end of sequence and parts of stop texts.
    """

    def __init__(
        self,
        sampling: Sampling,
        limits: Sequence[int],
        prompt_tokens: int,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
    ):
        self._stop, self._tokenizer, self._prompt_tokens = sampling.stop, tokenizer, prompt_tokens
        self._eos = torch.tensor(sampling.eos_ids, dtype=torch.int64, device=device)
        self._limit_B = torch.tensor(limits, device=device)
        self._length_B = torch.zeros_like(self._limit_B)  # 0: not ended
        self._is_stop_B = torch.zeros_like(self._limit_B, dtype=torch.bool)

    def __call__(self, input_ids_BS: Tensor, scores: object, **_: object) -> Tensor:
        tokens = input_ids_BS.shape[1] - self._prompt_tokens
        stops_B = torch.isin(input_ids_BS[:, -1], self._eos)
        if self._stop:
            stops_B = stops_B | self._has_stop_text(input_ids_BS[:, self._prompt_tokens :])
        ends_B = (self._length_B == 0) & (stops_B | (self._limit_B <= tokens))
        self._is_stop_B = self._is_stop_B | (ends_B & stops_B)
        self._length_B = torch.where(ends_B, tokens, self._length_B)
        return self._length_B > 0

    def _has_stop_text(self, ids_BN: Tensor) -> Tensor:
        assert self._tokenizer is not None
        found = stop_texts(ids_BN.tolist(), self._stop, self._tokenizer)
        return torch.tensor([each is not None for each in found], device=ids_BN.device)

    def result(self) -> tuple[list[int], list[bool]]:
        """For each completion its tokens, and whether it has ended rather than been cut."""
        return self._length_B.tolist(), self._is_stop_B.tolist()


def stop_texts(
    ids: Sequence[Sequence[int]], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[str | None]:
    """For each sequence of ids, the stop text at whose end it is, or None. No earlier token may have ended one."""
    # every token but special ones is at least one byte of text; a special one is at least its name
    window = max(len(each.encode()) for each in stop) + 8
    texts = tokenizer.batch_decode(
        [each[-window:] for each in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return [next((each for each in stop if each in text), None) for text in texts]


def _uniform(seeds_B: Tensor, count: int) -> Tensor:
    """Return `count` numbers in (0, 1) for each seed, float64, from splitmix64: the same on every device."""
    counter_V = torch.arange(1, count + 1, device=seeds_B.device)
    state_BV = seeds_B[:, None] + counter_V * _GOLDEN  # integers wrap around
    state_BV = (state_BV ^ _shifted(state_BV, 30)) * _FIRST
    state_BV = (state_BV ^ _shifted(state_BV, 27)) * _SECOND
    state_BV = state_BV ^ _shifted(state_BV, 31)
    return (_shifted(state_BV, 11).double() + 0.5) * 2.0**-53


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift the bits to the right, with zeros from the left."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _filters(sampling: Sampling) -> list[LogitsProcessor]:
    """What leaves only some tokens to be drawn, in the order in which transformers and vLLM apply them."""
    filters: list[LogitsProcessor] = []
    if sampling.top_k:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        filters.append(MinPLogitsWarper(sampling.min_p))
    return filters
