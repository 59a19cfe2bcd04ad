"""Packed documents of small models, and the gradients that plain transformers has for one document at a time."""

from typing import Any

import torch
from kit.documents import random_documents
from kit.families import build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stillhouse.data import MicroBatch, make_micro_batch
from stillhouse.models import Decoder

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
    logits_BSV = decoder(
        batch.input_ids_BS, batch.position_ids_BS, lengths=batch.lengths, is_padding=is_padding_BS(batch)
    )
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


class LargestResult(TorchDispatchMode):
    """Records the largest number of elements of any result within the block."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        result = function(*args, **(options or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result
