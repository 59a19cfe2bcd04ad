"""The projections of gpt-oss's experts, for Megatron-Core's `MLP`. `model.py` puts them into the layer spec.

    experts.linear_fc1 = GateUpProjection
    experts.linear_fc2 = ExpertProjection

They have weights and biases as transformers has them: weights of shape [input, output], and the columns of gate and
up projection in turn. So each expert's tensors are parts of those of the full model. Experts are not cut.

T tokens of an expert, I and O input and output width.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class ExpertProjection(nn.Module):
    """A projection of one expert. shift_1O: the bias, a row of the tensor [E, O] of all experts."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.weight_IO = nn.Parameter(torch.empty(input_size, output_size, **options))
        self.shift_1O = nn.Parameter(torch.empty(1, output_size, **options))
        for parameter in self.parameters():
            # Megatron-Core reads these: whose gradients are added up over which ranks, and counted in the norm
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(self, hidden_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product, and the bias, which `MLP` adds."""
        return hidden_TI @ self.weight_IO, self.shift_1O[0]


class GateUpProjection(ExpertProjection):
    """Gate and up projection: their columns are in turn in the weight, and one behind the other in the results."""

    def forward(self, hidden_TI: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat([value[..., ::2], value[..., 1::2]], -1) for value in super().forward(hidden_TI))  # type: ignore[return-value]
