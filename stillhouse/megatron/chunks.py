"""A model's chunks in Megatron-Core on this rank, and their passes through Megatron-Core's own schedules.

    chunks = Chunks.build(source, decoder, transformer, mesh)          loads the weights, too
    results = chunks.run(inputs, contexts, processor, backward=False)  one result of the processor per micro-batch

If Transformer Engine is installed, its layers are used; this path needs a GPU and has never been run. Without it, and
always for Gemma, gpt-oss and a student with an adapter, Megatron-Core's local layers are used.

S tokens of a row on this rank, B rows, D width, C half of the width of a head.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as reduce_gradients
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from stillhouse.megatron import layers
from stillhouse.megatron.adapter import add_adapter
from stillhouse.megatron.families import Family, require_family
from stillhouse.megatron.model_config import refused_settings, rotary_frequencies
from stillhouse.megatron.processor import MegatronProcessor, MultiTokenGPTModel
from stillhouse.megatron.rows import MegatronRows
from stillhouse.megatron.weights import (
    Key,
    Place,
    WeightTable,
    copy_tensors,
    from_all_ranks,
    load_from_source,
    require_coverage,
    weight_table,
)
from stillhouse.models import Decoder, OutputProcessor
from stillhouse.models.adapter import is_lora
from stillhouse.models.document_packing import ROWS
from stillhouse.models.families import LogitRule
from stillhouse.models.layer_hooks import Current
from stillhouse.models.processors import full_vocab
from stillhouse.models.router_balancing import RouterBalance
from stillhouse.objective import OutputHead
from stillhouse.parallel import Mesh, ModelSource, StageInputs
from stillhouse.parallel.layer_loss import LayerLoss


@dataclass(frozen=True)
class Chunks:
    """A model's chunks on this rank, which are the model's pipeline stages on this rank.

    decoder: the full model without values.
    processor: calls the output processor of a pass.
    unrounded: the values in float32 of weights that were rounded to the parameters' dtype, for the optimizer.
    wrapped: the chunks in wrappers that sum the gradients of the data ranks; empty for a frozen model.
    packs: whether the documents of a micro-batch are packed; otherwise, each document has a row.
    """

    decoder: Decoder
    transformer: TransformerConfig
    models: Sequence[nn.Module]
    table: WeightTable
    processor: MegatronProcessor
    unrounded: dict[Key, Tensor] = field(default_factory=dict)
    wrapped: Sequence[Any] = ()
    balance: RouterBalance | None = None
    packs: bool = True

    @classmethod
    def build(cls, source: ModelSource, decoder: Decoder, transformer: TransformerConfig, mesh: Mesh) -> "Chunks":
        """Build the chunks of a model and load their weights. A collective of all ranks.

        decoder: the full model, whose values are not used. Its `packing` decides whether documents are packed.
        Raises ValueError on all ranks if the chunks do not have each weight exactly once, and for weights that the
        source cannot load.
        """
        with refused_settings():
            models = build_chunks(decoder.config, transformer)
        with mesh.ranks.all_raise(ValueError):
            table = add_adapter(models, weight_table(models, decoder.config, Place.current()), decoder)
        tensors = decoder.state_dict()
        names = {*tensors} - {*decoder.shared_names()}
        require_coverage(from_all_ranks(table), {name: tensors[name].shape for name in names})
        unrounded = load_from_source(models, table, source, decoder, mesh)
        config, packs = decoder.config, decoder.packing.name != ROWS
        softcap = LogitRule.from_config(config).softcap
        processor = MegatronProcessor(models[-1], full_vocab, vocab_size=config.vocab_size, softcap=softcap)
        balance = decoder.layer_losses.get(RouterBalance.name)
        assert balance is None or isinstance(balance, RouterBalance)
        if balance is not None:
            layers.add_balance(balance, models)
        return cls(decoder, transformer, models, table, processor, unrounded, balance=balance, packs=packs)

    def trained(self, replicas: int = 1, **options: Any) -> "Chunks":
        """Return the chunks with wrappers that sum the gradients of the data ranks.

        replicas: the number of replicas of the optimizer's shards.
        options: further fields of `DistributedDataParallelConfig`.
        """
        # gradients are not divided by a number of tokens, because the losses are divided by the step's normalizer
        self.transformer.finalize_model_grads_func = lambda models, num_tokens=None, **others: reduce_gradients(
            models, None, **others
        )
        options |= {"num_distributed_optimizer_instances": replicas, "use_distributed_optimizer": True}
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options)
        wrapped = [
            DistributedDataParallel(self.transformer, settings, model, disable_bucketing=number > 0)
            for number, model in enumerate(self.models)
        ]
        if settings.overlap_grad_reduce:
            # no_sync_func delays the reductions until the backward of the last micro-batch
            without_reduction = [model.no_sync for model in wrapped]
            self.transformer.no_sync_func = without_reduction if len(wrapped) > 1 else without_reduction[0]
        return replace(self, wrapped=wrapped)

    @property
    def depths(self) -> int:
        """The number of MTP layers."""
        return self.transformer.mtp_num_layers or 0

    @property
    def matrices(self) -> dict[str, torch.Size]:
        """The shapes of the adapter's matrices, by the matrices' names in the full model."""
        return {name: tensor.shape for name, tensor in self.decoder.state_dict().items() if is_lora(name)}

    def named_parameters(self) -> Iterator[tuple[Key, nn.Parameter]]:
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield (number, name), parameter

    def set_adapter(self, matrices: Iterable[tuple[str, Tensor]]) -> None:
        """Set the adapter's matrices on this rank. matrices: all matrices of the full model, with their names."""
        table = self.table.part({block.key for block in self.table.blocks if is_lora(block.name)})
        for key in table.shapes:
            self.unrounded.pop(key, None)
        self.unrounded.update(copy_tensors(self.models, table, matrices))

    def run(
        self,
        inputs: Sequence[StageInputs],
        contexts: Sequence[Any],
        processor: OutputProcessor,
        *,
        backward: bool,
        losses: Sequence[LayerLoss] = (),
    ) -> list[Any]:
        """Run micro-batches through Megatron-Core's schedule, and return the processor's results on the last stage.

        backward: whether to run backward for the losses in the results, and add their gradients.
        losses: the load-balancing loss of each micro-batch; empty without such a loss.

        If the inputs have a loss of MTP layers, the processor gets a tuple of the hidden states of all depths. Raises
        ValueError if the model did not call the processor for each micro-batch.
        """
        is_interleaved = self.transformer.virtual_pipeline_model_parallel_size is not None
        with_depths = self.depths > 0 and bool(inputs[0].losses)
        micro_batches = [entry.micro_batch for entry in inputs]
        rows = MegatronRows.in_pass(micro_batches, packs=self.packs, uniform_shapes=is_interleaved)
        batches = [*zip(rows, contexts, losses or [LayerLoss()] * len(rows), strict=True)]
        one_pass = _SchedulePass(self, processor, with_depths=with_depths, backward=backward)
        models = [*(self.wrapped or self.models)]
        iterators = [iter(batches) for _ in models]
        get_forward_backward_func()(
            forward_step_func=one_pass.forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(batches),
            # the next two arguments are read only if stages send no shapes; seq_length counts all context ranks
            seq_length=rows[0].ids_NL.shape[1] * parallel_state.get_context_parallel_world_size(),
            micro_batch_size=rows[0].ids_NL.shape[0],
            forward_only=not backward,
        )
        results = one_pass.results
        if self.models[-1].post_process and len(results) != len(batches):
            raise ValueError(
                f"{type(self.models[-1]).__name__} of megatron-core {megatron.core.__shortversion__} called the "
                f"output processor {len(results)} times for {len(batches)} micro-batches: expected one call for each"
            )
        if self.balance is not None:
            layers.require_losses(self.models, losses)
            self.balance.current = Current(None, recomputing=False)
        return results


class _SchedulePass:
    """One pass of micro-batches through the chunks of a model on this rank.

    with_depths: whether the processor gets a tuple of the hidden states of all depths; if not, those of depth 0.
    """

    def __init__(self, chunks: Chunks, processor: OutputProcessor, *, with_depths: bool, backward: bool):
        self._chunks, self._processor = chunks, processor
        self._with_depths, self._backward = with_depths, backward
        self.results: list[Any] = []
        chunks.processor.processor = self._process

    def forward_step(self, data: Iterator[Any], model: nn.Module) -> tuple[Any, Any]:
        """Run a chunk on the next micro-batch.

        data: yields the rows, the processor's context, and the load-balancing loss of each micro-batch.
        """
        rows, context, loss = next(data)
        balance = self._chunks.balance
        with loss.during_student():
            if balance is not None:
                balance.current = balance.current._replace(rows=rows)
            # attention needs no mask: it is causal within documents, and padding follows its document
            output = model(
                rows.ids_NL,
                rows.positions_NL,
                None,
                packed_seq_params=rows.packed,
                output_processor=self._chunks.processor,
                output_processor_context=(rows, context, []),
            )
            output = output[-1] if isinstance(output, tuple) else output  # the result of the last depth is the loss
            if balance is not None and self._backward:
                current = balance.current

                def set_current(gradient: Tensor) -> None:
                    balance.current = current

                # set the loss again before the backward of the chunk's layers, because other micro-batches may have
                # run between this forward and its backward. The hook runs when the output's gradient arrives
                output.register_hook(set_current)
        # the number of tokens (1) has no effect, because the loss is already divided by the step's normalizer. The
        # loss is cloned, because the schedule frees the returned tensor (deallocate_pipeline_outputs)
        return output, lambda loss: (loss.clone(), torch.ones((), dtype=torch.int, device=loss.device), None)

    def _process(
        self,
        *,
        hidden_states: Tensor,
        head: OutputHead,
        context: tuple[MegatronRows, Any, list[Tensor]],
        depth: int = 0,
    ) -> Tensor:
        """Call the processor at the last depth and keep its result. Returns a tensor, as the schedules expect it."""
        rows, targets, by_depth = context
        by_depth.append(rows.pack(hidden_states) if self._with_depths or not depth else hidden_states)
        if depth < self._chunks.depths:
            return hidden_states
        hidden: Any = tuple(by_depth) if self._with_depths else by_depth[0]
        self.results.append(self._processor(hidden_states=hidden, head=head, context=targets))
        return self.results[-1].loss if self._backward else torch.zeros((), device=hidden_states.device)


def build_chunks(config: PreTrainedConfig, transformer: TransformerConfig) -> list[MultiTokenGPTModel]:
    """Return the model chunks of this rank, in the order of Megatron-Core's schedules.

    config: the transformers configuration from which `transformer` was made. If the head is tied under a pipeline,
    the call is a collective of the first and the last stage.
    """
    family = require_family(config)
    count = transformer.virtual_pipeline_model_parallel_size
    has_engine = transformer.transformer_impl == "transformer_engine"
    rows, ranks = config.vocab_size, transformer.tensor_model_parallel_size
    chunks = []
    for vp_stage in [None] if count is None else range(count):
        ignore_virtual = vp_stage is None
        block = _block_spec(config, transformer, family, vp_stage)
        mtp = None
        if transformer.mtp_num_layers:  # MTP layers have the spec of the last layer
            mtp = get_gpt_mtp_block_spec(transformer, block, has_engine, vp_stage=vp_stage)
        for layer in () if mtp is None or has_engine else mtp.layer_specs:
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = layers.RmsNorm
        model = MultiTokenGPTModel(
            transformer,
            block,
            rows + -rows % ranks,  # padded, so that all tensor ranks have the same number of rows
            config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage),
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            position_embedding_type="rope",
            mtp_block_spec=mtp,
            vp_stage=vp_stage,
        )
        has_copy = model.mtp_process and not model.pre_process  # a copy of the embedding, for the MTP layers
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
            gemma_scale = torch.tensor(config.hidden_size**0.5).to(transformer.params_dtype)
            model.embedding.register_forward_hook(
                lambda module, inputs, output, scale=gemma_scale: output * scale.to(output)
            )
        # even with a GPU, Megatron-Core creates the router's weight in host memory
        chunks.append(model if transformer.use_cpu_initialization else model.to(torch.cuda.current_device()))
    return chunks


def _frozen_padding(pad: int, embedding: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Return the output without a gradient for the padding token, as in `torch.nn.Embedding`. A forward hook."""
    is_padding = inputs[0] == pad
    if embedding.reduce_scatter_embeddings:  # in this case, the output is this rank's part, [S, B, D]
        group = embedding.tp_group
        is_padding = is_padding.T.chunk(group.size())[group.rank()].contiguous()
    return torch.where(is_padding[..., None], output.detach(), output)


def _block_spec(
    config: PreTrainedConfig, transformer: TransformerConfig, family: Family, vp_stage: int | None
) -> TransformerBlockSubmodules:
    has_engine = transformer.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=has_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    if has_engine:
        # Transformer Engine's attention separates packed documents only in dtypes of 16 bits
        if transformer.params_dtype == torch.float32:
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = layers.CausalAttention
        return block
    norm = block.layer_norm = partial(layers.RmsNorm, rounds_last=family.gpt_oss)
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = layers.CausalAttention
        if family.softcap:
            attention.core_attention = partial(layers.CausalAttention, softcap=config.attn_logit_softcapping)
        if family.latent:
            layer.submodules.self_attention.module = layers.LatentAttention
            attention.q_layernorm = attention.kv_layernorm = layers.RmsNorm
        elif family.qk_norm:
            attention.q_layernorm = attention.k_layernorm = layers.RmsNorm
        if family.gpt_oss:
            experts = layer.submodules.mlp.keywords["submodules"].experts.keywords["submodules"]
            experts.linear_fc1, experts.linear_fc2 = layers.GateUpProjection, layers.ExpertProjection
        if family.gemma:
            layer.submodules.self_attention.module = layers.GemmaAttention
            attention.linear_proj = layers.NormedProjection
            layer.submodules.mlp.keywords["submodules"].linear_fc2 = layers.NormedProjection
    return block
