"""A teacher in the same process: its hidden states and its head, so that the divergence is exact."""

from typing import Protocol

import torch

from stillhouse.data import Batch
from stillhouse.models import Decoder
from stillhouse.objective import FullVocab, Signal


class Teacher(Protocol):
    """Whatever can say something about every row of a batch."""

    def signal(self, batch: Batch) -> Signal: ...


class LocalTeacher:
    """A decoder, frozen: no dropout, no gradient, its own dtype, whatever is done to the student."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder.requires_grad_(False).eval()

    def signal(self, batch: Batch) -> FullVocab:
        """Full-vocabulary signal of all rows; row t is the distribution of token t + 1."""
        # the student's autocast would round a float32 teacher to bfloat16
        with torch.autocast(batch.input_ids_BS.device.type, enabled=False):
            return self.decoder.signal(batch.input_ids_BS, batch.position_ids_BS)
