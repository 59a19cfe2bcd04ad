"""RMSNorm for Megatron-Core's layers where Transformer Engine is not installed.

    layer.submodules.input_layernorm = RmsNorm

S tokens of a row on this rank, B rows, D width.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """RMSNorm with sequence parallelism, which Megatron-Core's own norm refuses without Transformer Engine and Apex.

    The order of operations is that of transformers: normalized in float32, rounded, then multiplied by the weight.
    With `layernorm_zero_centered_gamma`, it is Gemma's: multiplied by 1 + weight in float32, then rounded.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps, self.is_zero_centered = eps, config.layernorm_zero_centered_gamma
        # Megatron-Core sums the gradients of parameters with this attribute over the tensor ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_SBD: Tensor) -> Tensor:
        wide = hidden_SBD.float()
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.is_zero_centered:
            return (normalized * (1.0 + self.weight.float())).to(self.weight.dtype)
        # the residual stream may be wider than the weights, and the projection that follows needs their dtype
        return (self.weight * normalized.to(hidden_SBD.dtype)).to(self.weight.dtype)
