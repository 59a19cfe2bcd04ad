"""An attention function that separates packed documents as transformers' flash attention does, on a CPU.

It gets no mask. It finds documents where position ids are 0, and only in a batch of one row; in a batch of several
rows, all tokens of a row see each other.

B rows, S tokens of a row, H heads, D width of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from stillhouse.models import document_packing

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
