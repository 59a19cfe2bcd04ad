"""The semantics of variable-length attention on any device and in any dtype, one document at a time.

T tokens of the row, M borders of documents, H heads of queries, G heads of keys and values, D width of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stillhouse.models import Activations, varlen


def use_reference() -> None:
    """Let this process compute variable-length attention by the reference, on every device and in every dtype."""
    varlen.attend, varlen.refusal = attend, no_refusal


@contextmanager
def reference() -> Iterator[None]:
    """Within the block, compute variable-length attention by the reference."""
    with patch.object(varlen, "attend", attend), patch.object(varlen, "refusal", no_refusal):
        yield


def no_refusal(activations: Activations, dtype: torch.dtype) -> None:
    """In place of `varlen.refusal`."""


def attend(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens_M: Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    borders = cu_seqlens_M.tolist()
    assert borders[0] == 0
    assert borders[-1] == len(query_THD)
    assert longest == max(stop - start for start, stop in pairwise(borders))
    outputs = []
    for start, stop in pairwise(borders):
        query, key, value = (heads[start:stop].transpose(0, 1)[None] for heads in (query_THD, key_TGD, value_TGD))
        tokens = stop - start
        sees_SS = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        if window is not None:
            sees_SS = sees_SS.triu(1 - window)
        output = scaled_dot_product_attention(query, key, value, sees_SS, scale=scale, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)
