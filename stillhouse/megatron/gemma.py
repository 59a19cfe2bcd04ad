"""The parts of Gemma's layers that Megatron-Core's own layers lack. `model.py` puts them into the layer spec.

    layer.submodules.self_attention.module = GemmaAttention
    layer.submodules.self_attention.submodules.linear_proj = NormedProjection

Gemma 2 and 3 also normalize the outputs of attention and MLP. In Gemma 3, layers with a window have another rotary
embedding.

S tokens of a row on this rank, B rows, D width.
"""

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from stillhouse.megatron.norm import RmsNorm


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
