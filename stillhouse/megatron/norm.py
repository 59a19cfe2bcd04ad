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
    rounds_last: multiplied by the weight in float32, then rounded, as in gpt-oss; also with
    `layernorm_zero_centered_gamma`, which is Gemma's factor of 1 + weight.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, rounds_last: bool = False, **_: Any
    ):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps, self.is_zero_centered = eps, config.layernorm_zero_centered_gamma
        self.rounds_last = rounds_last or self.is_zero_centered
        # Megatron-Core sums the gradients of parameters with this attribute over the tensor ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_SBD: Tensor) -> Tensor:
        wide = hidden_SBD.float()
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.rounds_last:
            factor_D = 1.0 + self.weight.float() if self.is_zero_centered else self.weight.float()
            return (normalized * factor_D).to(self.weight.dtype)
        # the residual stream may be wider than the weights, and the projection that follows needs their dtype
        return (self.weight * normalized.to(hidden_SBD.dtype)).to(self.weight.dtype)
