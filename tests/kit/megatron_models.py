"""A small GPTModel of megatron-core from its own local layer spec, under some layout, and a batch for it.

B rows, S tokens per row, V vocabulary (padded to V' rows).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from kit import NamedCase
from kit.cuda_is_cpu import cuda_is_cpu
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from stillhouse.megatron.processor import MultiTokenGPTModel
from stillhouse.parallel import temporary_groups

VOCABULARY, ROWS_V, B, S, CHUNK = 251, 252, 2, 40, 16
LAYERS = 2


@dataclass(frozen=True)
class Layout(NamedCase):
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence: bool = False  # sequence parallelism
    tied: bool = False
    depths: int = 0  # layers for multi-token prediction
    packed: bool = False
    experts: int = 0
    detached: bool = False  # MTP losses have no gradient for the main layers and the head
    mup: bool = False  # the head scales its logits


@contextmanager
def laid_out(layout: Layout) -> Iterator[None]:
    """Make Megatron's process groups over all ranks, and destroy them at the end."""
    with temporary_groups(), cuda_is_cpu():
        parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, context_parallel_size=layout.context)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


class Norm(nn.LayerNorm):
    """LayerNorm with sequence parallelism, which Megatron's norm refuses without Transformer Engine and Apex."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class Attention(nn.Module):
    """Causal attention within the documents of a packed row, over the keys and values of all context ranks."""

    def __init__(self, config: TransformerConfig, **_: Any):
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, _: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        query, key, value = (heads[:, None] if heads.dim() == 3 else heads for heads in (query, key, value))
        tokens = len(query)
        size = parallel_state.get_context_parallel_world_size()
        positions_S = context_rows(size, tokens * size)[parallel_state.get_context_parallel_rank()]
        positions_K = torch.cat(context_rows(size, tokens * size))
        group = parallel_state.get_context_parallel_group()
        key, value = (gather_from_sequence_parallel_region(heads.contiguous(), group=group) for heads in (key, value))
        sees_SK = positions_S[:, None] >= positions_K
        if packed_seq_params is not None:
            document_S = torch.bucketize(torch.arange(tokens), packed_seq_params.cu_seqlens_q[1:], right=True)
            sees_SK &= document_S[:, None] == document_S
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        made = nn.functional.scaled_dot_product_attention(*heads, attn_mask=sees_SK, enable_gqa=True)
        return made.permute(2, 0, 1, 3).flatten(2) if packed_seq_params is None else made[0].permute(1, 0, 2)


def context_rows(size: int, tokens: int) -> list[Tensor]:
    """Return for each context rank its positions in a row: two chunks, as in Megatron."""
    chunks = torch.arange(tokens).chunk(2 * size)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(size)]


def build(layout: Layout, seed: int, width: int = 32) -> GPTModel:
    """Return this rank's part of a model with random weights."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=width,
        num_attention_heads=4,
        ffn_hidden_size=40,
        use_cpu_initialization=True,
        init_method_std=0.3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        calculate_per_token_loss=True,
        num_moe_experts=layout.experts or None,
        moe_token_dispatcher_type="alltoall",
        mtp_num_layers=layout.depths or None,
        mtp_loss_scaling_factor=1.0,
        mtp_detach_heads=layout.detached,
        use_mup=layout.mup,
        mup_base_hidden_size=16,
    )
    layer = get_gpt_layer_local_spec(layout.experts or None)
    layer.submodules.self_attention.submodules.core_attention = Attention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    block = TransformerBlockSubmodules([layer] * (LAYERS // layout.pipeline), Norm)
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False) if layout.depths else None
    for layer in mtp.layer_specs if mtp else ():
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = Norm
    torch.manual_seed(seed)
    return MultiTokenGPTModel(
        config,
        block,
        ROWS_V,
        S * B if layout.packed else S,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=layout.tied,
        position_embedding_type="learned_absolute",
        mtp_block_spec=mtp,
    )


@dataclass(frozen=True)
class MicroBatch:
    input_ids_BS: Tensor
    position_ids_BS: Tensor
    labels_BS: Tensor
    packed: Any = None

    def part(self, rows_S: Tensor) -> "MicroBatch":
        """Return a context rank's part."""
        tensors = (self.input_ids_BS, self.position_ids_BS, self.labels_BS)
        return MicroBatch(*(tensor[:, rows_S] for tensor in tensors), self.packed)


def micro_batch(number: int, packed: bool) -> MicroBatch:
    random = torch.Generator().manual_seed(number)
    ids_BS = torch.randint(VOCABULARY, (B, S), generator=random)
    has_BS = torch.rand(B, S, generator=random) > 0.3
    labels_BS = torch.where(has_BS & torch.tensor(number != 1), ids_BS.roll(-1, 1), -100)
    positions_BS = torch.arange(S).expand(B, S)
    if not packed:
        return MicroBatch(ids_BS, positions_BS, labels_BS)
    borders = torch.tensor([0, 5, 18, B * S], dtype=torch.int32)
    # positions do not restart at documents, so only the documents' borders separate them
    tensors = (ids_BS.view(1, -1), torch.arange(B * S)[None], labels_BS.view(1, -1))
    return MicroBatch(*tensors, PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders))


def load(model: GPTModel, weights: dict[str, Tensor], layout: Layout) -> None:
    """Copy this rank's part of the weights into the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shard_of(weights[full_name(name, layout)], parameter.shape))


def full_name(name: str, layout: Layout) -> str:
    """Return the name in the whole model: layers are numbered over all stages; a tied head is the embedding."""
    if layout.tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        first = parallel_state.get_pipeline_model_parallel_rank() * (LAYERS // layout.pipeline)
        parts[2] = str(int(parts[2]) + first)
    return ".".join(parts)


def shard_of(weight: Tensor, shape: torch.Size) -> Tensor:
    """Return this tensor rank's part of a weight, which is sharded along one dim or whole."""
    for dim, (all_of_it, here) in enumerate(zip(weight.shape, shape, strict=True)):
        if all_of_it != here:
            return weight.narrow(dim, parallel_state.get_tensor_model_parallel_rank() * here, here)
    return weight
