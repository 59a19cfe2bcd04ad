"""Layers that Megatron-Core does not have (`chunks.py` adds them to a layer spec), and its routers' balancing loss.

S tokens of a row or of a packed document on this rank, K tokens of this row or document on all context ranks, B rows,
D width, H heads, C width of a head, T tokens of all packed documents or of an expert, I input width, O output width,
L width of the latent vectors, X experts.
"""

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from stillhouse.megatron.rows import context_positions
from stillhouse.models import Activations, varlen
from stillhouse.models.router_balancing import RouterBalance
from stillhouse.parallel.layer_loss import LayerLoss


def _device(config: TransformerConfig) -> Any:
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


class CausalAttention(nn.Module):
    """The core attention of a layer, with a window if the layer has one.

    Each context rank gathers the keys and values of all context ranks; backward reduces their gradients.
    softcap: if it is not None, scores become softcap · tanh(scores / softcap). In gpt-oss (`softmax_type` learnable),
    each head has an additional score without a value (a sink). With a softcap or sinks, all probabilities are in
    memory at once.
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
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=_device(config)))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self._is_plain = softcap is None and self.softmax_offset is None
        self.scale = 1 / sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # the number of earlier keys that a query sees
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
        """Return the heads' outputs [S, B, H·C], where C is the width of the values.

        The inputs have the shape [S, B, H, C]. For packed documents, it is [T, H, C], and the outputs are [T, H·C].
        """
        group = parallel_state.get_context_parallel_group()
        if packed_seq_params is None:
            return self._attend_documents(query, key, value, [len(query) * group.size()])
        may_read_borders = self._is_plain and query.shape[-1] <= varlen.WIDEST
        if group.size() == 1 and may_read_borders and varlen.refusal(Activations(query.device), query.dtype) is None:
            borders = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            window = None if self.window is None else self.window + 1
            made_THC = varlen.attend_padded(query, key, value, *borders, scale=self.scale, window=window)
            return made_THC.flatten(1)
        query, key, value = (heads_THC[:, None] for heads_THC in (query, key, value))
        return self._attend_documents(query, key, value, packed_seq_params.cu_seqlens_q.diff().tolist())[:, 0]

    def _attend_documents(
        self, query_SBHC: Tensor, key_SBHC: Tensor, value_SBHC: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """Return the outputs of documents that follow one another, [S, B, H·C].

        lengths: the numbers of tokens of the documents on all context ranks
        """
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
            ranks = range(parallel_state.get_context_parallel_world_size())
            gathered_K = torch.cat([context_positions(len(key_KBHC), rank) for rank in ranks])
            distance_SK = context_positions(len(key_KBHC))[:, None] - gathered_K
            mask_SK = distance_SK >= 0
            if self.window is not None:
                mask_SK &= distance_SK <= self.window
            mask_SK = mask_SK.to(query_SBHC.device)
        query_BHSC, key_BHKC, value_BHKC = (heads.permute(1, 2, 0, 3) for heads in (query_SBHC, key_KBHC, value_KBHC))
        if not self._is_plain:
            assert mask_SK is not None
            output_BHSC = self._eager(query_BHSC * self.scale, key_BHKC, value_BHKC, mask_SK)
        else:
            output_BHSC = nn.functional.scaled_dot_product_attention(
                query_BHSC,
                key_BHKC,
                value_BHKC,
                attn_mask=mask_SK,
                is_causal=mask_SK is None,
                scale=self.scale,
                enable_gqa=query_BHSC.shape[1] != key_BHKC.shape[1],
            )
        return output_BHSC.permute(2, 0, 1, 3).flatten(2)

    def _eager(self, query_BHSC: Tensor, key_BHKC: Tensor, value_BHKC: Tensor, mask_SK: Tensor) -> Tensor:
        """Return attention as transformers' eager attention computes it. Keys may have fewer heads than queries."""
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

    All heads use the same rotated part of the keys, so the heads of a tensor rank give only a part of its gradient.
    Megatron-Core's local layers do not sum these parts. This class gathers the rows of the down projection's output
    and shards it over tokens, as Transformer Engine does. The backward of the later gather of tokens sums the parts.
    """

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        query_SBL, key_value_SBL = super()._qkv_down_projection(hidden_states)
        if self.config.sequence_parallel:
            key_value_SBL = scatter_to_sequence_parallel_region(
                gather_from_tensor_model_parallel_region(key_value_SBL)
            )
        return query_SBL, key_value_SBL


def _gathered(heads_SBHC: Tensor) -> Tensor:
    """Return the keys or values of all context ranks, [ranks, S, B, H, C]."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return heads_SBHC[None]
    return gather_from_sequence_parallel_region(heads_SBHC.contiguous(), group=group).unflatten(0, (group.size(), -1))


class RmsNorm(nn.Module):
    """RMSNorm with sequence parallelism, which Megatron-Core's own norm refuses without Transformer Engine and Apex.

    As in transformers, the normalized values are rounded, then multiplied by the weight. rounds_last: whether to
    multiply in float32 and round the product instead, as in gpt-oss. Gemma, whose factor is 1 + weight, always rounds
    last.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, rounds_last: bool = False, **_: Any
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=_device(config)))
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
        # the residual stream may have a wider dtype than the weights; the next projection needs the weights' dtype
        return (self.weight * normalized.to(hidden_SBD.dtype)).to(self.weight.dtype)


class NormedProjection(RowParallelLinear):
    """The last projection of attention or MLP, with a norm of its output. The norm is a forward hook, so that an
    adapter can add to the projection's output before the norm.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any):
        super().__init__(input_size, output_size, config=config, **options)
        self.post_norm = RmsNorm(config, output_size, config.layernorm_epsilon)
        self.register_forward_hook(lambda layer, inputs, outputs: (layer.post_norm(outputs[0]), outputs[1]))


class GemmaAttention(SelfAttention):
    """Attention that has a separate rotary embedding in layers with a window.

    window_rotary_pos_emb: the separate embedding, whose frequencies `build_chunks` sets; None without a window.
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
            # for packed documents, the embedding contains the positions of all context ranks
            is_packed = options.get("packed_seq_params") is not None
            tokens = len(rotary_pos_emb) * (1 if is_packed else self.config.context_parallel_size)
            rotary_pos_emb = self.window_rotary_pos_emb(tokens, packed_seq=is_packed)
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **options)


class ExpertProjection(nn.Module):
    """A projection of one expert. shift_1O: the bias, which is a row of the tensor [E, O] of all E experts."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any):
        super().__init__()
        dtype, device = config.params_dtype, _device(config)
        self.weight_IO = nn.Parameter(torch.empty(input_size, output_size, dtype=dtype, device=device))
        self.shift_1O = nn.Parameter(torch.empty(1, output_size, dtype=dtype, device=device))
        for parameter in self.parameters():
            # Megatron-Core reads these attributes to decide over which ranks a gradient is summed, and where the norm
            # counts it
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(self, hidden_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product and the bias; Megatron-Core's `MLP` adds the bias."""
        return hidden_TI @ self.weight_IO, self.shift_1O[0]


class GateUpProjection(ExpertProjection):
    """Gate and up projection. Their columns alternate in the weight; in the results, gate columns come first."""

    def forward(self, hidden_TI: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat([value[..., ::2], value[..., 1::2]], -1) for value in super().forward(hidden_TI))  # type: ignore[return-value]


def add_balance(balance: RouterBalance, chunks: Sequence[nn.Module]) -> None:
    """Register hooks that add the current loss of `balance` in the routers of the chunks.

    If backward recomputes a layer, the layer adds the loss only during recomputation, because the first forward has
    no gradients. So when the backward of a micro-batch begins, `balance` must again have the loss of this micro-batch
    (`chunks.py`).
    """
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(partial(_add_loss, balance, f"{number}.{name}"))


def require_losses(chunks: Sequence[nn.Module], losses: Sequence[LayerLoss]) -> None:
    """Raise ValueError unless each router of the chunks has added each loss. losses: the loss of each micro-batch."""
    routers = sum(isinstance(module, TopKRouter) for chunk in chunks for module in chunk.modules())
    for loss in losses:
        if len(loss.losses()) != routers:
            raise ValueError(
                f"{len(loss.losses())} of {routers} routers of Megatron-Core added the load-balancing loss: "
                "expected all of them, in a forward pass with gradients or in a recomputation by backward"
            )


def _add_loss(balance: RouterBalance, name: str, router: TopKRouter, inputs: tuple[Any, ...], outputs: Any) -> Any:
    """Return a router's outputs with the load-balancing loss in their autograd graph. A forward hook of the router.

    inputs: the first input is the hidden states [S, N, D] of N rows.
    outputs: the experts' factors for each token, [T, X], and the mask of the experts that each token has chosen,
        [T, X].
    """
    if not balance.is_active:
        return outputs
    scores_TX, is_chosen_TX = outputs
    logits_SNX = router.gating(inputs[0])  # the router does not return its logits
    logits_SNX.register_hook(lambda gradient: gradient.contiguous())  # the backward of `gating` calls view()
    chosen_SNK = is_chosen_TX.int().topk(router.topk).indices.unflatten(0, logits_SNX.shape[:2])
    columns = [logits_SNX, chosen_SNK]
    if router.config.sequence_parallel:
        # each tensor rank computes the loss of all tokens, but the gradient of only this rank's tokens
        gather = partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=False)
        columns = [gather(values, group=router.tp_group) for values in columns]
    logits_TX, chosen_TK = (values.transpose(0, 1).flatten(0, 1) for values in columns)
    return balance.with_balance(name, logits_TX, scores_TX, chosen_TK), is_chosen_TX
