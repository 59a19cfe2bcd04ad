"""Slow references of the kernels of flash-linear-attention, causal-conv1d and mamba-ssm, one document at a time.

The packages beside this file have the kernels' names and arguments. transformers calls them instead of its own
functions if this folder is on the path.

T tokens, C channels, W width of the convolution, H heads, G groups of heads, K width of a key or of a state, V width
of a value.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def by_document(of_document: Callable[..., Tensor], borders: Sequence[int] | None, *inputs: Tensor) -> Tensor:
    """Apply a function of tensors [1, T, …] to each document. borders: starts and the end; None: one document."""
    pairs = [(0, inputs[0].shape[1])] if borders is None else pairwise(borders)
    return torch.cat([of_document(*(tensor[:, start:end] for tensor in inputs)) for start, end in pairs], 1)


def borders_of(seq_idx_1T: Tensor | None) -> list[int] | None:
    if seq_idx_1T is None:
        return None
    assert len(seq_idx_1T) == 1, "a kernel got several rows"
    assert seq_idx_1T.dtype == torch.int32, seq_idx_1T.dtype
    return [0, *(seq_idx_1T[0].diff().nonzero()[:, 0] + 1).tolist(), seq_idx_1T.shape[1]]


def convolution(x_1TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None) -> Tensor:
    padded_1CT = F.pad(x_1TC.transpose(1, 2), (weight_CW.shape[1] - 1, 0))
    out_1TC = F.conv1d(padded_1CT, weight_CW[:, None], bias_C, groups=len(weight_CW)).transpose(1, 2)
    return out_1TC if activation is None else F.silu(out_1TC)


def delta_rule(
    query_1THK: Tensor, key_1THK: Tensor, value_1THV: Tensor, decay: Tensor, beta_1TH: Tensor, normalize: bool
) -> Tensor:
    """decay: in log space, for each head [1, T, H], or for each component of the key [1, T, H, K]."""
    heads, width = value_1THV.shape[2], key_1THK.shape[3]
    query_1THK, key_1THK = (
        tensor.repeat_interleave(heads // tensor.shape[2], 2).float() for tensor in (query_1THK, key_1THK)
    )
    if normalize:
        query_1THK, key_1THK = (
            tensor * (tensor.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for tensor in (query_1THK, key_1THK)
        )
    if decay.ndim == 3:
        decay = decay[..., None]
    state_1HKV = value_1THV.new_zeros(1, heads, width, value_1THV.shape[3], dtype=torch.float32)
    outputs = []
    for t in range(query_1THK.shape[1]):
        key_1HK1 = key_1THK[:, t, :, :, None]
        state_1HKV = state_1HKV * decay[:, t, ..., None].float().exp()
        change_1HV = (value_1THV[:, t] - (state_1HKV * key_1HK1).sum(2)) * beta_1TH[:, t, :, None]
        state_1HKV = state_1HKV + key_1HK1 * change_1HV[:, :, None]
        outputs.append((state_1HKV * query_1THK[:, t, :, :, None]).sum(2) * width**-0.5)
    return torch.stack(outputs, 1).to(value_1THV.dtype)


def state_space(x_1THV: Tensor, step_1TH: Tensor, in_1TGK: Tensor, out_1TGK: Tensor, rate_H: Tensor) -> Tensor:
    """The recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) with steps that are positive."""
    heads = x_1THV.shape[2]
    in_1THK, out_1THK = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (in_1TGK, out_1TGK))
    state_1HKV = x_1THV.new_zeros(1, heads, in_1TGK.shape[3], x_1THV.shape[3])
    outputs = []
    for t in range(x_1THV.shape[1]):
        decay_1H = (rate_H * step_1TH[:, t]).exp()
        entering_1HKV = (step_1TH[:, t, :, None] * in_1THK[:, t])[..., None] * x_1THV[:, t, :, None]
        state_1HKV = state_1HKV * decay_1H[..., None, None] + entering_1HKV
        outputs.append((state_1HKV * out_1THK[:, t, :, :, None]).sum(2))
    return torch.stack(outputs, 1)
