"""Layers that Megatron-Core lacks: `model.py` puts them into the layer spec.

    layer.submodules.input_layernorm = RmsNorm                                     where Transformer Engine is absent
    layer.submodules.self_attention.module = GemmaAttention
    layer.submodules.self_attention.submodules.linear_proj = NormedProjection
    experts.linear_fc1, experts.linear_fc2 = GateUpProjection, ExpertProjection    gpt-oss

Gemma 2 and 3 also normalize the outputs of attention and MLP. In Gemma 3, layers with a window have another rotary
embedding. The experts of gpt-oss have weights and biases as transformers has them: weights of shape [input, output],
and the columns of gate and up projection in turn. So each expert's tensors are parts of those of the full model.
Experts are not cut.

S tokens of a row on this rank, B rows, D width. T tokens of an expert, I and O input and output width.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
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


class NormedProjection(RowParallelLinear):
    """The last projection of attention or MLP, and the norm of its output. The norm is a forward hook, so that an
    adapter can add to the projection before it.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any):
        super().__init__(input_size, output_size, config=config, **options)
        self.post_norm = RmsNorm(config, output_size, config.layernorm_epsilon)
        self.register_forward_hook(_normed)


def _normed(layer: NormedProjection, inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    output_SBD, bias = outputs
    return layer.post_norm(output_SBD), bias


class GemmaAttention(SelfAttention):
    """Attention with the rotary embedding of layers with a window, if this layer has one.

    window_rotary_pos_emb: this embedding, or None. Its frequencies are set after construction.
    """

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int, **options: Any):
        super().__init__(config, submodules, layer_number, **options)
        self.window_rotary_pos_emb = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window_rotary_pos_emb = RotaryEmbedding(
                config.kv_channels,
                rotary_percent=1.0,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self.window_rotary_pos_emb is not None:
            # the embedding of packed documents has the positions of all context ranks
            is_packed = options.get("packed_seq_params") is not None
            tokens = len(rotary_pos_emb) * (1 if is_packed else self.config.context_parallel_size)
            rotary_pos_emb = self.window_rotary_pos_emb(tokens, packed_seq=is_packed)
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **options)


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
