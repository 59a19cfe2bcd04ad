"""The semantics of variable-length attention on any device and in any dtype, one document at a time.

T tokens of the row, M borders of documents, H heads of queries, G heads of keys and values, D width of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from kit.documents import random_documents
from kit.families import build
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from stillhouse.data import MicroBatch, make_micro_batch
from stillhouse.models import Activations, Decoder, document_packing, varlen

#: the lengths of the documents of each row; the rows are padded to 120 columns
ROWS = [[50, 1, 69], [7, 7, 90, 2], [120], [33, 40], [1, 1, 1, 100], [64, 56], [12, 100], [3, 90, 20]]


def micro_batch() -> MicroBatch:
    """Return the documents on the CPU, in rows."""
    numbers, rows = iter(range(100)), []
    for row in ROWS:
        rows.append([next(numbers) for _ in row])
    return make_micro_batch(random_documents([length for row in ROWS for length in row]), rows)


def slopes(vocabulary: int) -> Tensor:
    """Return the derivatives of the loss with respect to a token's logits, by the token: a fixed random matrix."""
    return torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def plain_gradients(family: str) -> dict[str, Tensor]:
    """Return the gradients of the sum of slope · logit over all tokens, in float64 on the CPU."""
    model, batch = build(family, dtype=torch.float64), micro_batch()
    ids_T, document_T = batch.input_ids_BS.flatten(), batch.document_T
    slopes_VV = slopes(model.config.vocab_size)
    for document in range(int(document_T.max()) + 1):
        ids_1S = ids_T[document_T == document][None]
        (model(input_ids=ids_1S, use_cache=False).logits * slopes_VV[ids_1S]).sum().backward()
    return named_gradients(model)


def packed_gradients(decoder: Decoder, batch: MicroBatch) -> dict[str, Tensor]:
    """Return the same gradients of a decoder. batch: on the decoder's device."""
    decoder.zero_grad()
    options = {"lengths": batch.lengths, "is_padding": is_padding_BS(batch)}
    logits_BSV = decoder(batch.input_ids_BS, batch.position_ids_BS, **options)
    slopes_VV = slopes(decoder.vocabulary_rows).to(logits_BSV)
    weighted_BSV = logits_BSV * slopes_VV[batch.input_ids_BS] * ~is_padding_BS(batch)[..., None]
    weighted_BSV.sum().backward()
    return named_gradients(decoder.pretrained)


@torch.no_grad()
def separation_error(decoder: Decoder) -> float:
    """Return how much a document's hidden states differ from those of the document alone, relative to their norm."""
    batch = micro_batch().to("cpu")
    ids_BS = batch.input_ids_BS % min(decoder.vocabulary_rows, 90)  # higher ids may stand for images
    packed = decoder(ids_BS, batch.position_ids_BS, lengths=batch.lengths, head=False).flatten(0, 1)
    errors = []
    for document in range(int(batch.document_T.max()) + 1):
        is_member_T = batch.document_T == document
        alone = decoder(ids_BS.flatten()[is_member_T][None], head=False)[0]
        errors.append(float((packed[is_member_T] - alone).norm() / alone.norm()))
    return max(errors)


def is_padding_BS(batch: MicroBatch) -> Tensor:
    return (batch.document_T < 0).view(batch.shape_BS)


def named_gradients(model: Any) -> dict[str, Tensor]:
    return {name: weight.grad.double().cpu() for name, weight in model.named_parameters() if weight.grad is not None}


def error(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest error of a parameter's gradient, relative to its norm."""
    assert gradients.keys() == expected.keys()
    return max(float((gradients[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


#: not a name with "flash", for which transformers loads a kernel
FLASH = "one_row"


def register_flash() -> None:
    """Register the function. `Packing` treats it as flash attention from here on, until the process ends."""
    document_packing.uses_flash_attention = lambda model: model.config._attn_implementation.endswith(FLASH)
    AttentionInterface.register(FLASH, attention)
    AttentionMaskInterface.register(FLASH, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])


def attention(
    module: nn.Module,
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None
    rows, _, tokens, _ = query_BHSD.shape
    sees_SS = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - (sliding_window or tokens))
    if rows == 1 and position_ids is not None:
        document_S = (position_ids[0] == 0).cumsum(0)
        sees_SS &= document_S[:, None] == document_S
    output, _ = sdpa_attention_forward(module, query_BHSD, key_BHSD, value_BHSD, sees_SS[None, None], **options)
    return output, None


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
