"""Runs output processors in Megatron-Core's own `GPTModel`, through a hook of Megatron-Core 0.18 and later.

    processor = MegatronProcessor(model, StepLoss(objective))
    targets = DistillTargets(labels, signals={TEACHER: signal})
    output = model(ids, positions, mask, output_processor=processor, output_processor_context=targets)

On the last pipeline stage, the model calls the hook instead of its output layer. If hidden states are sharded over
tensor ranks (sequence parallelism), they are gathered, with a reduce-scatter in backward. They are transposed from
[S, B, D] to [B, S, D], the order of Megatron's labels. The output layer's rows on this rank are a vocabulary shard.
Packed sequences form one row (B = 1). On a context rank, the context must contain the labels of this rank's tokens.

S tokens per row, B rows, D width.
"""

import dis
import inspect
from typing import Any

import megatron.core
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stillhouse.models.lm_head import OutputProcessor, require_callable
from stillhouse.models.processors import LogProbs
from stillhouse.objective import ObjectiveOutput, OutputHead, VocabShard

_MTP_INPUTS = """input_ids position_ids attention_mask padding_mask rotary_pos_emb rotary_pos_cos rotary_pos_sin
packed_seq_params sequence_len_offset"""
#: the beginnings of the names of Python's instructions that read an argument
_READS = ("LOAD_FAST", "LOAD_DEREF")


class MegatronProcessor:
    """An output processor for Megatron-Core's hook. Keep it as long as the model: it caches the vocabulary shard.

    model: the model that will call this object, wrapped or not, on any pipeline stage. vocab_size: the number of
    vocabulary rows without padding; padding rows get no probability. If it is None, the output layer has no padding.
    softcap: if it is not None, the logits become softcap · tanh(logits / softcap).

    flat: whether the hook returns a tuple with a single differentiable tensor, a stack of the tensors in the
    processor's result. `build_schedule_plan` needs this, because its nodes accept only tensors with gradients. For an
    `ObjectiveOutput`, the stacked tensors are the loss and the metrics, and `unpack` restores the `ObjectiveOutput`.

    Raises ValueError for a model that would not call the processor, or that would also minimise another loss.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: OutputProcessor,
        *,
        vocab_size: int | None = None,
        softcap: float | None = None,
        flat: bool = False,
    ):
        while isinstance(inner := getattr(model, "module", None), nn.Module):
            model = inner
        _require_hook(model)
        require_callable(processor)
        self.processor, self.vocab_size, self.softcap, self.flat = processor, vocab_size, softcap, flat
        self._shards: dict[tuple[Any, ...], VocabShard] = {}
        self._metrics: tuple[str, ...] = ()

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: Any,
        scale_logits: Any,
        depth: int = 0,
        **_: Any,
    ) -> Any:
        """Return the processor's result for the hidden states [S, B, D]. The hook defines the arguments."""
        weight_VD = output_layer.weight if output_weight is None else output_weight
        if isinstance(weight_VD, DTensor):
            raise ValueError(
                "the output layer's weight is a DTensor, which is not gathered for the output processor: expected "
                "Megatron's own tensor parallelism, and data parallelism that keeps the output layer whole"
            )
        # the output layer itself is not called, so its pre-hooks run here: in them, Megatron waits until the weight
        # is gathered (overlapped parameter gather)
        for hook in output_layer._forward_pre_hooks.values():
            hook(output_layer, ())
        if output_layer.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=output_layer.tp_group)
        head = OutputHead(
            weight_VD,
            output_layer.bias,
            vocab_size=self.vocab_size,
            scale=float(scale_logits(torch.ones(()))),
            softcap=self.softcap,
            shard=self._shard(output_layer, len(weight_VD)),
        )
        result = self.processor(hidden_states=hidden_states.transpose(0, 1), head=head, context=context, depth=depth)
        return (self._packed(result),) if self.flat else result

    def unpack(self, packed: Tensor) -> Any:
        """Return the `ObjectiveOutput` in a packed tensor, or, for several depths, a tuple with one for each depth.
        Values per token are not restored.
        """
        if packed.dim() == 2:
            return tuple(self.unpack(depth) for depth in packed)
        loss, *metrics = packed.unbind()
        named = zip(self._metrics, (metric.detach() for metric in metrics), strict=True)
        return ObjectiveOutput(loss, dict(named), {})

    def _packed(self, result: Any) -> Tensor:
        if isinstance(result, ObjectiveOutput):
            self._metrics = tuple(result.metrics)
            return torch.stack([result.loss, *result.metrics.values()])
        if isinstance(result, Tensor):
            return result
        if isinstance(result, LogProbs):
            return torch.stack([*result])
        raise ValueError(
            f"flat=True for a processor that returned {type(result).__name__}: expected an ObjectiveOutput, LogProbs "
            "or a tensor"
        )

    def _shard(self, output_layer: Any, rows: int) -> VocabShard | None:
        group = output_layer.tp_group
        if group is None or group.size() == 1:
            return None
        key = (group, rows, output_layer.sequence_parallel)
        if key not in self._shards:
            start = group.rank() * rows
            # with sequence parallelism, the backward of the gather sums the gradient (a reduce-scatter)
            summed_here = not output_layer.sequence_parallel
            self._shards[key] = VocabShard(start, start + rows, group, reduce_hidden_grad=summed_here)
        return self._shards[key]


class MultiTokenGPTModel(GPTModel):
    """A GPTModel that also calls the output processor for every depth of multi-token prediction.

    With a processor, the last stage returns a tuple of the processor's results for depths 0 … n, instead of
    Megatron's logits and loss.
    """

    def _postprocess(
        self,
        hidden_states: Tensor,
        *,
        output_processor: "MegatronProcessor | None" = None,
        output_processor_context: Any = None,
        mtp_in_postprocess: bool | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        if output_processor is None or not self.config.mtp_num_layers:
            return super()._postprocess(
                hidden_states=hidden_states,
                output_processor=output_processor,
                output_processor_context=output_processor_context,
                mtp_in_postprocess=mtp_in_postprocess,
                extra_block_kwargs=extra_block_kwargs,
                **options,
            )
        if not isinstance(output_processor, MegatronProcessor):
            raise ValueError(f"output_processor={output_processor!r}: expected a MegatronProcessor, for all depths")
        if mtp_in_postprocess:
            inputs = {name: options[name] for name in _MTP_INPUTS.split() if name in options} | (
                extra_block_kwargs or {}
            )
            hidden_states = self.mtp(hidden_states=hidden_states, embedding=self.embedding, **inputs)
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        results = [
            output_processor(
                hidden_states=hidden_SBD,
                output_layer=self.output_layer,
                output_weight=weight.detach() if depth and self.config.mtp_detach_heads else weight,
                context=output_processor_context,
                scale_logits=self._scale_logits,
                depth=depth,
            )
            for depth, hidden_SBD in enumerate(hidden_states.chunk(1 + self.config.mtp_num_layers))
        ]
        return (torch.stack([packed for (packed,) in results]),) if output_processor.flat else tuple(results)


def _require_hook(model: nn.Module) -> None:
    name = f"{type(model).__name__} of megatron-core {megatron.core.__shortversion__}"
    functions = [model.forward, *([model._postprocess] if hasattr(model, "_postprocess") else [])]
    if not all(_reads(function, "output_processor") for function in functions):
        raise ValueError(
            f"{name} does not call an output processor: expected a GPTModel of megatron-core 0.18 or later"
        )
    config = getattr(model, "config", None)
    if getattr(config, "mtp_num_layers", None) and not isinstance(model, MultiTokenGPTModel):
        raise ValueError(
            f"{name} with mtp_num_layers: Megatron would minimise its own cross-entropy in addition to the "
            "processor's loss; expected stillhouse.megatron.processor.MultiTokenGPTModel"
        )
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError(
            "defer_embedding_wgrad_compute=True keeps the inputs of the output layer, but an output processor does "
            "not call this layer; expected False"
        )


def _reads(function: Any, argument: str) -> bool:
    """Return whether a function has an argument and reads it. A model that does not read `output_processor` would
    compute another loss.
    """
    if argument not in inspect.signature(function).parameters:
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    reads = [] if code is None else [step for step in dis.get_instructions(code) if step.opname.startswith(_READS)]
    return any(argument in (step.argval if isinstance(step.argval, tuple) else (step.argval,)) for step in reads)
