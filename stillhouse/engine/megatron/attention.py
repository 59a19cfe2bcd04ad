"""Causal attention for Megatron-Core's layers where Transformer Engine is not installed.

    attention.submodules.core_attention = CausalAttention
    positions_S = context_positions(tokens)                  # the tokens of each row that this context rank has

Megatron-Core's own local attention keeps all attention probabilities, and it has neither context parallelism nor
values of another width than the keys. This one calls torch's `scaled_dot_product_attention`, for rows of one document
each.

S tokens of a row on this rank, K tokens of the row on all context ranks, B rows, H heads, C width of a head, L
width of the latent vectors.
"""

from math import sqrt
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """The core attention of a layer, with a window if the layer has one.

    Context ranks gather the keys and values of the row; backward reduces their gradients.
    softcap: scores become softcap · tanh(scores / softcap); None: they stay. With a softcap, and with the learnable
    `softmax_type` of gpt-oss, whose heads have a further score without a value, all probabilities are in memory.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        softcap: float | None = None,
        **__: Any,
    ):
        super().__init__()
        self.softcap, self.softmax_offset = softcap, None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.scale = 1 / sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # the number of keys before its own that a query sees
        self.window = config.window_size[0] if has_window else None

    def forward(
        self,
        query_SBHC: Tensor,
        key_SBHC: Tensor,
        value_SBHC: Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> Tensor:
        """Return the heads' outputs [S, B, H·C], with the width of the values."""
        if packed_seq_params is not None:
            raise ValueError("packed documents without Transformer Engine: expected one document per row")
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            key_SBHC, value_SBHC = (
                gather_from_sequence_parallel_region(heads.contiguous(), group=group)
                for heads in (key_SBHC, value_SBHC)
            )
        mask_SK = None
        is_plain = self.softcap is None and self.softmax_offset is None
        if group.size() > 1 or self.window is not None or not is_plain:
            distance_SK = context_positions(len(key_SBHC))[:, None] - all_positions(len(key_SBHC))
            mask_SK = distance_SK >= 0
            if self.window is not None:
                mask_SK &= distance_SK <= self.window
            mask_SK = mask_SK.to(query_SBHC.device)
        query_BHSC, key_BHKC, value_BHKC = (heads.permute(1, 2, 0, 3) for heads in (query_SBHC, key_SBHC, value_SBHC))
        if not is_plain:
            assert mask_SK is not None
            return _joined(self._eager(query_BHSC * self.scale, key_BHKC, value_BHKC, mask_SK))
        output_BHSC = nn.functional.scaled_dot_product_attention(
            query_BHSC,
            key_BHKC,
            value_BHKC,
            attn_mask=mask_SK,
            is_causal=mask_SK is None,
            scale=self.scale,
            enable_gqa=query_BHSC.shape[1] != key_BHKC.shape[1],
        )
        return _joined(output_BHSC)

    def _eager(self, query_BHSC: Tensor, key_BHKC: Tensor, value_BHKC: Tensor, mask_SK: Tensor) -> Tensor:
        """Attention in the operations of transformers' eager attention. Keys may have fewer heads."""
        groups = query_BHSC.shape[1] // key_BHKC.shape[1]
        key_BHKC, value_BHKC = (heads.repeat_interleave(groups, dim=1) for heads in (key_BHKC, value_BHKC))
        scores_BHSK = query_BHSC @ key_BHKC.transpose(2, 3)
        if self.softcap is not None:
            scores_BHSK = self.softcap * torch.tanh(scores_BHSK / self.softcap)
        scores_BHSK = scores_BHSK.masked_fill(~mask_SK, -torch.inf)
        if self.softmax_offset is not None:
            offset_BHS1 = self.softmax_offset[:, None, None].expand(*scores_BHSK.shape[:3], 1)
            scores_BHSK = torch.cat([scores_BHSK, offset_BHS1], dim=-1)
        weights_BHSK = scores_BHSK.softmax(-1, dtype=torch.float32).to(query_BHSC.dtype)
        return weights_BHSK[..., : key_BHKC.shape[2]] @ value_BHKC


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention whose gradients are exact under tensor parallelism.

    The tensor ranks share the rotated part of the keys, but each rank's heads give only a part of its gradient.
    Megatron-Core's local layers do not add these parts. Here the projections are sharded over the tokens again, as
    with Transformer Engine, so that the gather that follows adds them. Tensor parallelism needs sequence parallelism.
    """

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        query_SBL, key_value_SBL = super()._qkv_down_projection(hidden_states)
        if self.config.sequence_parallel:
            key_value_SBL = scatter_to_sequence_parallel_region(
                gather_from_tensor_model_parallel_region(key_value_SBL)
            )
        return query_SBL, key_value_SBL


def _joined(output_BHSC: Tensor) -> Tensor:
    """Return the outputs of all heads [S, B, H·C]."""
    return output_BHSC.permute(2, 0, 1, 3).flatten(2)


def context_positions(tokens: int) -> Tensor:
    """Return the positions of a row's tokens that this context rank has, in their order.

    The row is divided into two chunks per rank, and rank r has chunk r and the r-th chunk from the end, so that all
    ranks have the same work. tokens: of the full row, a multiple of twice the number of context ranks if there are
    several.
    """
    return _positions(
        tokens, parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    )


def all_positions(tokens: int) -> Tensor:
    """Return the positions of a row's tokens in the order in which the parts of all context ranks are gathered."""
    size = parallel_state.get_context_parallel_world_size()
    return torch.cat([_positions(tokens, rank, size) for rank in range(size)])


def _positions(tokens: int, rank: int, size: int) -> Tensor:
    if size == 1:
        return torch.arange(tokens)
    if tokens % (2 * size):
        raise ValueError(f"rows of {tokens} tokens over {size} context ranks: expected a multiple of {2 * size}")
    chunks = torch.arange(tokens).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])
