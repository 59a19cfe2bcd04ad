"""Packs the documents of one on-policy step into micro-batches."""

import math
from dataclasses import dataclass

import numpy as np

from stillhouse.data import Documents, PackedMicroBatches, PackedSequences


@dataclass(frozen=True)
class StepPacker:
    """Packs documents that begin with prompts. A packed sequence has at most `prompts.max_tokens` tokens.

    micro_batch_tokens: the maximum number of tokens of a micro-batch.
    by_length: whether a micro-batch is one sequence of documents of similar lengths (see `PackedSequences`).
    """

    prompts: PackedSequences
    micro_batch_tokens: int
    by_length: bool = False

    def micro_batches(self, documents: Documents, parts: int = 1) -> PackedMicroBatches:
        """Return the micro-batches of some documents.

        parts: the minimum number of micro-batches, if there are as many documents. Completions are often far shorter
            than `data.max_tokens`. With sequences of this length, some processes would have no micro-batch.
        """
        gaps = self.prompts.gaps
        widths_D = documents.lengths_D + documents.gaps_D(gaps)
        most_tokens = self.micro_batch_tokens if self.by_length else self.prompts.max_tokens
        capacity = min(most_tokens, max(int(widths_D.max()), math.ceil(widths_D.sum() / parts)))
        packed = PackedSequences(
            documents,
            max_tokens=capacity,
            seed=0,
            shuffle=False,
            gaps=gaps,
            together=self.prompts.together,
            by_length=self.by_length,
            media_inputs=self.prompts.media_inputs,
        )
        most = 1 if self.by_length else self.micro_batch_tokens // capacity
        rows = max(1, min(most, len(packed) // parts))
        numbers = np.arange(len(packed))
        return packed.micro_batches([numbers[start : start + rows] for start in range(0, len(packed), rows)])
