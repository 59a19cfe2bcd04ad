"""Rows of two documents each, for the tests of output processors and of their contexts.

B rows, S tokens per row, T = B·S, V vocabulary.
"""

from typing import Any

import torch
from kit.objective_cases import generator
from torch import Tensor

from stillhouse.models import OutputProcessor
from stillhouse.objective import OutputHead

B, S, V = 2, 17, 251
T = B * S
DOCUMENTS = ((9, 8), (5, 12))  # of each row

IDS_BS = torch.randint(3, V, (B, S), generator=generator(0))
POSITIONS_BS = torch.stack([torch.cat([torch.arange(each) for each in lengths]) for lengths in DOCUMENTS])


def next_in_document() -> Tensor:
    """Return labels [B, S]. A document's last token and its prompt of three tokens have no label."""
    labels_BS = IDS_BS.roll(-1, 1)
    return labels_BS.masked_fill((POSITIONS_BS.roll(-1, 1) == 0) | (POSITIONS_BS < 2), -100)


LABELS_BS = next_in_document()
LABELS_T = LABELS_BS.flatten()
KNOWN_T = LABELS_T >= 0
LABELLED = int(KNOWN_T.sum())
SOME_T = torch.zeros(T)


def at_depth(processor: OutputProcessor, context: Any, depth: int = 1) -> Any:
    hidden_BSD, head = torch.zeros(B, S, 8), OutputHead(torch.zeros(V, 8))
    return processor(hidden_states=hidden_BSD, head=head, context=context, depth=depth)
