"""The scan of Mamba-2, and the one with convolution, norm and projection; see `segments`."""

from functools import partial

import torch
import torch.nn.functional as F
from causal_conv1d import causal_conv1d_fn
from segments import borders_of, by_document, state_space
from torch import Tensor

Limits = tuple[float, float]
UNLIMITED: Limits = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Limits = UNLIMITED,
    return_final_states: bool = False,
) -> Tensor:
    step_1TH = dt.float() if dt_bias is None else dt.float() + dt_bias
    step_1TH = (F.softplus(step_1TH) if dt_softplus else step_1TH).clamp(*dt_limit)
    inputs = (x.float(), step_1TH, B.float(), C.float())
    y = by_document(partial(state_space, rate_H=A.float()), borders_of(seq_idx), *inputs)
    if D is not None:
        y = y + D[..., None] * x
    return (y if z is None else y * F.silu(z.float())).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: Limits = UNLIMITED,
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    assert headdim is not None
    heads, channels = len(A), len(conv1d_weight)
    width = heads * headdim
    z, channels_BTC, dt = zxbcdt.split([width, channels, heads], -1)
    mixed_BTC = causal_conv1d_fn(
        channels_BTC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation
    ).transpose(1, 2)
    x, B, C = mixed_BTC.split([width, *[(channels - width) // 2] * 2], -1)
    groups = [part.unflatten(-1, (ngroups, -1)) for part in (B, C)]
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, headdim)),
        dt,
        A,
        *groups,
        chunk_size,
        D=D,
        dt_bias=dt_bias,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
    ).flatten(2)
    if rmsnorm_weight is None:
        y = y * F.silu(z)
    else:
        assert not norm_before_gate
        gated = (y * F.silu(z)).float().unflatten(-1, (ngroups, -1))
        normed = gated * (gated.square().mean(-1, keepdim=True) + rmsnorm_eps).rsqrt()
        y = rmsnorm_weight * normed.flatten(-2).to(y.dtype)
    assert isinstance(y, torch.Tensor)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)
