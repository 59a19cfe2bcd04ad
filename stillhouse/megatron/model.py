"""Builds this rank's part of a transformers model as GPTModels of Megatron-Core.

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    transformer = transformer_config(config, tensor_model_parallel_size=2)
    chunks = build_chunks(config, transformer)                  # several under an interleaved pipeline
    load(chunks, weight_table(chunks, config, Place.current()), named_tensors)         # in loading.py

The weights are allocated, not initialized. With Transformer Engine installed, the layers are those of its layer spec.
Without it, and always for Gemma, gpt-oss and a student with an adapter, they are Megatron-Core's local layers, on a
CPU or a GPU, with `RmsNorm` and `CausalAttention`. The path with Transformer Engine has not been run: it needs a GPU.

S tokens of a row on this rank, B rows, D width, C half of the width of a head.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PreTrainedConfig

from stillhouse.megatron.attention import CausalAttention, LatentAttention
from stillhouse.megatron.layers import ExpertProjection, GateUpProjection, GemmaAttention, NormedProjection, RmsNorm
from stillhouse.megatron.model_config import (
    Family,
    padded_vocabulary,
    require_family,
    rotary_frequencies,
)
from stillhouse.megatron.processor import MultiTokenGPTModel


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
    family = require_family(config)
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    block = _block_spec(config, transformer, family, vp_stage)
    model = MultiTokenGPTModel(
        transformer,
        block,
        padded_vocabulary(config.vocab_size, transformer.tensor_model_parallel_size),
        config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        mtp_block_spec=_mtp_spec(block, transformer, vp_stage),
        vp_stage=vp_stage,
    )
    has_copy = model.mtp_process and not model.pre_process  # of the embedding, for the MTP layers
    if has_copy and config.tie_word_embeddings:
        model.output_layer.weight = None  # the copy is also the head's weight
    for name, module in model.named_modules():
        # GPTModel's own arguments express only the scaling of Llama 3.1 with its default numbers
        if isinstance(module, RotaryEmbedding):
            layer_type = "sliding_attention" if name.endswith("window_rotary_pos_emb") else "full_attention"
            frequencies_C, _ = rotary_frequencies(config, layer_type)
            module.inv_freq = frequencies_C.to(module.inv_freq.device)
    has_embedding = model.pre_process or has_copy
    if has_embedding and config.pad_token_id is not None:
        model.embedding.word_embeddings.register_forward_hook(partial(_frozen_padding, config.pad_token_id))
    if has_embedding and family.gemma:
        scale = torch.tensor(config.hidden_size**0.5).to(transformer.params_dtype)
        model.embedding.register_forward_hook(lambda module, inputs, hidden_SBD: hidden_SBD * scale.to(hidden_SBD))
    # with a GPU, Megatron-Core creates the router's weight in host memory
    return model if transformer.use_cpu_initialization else model.to(torch.cuda.current_device())


def _frozen_padding(pad: int, embedding: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Give the padding token's embedding no gradient, as `torch.nn.Embedding` does. A forward hook."""
    is_padding = inputs[0] == pad
    if embedding.reduce_scatter_embeddings:  # then the output is this rank's part, [S, B, D]
        group = embedding.tp_group
        is_padding = is_padding.T.chunk(group.size())[group.rank()].contiguous()
    return torch.where(is_padding[..., None], output.detach(), output)


def _block_spec(
    config: PreTrainedConfig, transformer: TransformerConfig, family: Family, vp_stage: int | None
) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=_has_transformer_engine(transformer),
        normalization="RMSNorm",
        vp_stage=vp_stage,
    )
    if _has_transformer_engine(transformer):
        if transformer.params_dtype == torch.float32:  # its attention separates packed documents in 16 bits alone
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = CausalAttention
        return block
    norm = block.layer_norm = partial(RmsNorm, rounds_last=family.gpt_oss)
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        if family.softcap:
            attention.core_attention = partial(CausalAttention, softcap=config.attn_logit_softcapping)
        if family.latent:
            layer.submodules.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = RmsNorm
        elif family.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
        if family.gpt_oss:
            experts = layer.submodules.mlp.keywords["submodules"].experts.keywords["submodules"]
            experts.linear_fc1, experts.linear_fc2 = GateUpProjection, ExpertProjection
        if family.gemma:
            layer.submodules.self_attention.module = GemmaAttention
            attention.linear_proj = NormedProjection
            layer.submodules.mlp.keywords["submodules"].linear_fc2 = NormedProjection
    return block


def _mtp_spec(
    block: TransformerBlockSubmodules, transformer: TransformerConfig, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the MTP layers of the chunk, which are like the last layer; None for a chunk without them."""
    if not transformer.mtp_num_layers:
        return None
    has_engine = _has_transformer_engine(transformer)
    spec = get_gpt_mtp_block_spec(transformer, block, has_engine, vp_stage=vp_stage)
    for layer in () if spec is None or has_engine else spec.layer_specs:
        norms = layer.submodules
        norms.enorm = norms.hnorm = norms.layer_norm = RmsNorm
    return spec


def _has_transformer_engine(transformer: TransformerConfig) -> bool:
    return transformer.transformer_impl == "transformer_engine"
