"""The dtype of a student's hidden states between its layers, under autocast.

Under autocast, an embedding gives hidden states in the dtype of its weight, float32. Each layer adds the output of a
matrix product in bfloat16 to them, so they stay in float32. If the embedding's output is rounded to bfloat16, most
families keep this dtype in all layers, and norms and additions read and write half the bytes.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.models import Decoder
from stillhouse.models.lm_head import input_embedding


def apply_residual_dtype(decoder: Decoder, dtype: torch.dtype) -> None:
    """Round the output of a decoder's embedding to this dtype under autocast.

    A pipeline stage without the head always sends hidden states of this dtype, also of a family whose layers return
    another one, because the next stage receives this dtype.
    """
    embedding = input_embedding(decoder.pretrained)
    if embedding is not None:
        embedding.register_forward_hook(partial(_round_under_autocast, dtype))
    if not decoder.has_head:
        decoder.register_forward_hook(partial(_round, dtype))


def _round_under_autocast(dtype: torch.dtype, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    # without autocast, the layers' matrices need hidden states in their dtype
    return output.to(dtype) if torch.is_autocast_enabled(output.device.type) else output


def _round(dtype: torch.dtype, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to(dtype)
