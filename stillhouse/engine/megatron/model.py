"""Builds this rank's part of a transformers model as GPTModels of Megatron-Core.

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    transformer = transformer_config(config, tensor_model_parallel_size=2)
    chunks = build_chunks(config, transformer)                  # several under an interleaved pipeline
    load(chunks, weight_table(chunks, config, Place.current()), tensors)

The weights are allocated, not initialized. With Transformer Engine installed, the layers are those of its layer spec.
Without it they are Megatron-Core's local layers, on a CPU or a GPU, with the norm below and `CausalAttention`, for
which each row of a micro-batch must be one document. The path with Transformer Engine has not been run: it needs a
GPU.

B rows, S tokens per row, D width.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from stillhouse.engine.megatron.attention import CausalAttention, LatentAttention
from stillhouse.engine.megatron.model_config import padded_vocabulary, rotary_frequencies
from stillhouse.models.megatron import MultiTokenGPTModel


class RmsNorm(nn.Module):
    """RMSNorm with sequence parallelism, which Megatron-Core's own norm refuses without Transformer Engine and Apex.

    The order of operations is that of transformers: normalized in float32, rounded, then multiplied by the weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps
        # Megatron-Core sums the gradients of parameters with this attribute over the tensor ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_SBD: Tensor) -> Tensor:
        wide = hidden_SBD.float()
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normalized.to(hidden_SBD.dtype)


def build_chunks(config: PreTrainedConfig, transformer: TransformerConfig) -> list[MultiTokenGPTModel]:
    """Return the model chunks of this rank, in the order of Megatron-Core's schedules.

    config: the transformers configuration from which `transformer` was made. Megatron-Core's process groups must
    exist. A tied head under a pipeline makes this a collective of the first and the last stage.
    """
    stages: list[int | None] = [None]
    if transformer.virtual_pipeline_model_parallel_size is not None:
        stages = [*range(transformer.virtual_pipeline_model_parallel_size)]
    return [_build_chunk(config, transformer, vp_stage) for vp_stage in stages]


def _build_chunk(
    config: PreTrainedConfig, transformer: TransformerConfig, vp_stage: int | None
) -> MultiTokenGPTModel:
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model = MultiTokenGPTModel(
        transformer,
        _block_spec(transformer, vp_stage),
        padded_vocabulary(config.vocab_size, transformer.tensor_model_parallel_size),
        config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    frequencies_C, _ = rotary_frequencies(config)
    for module in model.modules():
        # GPTModel's own arguments express only the scaling of Llama 3.1 with its default numbers
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = frequencies_C.to(module.inv_freq.device)
    # with a GPU, Megatron-Core creates the router's weight in host memory
    return model if transformer.use_cpu_initialization else model.to(torch.cuda.current_device())


def _block_spec(transformer: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=HAVE_TE, normalization="RMSNorm", vp_stage=vp_stage
    )
    if HAVE_TE:
        return block
    block.layer_norm = RmsNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        if transformer.multi_latent_attention:
            layer.submodules.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = RmsNorm
        elif transformer.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
    return block
