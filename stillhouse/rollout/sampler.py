"""Samples the tokens of a batch of completions and records their log-probabilities, inside transformers' `generate`.

`generate` calls a `TokenSampler` with the logits of a step and an `EndOfCompletion` with the tokens so far. The
sampler chooses the tokens itself and returns scores of −inf for all other ids, so that `generate` takes these tokens.
Each completion has its own random numbers. So, except for rounding, a completion does not depend on the other
completions of its batch. The global random state is neither read nor changed.

Dimensions: B completions, S tokens of prompt and completion so far, V rows of the head, N tokens of a completion, K
blocks of C ids.
"""

from collections.abc import Callable, Sequence

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

from stillhouse.rollout.records import Sampling

#: the constants of MurmurHash3's finalizer (Appleby 2011) and the golden ratio, as signed numbers of 32 bits
_FIRST, _SECOND, _GOLDEN = (value - 2**32 * (value >= 2**31) for value in (0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9))
#: the largest float32 below 1
_BELOW_1 = 1 - 2.0**-24
#: ids per block: a block is sampled first, then an id of this block, so that most ids need no noise
_BLOCK = 64
#: the counter for the noise of id 0; the counters of blocks are smaller
_TOKENS = 2**30


class TokenSampler(LogitsProcessor):
    """Samples one token of each completion per call.

    tokens: the maximum number of tokens of a completion.
    vocabulary: only ids below this number are sampled.
    counted: the number of rows of the head over which log-probabilities are normalised, or None for all rows.
    never: ids that are never sampled. They still count in the normalisation of the log-probabilities.
    """

    def __init__(
        self,
        sampling: Sampling,
        seeds: Sequence[int],
        tokens: int,
        vocabulary: int,
        device: torch.device,
        counted: int | None = None,
        never: Sequence[int] = (),
    ):
        self._never = torch.tensor([index for index in never if index < vocabulary], dtype=torch.int64, device=device)
        assert counted is None or vocabulary <= counted
        self._vocabulary, self._counted = vocabulary, counted
        self._is_greedy = sampling.temperature == 0
        self._temperature = sampling.temperature or 1.0
        # the filters are applied in transformers' order; vLLM applies min_p first
        self._filters: list[LogitsProcessor] = []
        if sampling.top_k:
            self._filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._filters.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._filters.append(MinPLogitsWarper(sampling.min_p))
        raw_BN = np.stack([np.random.PCG64(seed).random_raw(tokens) for seed in seeds])
        self._seeds_BN2 = torch.from_numpy(raw_BN.view(np.int32).reshape(*raw_BN.shape, 2)).to(device)
        self._ids_B: list[Tensor] = []
        self._log_probs_B: list[Tensor] = []

    def __call__(self, input_ids_BS: Tensor, logits_BV: Tensor) -> Tensor:
        # passes over the vocabulary are few and in place, because one pass takes as long as a layer of a small model
        scores_BV = logits_BV[:, : self._counted] / self._temperature
        scores_BV -= scores_BV[:, : self._vocabulary].amax(-1, keepdim=True)
        weights_BV = scores_BV.exp()
        log_sum_B = weights_BV.sum(-1).log()
        if len(self._never):
            scores_BV.index_fill_(1, self._never, -torch.inf)
            weights_BV.index_fill_(1, self._never, 0.0)
        if self._is_greedy:
            ids_B = scores_BV[:, : self._vocabulary].argmax(-1)
        else:
            ids_B = self._sample(input_ids_BS, scores_BV, weights_BV)
        self._ids_B.append(ids_B)
        self._log_probs_B.append(scores_BV.gather(1, ids_B[:, None])[:, 0] - log_sum_B)
        return scores_BV.fill_(-torch.inf).scatter_(1, ids_B[:, None], 0.0)

    def _sample(self, input_ids_BS: Tensor, scores_BV: Tensor, weights_BV: Tensor) -> Tensor:
        """Choose a block of `_BLOCK` ids, then an id of this block.

        Both choices take the entry with the largest sum of log-probability and Gumbel noise. A block's probability is
        the sum over its ids. Every block and every id has its own noise. So a rounding difference in the scores, for
        example in another batch or layout, very rarely changes the sampled token.

        weights_BV: exp(scores_BV).
        """
        if self._filters:
            scores_BV = scores_BV.clone()
            scores_BV[:, self._vocabulary :] = -torch.inf
            for apply_filter in self._filters:
                scores_BV = apply_filter(input_ids_BS, scores_BV)
            weights_BV = scores_BV.exp()
        seeds_B2, full_blocks = self._seeds_BN2[:, len(self._ids_B)], self._vocabulary // _BLOCK * _BLOCK
        sums_BK = weights_BV[:, :full_blocks].unflatten(1, (-1, _BLOCK)).sum(-1)
        rest_B1 = weights_BV[:, full_blocks : self._vocabulary].sum(-1, keepdim=True)
        blocks_BK = torch.cat([sums_BK, rest_B1], 1).log()
        counters_1K = torch.arange(blocks_BK.shape[1], dtype=torch.int32, device=seeds_B2.device)[None]
        block_B = (blocks_BK + _gumbel(seeds_B2, counters_1K)).argmax(-1)
        ids_BC = block_B[:, None] * _BLOCK + torch.arange(_BLOCK, device=seeds_B2.device)
        inside_BC = scores_BV.gather(1, ids_BC.clamp(max=self._vocabulary - 1))
        inside_BC = inside_BC.where(ids_BC < self._vocabulary, -torch.inf)
        noise_BC = _gumbel(seeds_B2, ids_BC.int() + _TOKENS)
        return ids_BC.gather(1, (inside_BC + noise_BC).argmax(-1, keepdim=True))[:, 0]

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The sampled ids, int32, and their log-probabilities, float32, both [B, N]. Values after the end of a
        completion have no meaning.
        """
        ids_BN, log_probs_BN = torch.stack(self._ids_B, 1), torch.stack(self._log_probs_B, 1)
        return ids_BN.int().cpu().numpy(), log_probs_BN.float().cpu().numpy()


class EndOfCompletion(StoppingCriteria):
    """Finds where each completion ends: at an end of sequence, at a stop text, or at its limit of new tokens.

    Only new tokens are examined, because a prompt can contain ends of sequence and parts of stop texts.

    on_end: called after each token at which completions end, with the numbers of their rows.
    """

    def __init__(
        self,
        sampling: Sampling,
        limits: Sequence[int],
        prompt_tokens: int,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        on_end: Callable[[Sequence[int]], None] | None = None,
    ):
        self._on_end = on_end
        self._stop, self._tokenizer, self._prompt_tokens = sampling.stop, tokenizer, prompt_tokens
        self._eos = torch.tensor(sampling.eos_ids, dtype=torch.int64, device=device)
        self._limit_B = torch.tensor(limits, device=device)
        self._length_B = torch.zeros_like(self._limit_B)  # 0 means that the completion has not ended
        self._is_stop_B = torch.zeros_like(self._limit_B, dtype=torch.bool)

    def __call__(self, input_ids_BS: Tensor, scores: object, **_: object) -> Tensor:
        tokens = input_ids_BS.shape[1] - self._prompt_tokens
        stops_B = torch.isin(input_ids_BS[:, -1], self._eos)
        if self._stop:
            assert self._tokenizer is not None
            texts_B = stop_texts(input_ids_BS[:, self._prompt_tokens :].tolist(), self._stop, self._tokenizer)
            stops_B |= torch.tensor([text is not None for text in texts_B], device=stops_B.device)
        ends_B = (self._length_B == 0) & (stops_B | (self._limit_B <= tokens))
        self._is_stop_B = self._is_stop_B | (ends_B & stops_B)
        self._length_B = torch.where(ends_B, tokens, self._length_B)
        if self._on_end is not None and (rows := ends_B.nonzero()[:, 0].tolist()):
            self._on_end(rows)
        return self._length_B > 0

    def result(self) -> tuple[list[int], list[bool]]:
        """For each completion, the number of tokens, and whether an end of sequence or a stop text ended it."""
        return self._length_B.tolist(), self._is_stop_B.tolist()


def stop_texts(
    ids: Sequence[Sequence[int]], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[str | None]:
    """For each sequence of ids, the stop text that its last token completes, or None. The caller must call this after
    every token, because only a small window of text at the end is examined.
    """
    # a token has at least one byte of text, so the last n tokens contain a stop text of n bytes; 8 more are a margin
    window = max(len(stop_text.encode()) for stop_text in stop) + 8
    texts = tokenizer.batch_decode(
        [row[-window:] for row in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return [next((stop_text for stop_text in stop if stop_text in text), None) for text in texts]


def _gumbel(seeds_B2: Tensor, counters_BC: Tensor) -> Tensor:
    """Gumbel noise in float32 for each counter and pair of seeds (all int32).

    The noise is −log(−log(1 − u)), where u is uniform. Large noise, which decides a sample, comes from a small u, and
    a small u is exact in float32. A u that rounds to 1 would give −inf, so u is clamped to the largest float32 below
    1. The 31 bits of u are a hash of counter and seeds, and the same on every device.
    """
    state_BC = counters_BC * _GOLDEN + seeds_B2[:, :1]  # int32 wraps around when it overflows
    state_BC = _mixed(state_BC, 16) * _FIRST + seeds_B2[:, 1:]
    state_BC = _mixed(_mixed(state_BC, 13) * _SECOND, 16)
    uniform_BC = (((state_BC & 0x7FFFFFFF).float() + 0.5) * 2.0**-31).clamp(max=_BELOW_1)
    return -(-torch.log1p(-uniform_BC)).log()


def _mixed(state: Tensor, bits: int) -> Tensor:
    """Return state ^ (state >> bits), with a logical shift."""
    return state ^ ((state >> bits) & ((1 << (32 - bits)) - 1))
