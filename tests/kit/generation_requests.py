"""Requests for completions of random prompts, and completions as plain lists."""

from collections.abc import Sequence

import numpy as np
import torch

from stillhouse.rollout import Completion, GenerationRequest, Sampling

CPU = torch.device("cpu")
LENGTHS = (3, 11, 1, 7, 5)
SAMPLING = Sampling(max_new_tokens=9, eos_ids=(2,))


def requests(lengths: Sequence[int] = LENGTHS, vocabulary: int = 251, seed: int = 0) -> list[GenerationRequest]:
    random = np.random.Generator(np.random.PCG64(seed))
    prompts = [random.integers(3, vocabulary, length).astype(np.int32) for length in lengths]
    return [GenerationRequest(number, ids, seed=1000 + number) for number, ids in enumerate(prompts)]


def as_lists(completions: list[Completion]) -> list[tuple[list[int], list[float], str]]:
    return [
        (completion.ids_N.tolist(), completion.log_probs_N.tolist(), completion.finish) for completion in completions
    ]
