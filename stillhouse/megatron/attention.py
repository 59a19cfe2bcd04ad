"""Causal attention for Megatron-Core's layers where Transformer Engine is not installed.

    attention.submodules.core_attention = CausalAttention
    positions_S = context_positions(tokens)                  # the tokens of each row that this context rank has

Megatron-Core's own local attention keeps all attention probabilities, and it has neither context parallelism nor
values of another width than the keys. This one takes rows of one document each, or packed documents in one row, whose
borders Megatron-Core passes on (`PackedSeqParams`). It calls torch's `scaled_dot_product_attention` for all rows, or
for one packed document after the other, and for packed documents its variable-length attention where this can run.

S tokens of a row or of a packed document on this rank, K of its tokens on all context ranks, B rows, H heads, C width
of a head, T tokens of all packed documents, L width of the latent vectors.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
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

from stillhouse.models import Activations, varlen


class CausalAttention(nn.Module):
    """The core attention of a layer, with a window if the layer has one.

    Context ranks gather the keys and values of all rows; backward reduces their gradients.
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
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """Return the heads' outputs [S, B, H·C], with the width of the values.

        The heads are [S, B, H, C] of rows, or [T, H, C] of packed documents; then the outputs are [T, H·C].
        """
        group = parallel_state.get_context_parallel_group()
        if packed_seq_params is None:
            return self._attend_documents(query, key, value, [len(query) * group.size()])
        if group.size() == 1 and self._may_read_borders(query):
            borders = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            window = None if self.window is None else self.window + 1
            made_THC = varlen.attend_padded(query, key, value, *borders, scale=self.scale, window=window)
            return made_THC.flatten(1)
        query, key, value = (heads_THC[:, None] for heads_THC in (query, key, value))
        return self._attend_documents(query, key, value, packed_seq_params.cu_seqlens_q.diff().tolist())[:, 0]

    def _may_read_borders(self, query_THC: Tensor) -> bool:
        """Whether variable-length attention can run."""
        activations = Activations(query_THC.device)
        return (
            self._is_plain
            and query_THC.shape[-1] <= varlen.WIDEST
            and varlen.refusal(activations, query_THC.dtype) is None
        )

    @property
    def _is_plain(self) -> bool:
        return self.softcap is None and self.softmax_offset is None

    def _attend_documents(
        self, query_SBHC: Tensor, key_SBHC: Tensor, value_SBHC: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """Return the outputs of documents that lie one behind another, [S, B, H·C]. lengths: on all context ranks"""
        group = parallel_state.get_context_parallel_group()
        parts = [length // group.size() for length in lengths]
        keys, values = (
            [document_heads.flatten(0, 1) for document_heads in _gathered(heads_SBHC).split(parts, dim=1)]
            for heads_SBHC in (key_SBHC, value_SBHC)
        )
        outputs = [self._attend(*heads) for heads in zip(query_SBHC.split(parts), keys, values, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, query_SBHC: Tensor, key_KBHC: Tensor, value_KBHC: Tensor) -> Tensor:
        mask_SK = None
        if len(query_SBHC) < len(key_KBHC) or self.window is not None or not self._is_plain:
            distance_SK = context_positions(len(key_KBHC))[:, None] - all_positions(len(key_KBHC))
            mask_SK = distance_SK >= 0
            if self.window is not None:
                mask_SK &= distance_SK <= self.window
            mask_SK = mask_SK.to(query_SBHC.device)
        query_BHSC, key_BHKC, value_BHKC = (heads.permute(1, 2, 0, 3) for heads in (query_SBHC, key_KBHC, value_KBHC))
        if not self._is_plain:
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


def _gathered(heads_SBHC: Tensor) -> Tensor:
    """Return the keys or values of all context ranks, with a first dim for the ranks."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return heads_SBHC[None]
    return gather_from_sequence_parallel_region(heads_SBHC.contiguous(), group=group).unflatten(0, (group.size(), -1))


def _joined(output_BHSC: Tensor) -> Tensor:
    """Return the outputs of all heads [S, B, H·C]."""
    return output_BHSC.permute(2, 0, 1, 3).flatten(2)


def context_positions(tokens: int) -> Tensor:
    """Return the positions of a document's tokens that this context rank has, in their order.

    The document is divided into two chunks per rank, and rank r has chunk r and the r-th chunk from the end, so that
    all ranks have the same work. tokens: of the full document with its padding, a multiple of twice the number of
    context ranks if there are several.
    """
    return positions_on(
        parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size(), tokens
    )


def all_positions(tokens: int) -> Tensor:
    """Return the positions of a document's tokens in the order in which the ranks' parts of it are gathered."""
    size = parallel_state.get_context_parallel_world_size()
    return torch.cat([positions_on(rank, size, tokens) for rank in range(size)])


def positions_on(rank: int, size: int, tokens: int) -> Tensor:
    """As `context_positions`, for rank `rank` of `size` context ranks."""
    if size == 1:
        return torch.arange(tokens)
    if tokens % (2 * size):
        raise ValueError(f"documents of {tokens} tokens over {size} context ranks: expected a multiple of {2 * size}")
    chunks = torch.arange(tokens).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])
