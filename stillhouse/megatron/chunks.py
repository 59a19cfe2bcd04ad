"""A model's chunks in Megatron-Core on this rank, and their passes through Megatron-Core's own schedules.

    chunks = Chunks.build(source, decoder, transformer, mesh)          loads the weights, too
    results = chunks.run(inputs, contexts, processor, backward=False)  one result of the processor per micro-batch

B rows, S tokens per row of a micro-batch, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as reduce_gradients
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from stillhouse.data import MicroBatch
from stillhouse.megatron.adapter import add_adapter
from stillhouse.megatron.loading import load, load_from_source
from stillhouse.megatron.model import build_chunks
from stillhouse.megatron.options import refused_settings
from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.megatron.routers import add_balance, current_in_backward, require_losses
from stillhouse.megatron.rows import LayerRows
from stillhouse.megatron.weight_names import Place
from stillhouse.megatron.weights import WeightTable, require_full_coverage, weight_table
from stillhouse.models import Decoder, OutputProcessor
from stillhouse.models.adapter import Lora, is_lora
from stillhouse.models.document_packing import ROWS
from stillhouse.models.families import LogitRule
from stillhouse.models.layer_hooks import Current
from stillhouse.models.layer_losses import RouterBalance
from stillhouse.models.processors import full_vocab
from stillhouse.objective import OutputHead
from stillhouse.parallel import (
    Mesh,
    ModelSource,
    NextTokens,
    StageInputs,
)
from stillhouse.parallel.layer_loss_interface import LayerLoss, MtpLayersRun


class VocabLogits(NamedTuple):
    """Logits [B, S, rows] of each depth, of this rank's rows of the vocabulary.

    The rows begin at `start` and may end with padding.
    """

    by_depth: Sequence[Tensor]
    start: int


@dataclass(frozen=True)
class Chunks:
    """A model's chunks on this rank: those of its pipeline stages.

    table: the places of the chunks' parameters in the full model. processor: calls the output processor of a pass.
    unrounded: the weights in float32 that the dtype of the parameters rounds; the optimizer takes them from here.
    wrapped: the chunks in wrappers that add up the gradients of the data ranks; empty for a frozen model.
    balance: the load balancing of the routers; None without it. packs: whether the documents of a micro-batch are
    packed; otherwise, each has a row. lora: the adapter; None without it. matrices: the shapes of its matrices by
    their names in the full model.
    """

    config: PreTrainedConfig
    transformer: TransformerConfig
    models: Sequence[nn.Module]
    table: WeightTable
    processor: MegatronProcessor
    unrounded: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    wrapped: Sequence[Any] = ()
    balance: RouterBalance | None = None
    packs: bool = True
    lora: Lora | None = None
    matrices: Mapping[str, torch.Size] = field(default_factory=dict)

    @classmethod
    def build(cls, source: ModelSource, decoder: Decoder, transformer: TransformerConfig, mesh: Mesh) -> "Chunks":
        """Build the chunks of a model and load their weights. A collective of all ranks.

        decoder: the full model, whose values are not used; its `packing` decides whether documents are packed.
        Raises ValueError on all ranks for a weight that the chunks do not have exactly once, or as the source does.
        """
        with refused_settings():
            models = build_chunks(decoder.config, transformer)
        with mesh.ranks.all_raise(ValueError):
            table = add_adapter(models, weight_table(models, decoder.config, Place.current()), decoder)
        tensors = decoder.state_dict()
        names = {*tensors} - {*decoder.shared_names()}
        require_full_coverage(table, {name: tensors[name].shape for name in names})
        unrounded = load_from_source(models, table, source, decoder, mesh)
        processor = MegatronProcessor(
            models[-1],
            full_vocab,
            vocab_size=decoder.config.vocab_size,
            softcap=LogitRule.from_config(decoder.config).softcap,
        )
        balance = decoder.layer_losses.get(RouterBalance.name)
        assert balance is None or isinstance(balance, RouterBalance)
        if balance is not None:
            add_balance(balance, models)
        return cls(
            decoder.config,
            transformer,
            models,
            table,
            processor,
            unrounded,
            balance=balance,
            packs=decoder.packing.name != ROWS,
            lora=decoder.lora,
            matrices={name: tensor.shape for name, tensor in tensors.items() if is_lora(name)},
        )

    def trained(self, replicas: int = 1, **options: Any) -> "Chunks":
        """replicas: of the optimizer's shards. options: further fields of `DistributedDataParallelConfig`."""
        self.transformer.finalize_model_grads_func = _sum_gradients
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=replicas,
            **options,
        )
        wrapped = [
            DistributedDataParallel(self.transformer, settings, model, disable_bucketing=number > 0)
            for number, model in enumerate(self.models)
        ]
        if settings.overlap_grad_reduce:
            # a reduction starts in the backward of the last micro-batch
            without_reduction = [model.no_sync for model in wrapped]
            self.transformer.no_sync_func = without_reduction if len(wrapped) > 1 else without_reduction[0]
        return replace(self, wrapped=wrapped)

    def frozen(self) -> "Chunks":
        self.unrounded.clear()
        for model in self.models:
            model.eval().requires_grad_(False)
        return self

    @property
    def depths(self) -> int:
        """The number of MTP layers."""
        return self.transformer.mtp_num_layers or 0

    def set_adapter(self, matrices: Iterable[tuple[str, Tensor]]) -> None:
        """Set the adapter's matrices on this rank. matrices: all of the full model, with their names."""
        blocks = tuple(block for block in self.table.blocks if is_lora(block.name))
        held = {(block.chunk, block.parameter) for block in blocks}
        shapes = {key: shape for key, shape in self.table.shapes.items() if key in held}
        for key in held:
            self.unrounded.pop(key, None)
        self.unrounded.update(load(self.models, replace(self.table, blocks=blocks, shapes=shapes), matrices))

    def logits(self, ids_BS: Tensor, positions_BS: Tensor, micro_batches: int) -> list[VocabLogits]:
        """Return the logits of all depths of equal micro-batches on the last stage, without gradients.

        ids_BS, positions_BS: the tokens of all context ranks, which divide the columns, and their positions in their
        documents; each rank gets the logits of its own columns.
        """
        labels_T = torch.full_like(ids_BS.flatten(), -1)
        batch = MicroBatch(
            {"input_ids": ids_BS, "position_ids": positions_BS},
            labels_T,
            weights_T=torch.zeros(labels_T.shape, device=ids_BS.device),
            document_T=torch.zeros_like(labels_T),
            valid_index=labels_T[:0],
        )
        part = batch.part(
            parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        )
        losses = [MtpLayersRun(NextTokens(self.depths))] if self.depths else []
        inputs = [StageInputs(part, {}, _logits, losses)] * micro_batches
        with torch.no_grad():
            return self.run(inputs, [None] * micro_batches, _logits, backward=False)

    def run(
        self,
        inputs: Sequence[StageInputs],
        contexts: Sequence[Any],
        processor: OutputProcessor,
        *,
        backward: bool,
        losses: Sequence[LayerLoss] = (),
    ) -> list[Any]:
        """Run micro-batches through Megatron-Core's schedule.

        Returns the processor's result for each micro-batch on the last stage, otherwise an empty list. backward:
        also add the gradient of the results' losses. losses: the load-balancing loss of each micro-batch, if there
        is one. With a loss of MTP layers, the processor gets a tuple of the hidden states of all depths.
        Raises ValueError if the model did not call the processor.
        """
        is_interleaved = self.transformer.virtual_pipeline_model_parallel_size is not None
        with_depths = self.depths > 0 and bool(inputs[0].losses)
        rows = LayerRows.in_pass(
            [entry.micro_batch for entry in inputs], packs=self.packs, uniform_shapes=is_interleaved
        )
        batches = [*zip(rows, contexts, losses or [LayerLoss()] * len(rows), strict=True)]
        one_pass = SchedulePass(
            processor, self.processor, self.balance, self.depths, with_depths=with_depths, backward=backward
        )
        models = [*(self.wrapped or self.models)]
        iterators = [iter(batches) for _ in models]
        get_forward_backward_func()(
            forward_step_func=one_pass.forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(batches),
            # of all context ranks; these two have an effect only if the stages do not send shapes
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
            require_losses(self.models, losses)
            self.balance.current = Current(None, recomputing=False)
        return results


def _logits(*, hidden_states: Any, head: OutputHead, context: Any, depth: int = 0) -> VocabLogits:
    by_depth = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
    return VocabLogits([head.logits(hidden) for hidden in by_depth], 0 if head.shard is None else head.shard.start)


def _sum_gradients(models: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Add up gradients over ranks without a division: losses are sums, divided by the step's normalizer."""
    reduce_gradients(models, None, **options)


class SchedulePass:
    """One pass of micro-batches through the chunks of a model on this rank.

    results: the processor's results, one for each micro-batch, on the last stage.

    hook: calls the output processor of a pass. balance: see `Chunks`. depths: the number of MTP layers.
    with_depths: whether the processor gets a tuple of the hidden states of all depths, instead of those of depth 0.
    backward: whether the schedule computes the gradients of the results' losses.
    """

    def __init__(
        self,
        processor: OutputProcessor,
        hook: MegatronProcessor,
        balance: RouterBalance | None,
        depths: int,
        *,
        with_depths: bool,
        backward: bool,
    ):
        self._processor, self._hook, self._balance, self._depths = processor, hook, balance, depths
        self._with_depths, self._backward = with_depths, backward
        self.results: list[Any] = []
        hook.processor = self._process

    def forward_step(self, data: Iterator[Any], model: nn.Module) -> tuple[Any, Any]:
        """Run a chunk on the next micro-batch. data: its rows, the processor's context, its load-balancing loss."""
        rows, context, loss = next(data)
        hook = {"output_processor": self._hook, "output_processor_context": (rows, context, [])}
        with loss.during_student():
            if self._balance is not None:
                self._balance.current = self._balance.current._replace(rows=rows)
            # no mask: attention is causal within documents, and padding is behind its document
            output = model(rows.ids_NL, rows.positions_NL, None, packed_seq_params=rows.packed, **hook)
            output = output[-1] if isinstance(output, tuple) else output  # the last depth has the loss
            if self._balance is not None and self._backward:
                current_in_backward(self._balance, output)
        return output, _loss_of

    def _process(
        self, *, hidden_states: Tensor, head: OutputHead, context: tuple[LayerRows, Any, list[Tensor]], depth: int = 0
    ) -> Tensor:
        """Keep the processor's result; Megatron-Core's schedules expect a tensor."""
        rows, targets, by_depth = context
        by_depth.append(rows.pack(hidden_states) if self._with_depths or not depth else hidden_states)
        if depth < self._depths:
            return hidden_states
        hidden: Any = tuple(by_depth) if self._with_depths else by_depth[0]
        self.results.append(self._processor(hidden_states=hidden, head=head, context=targets))
        return self.results[-1].loss if self._backward else torch.zeros((), device=hidden_states.device)


def _loss_of(loss: Tensor) -> tuple[Tensor, Tensor, None]:
    # the number of tokens is not used: the loss is divided already, by the step's normalizer
    # and with deallocate_pipeline_outputs, the schedule frees the tensor that it gets
    return loss.clone(), torch.ones((), dtype=torch.int, device=loss.device), None
