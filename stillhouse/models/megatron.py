"""The same output processors in Megatron-Core's own `GPTModel`, through the hook that it has from 0.18 on.

    processor = MegatronProcessor(model, distillation(recipe))
    output = model(ids, positions, mask, output_processor=processor, output_processor_context=Taught(labels, …))

On the last pipeline stage the model calls the hook in the place of its output layer, with what this file turns into
hidden states and an `OutputHead`: hidden states that lie cut over tensor ranks (sequence parallel) are gathered, with
a reduce-scatter in backward; the output layer's rows that are here become a vocabulary shard, tied to the embedding
or not; [S, B, D] becomes [B, S, D], the order of Megatron's labels. Packed sequences are a row of B = 1, a context
rank has its own part of each row: processors see the tokens that are here, and their context brings the same ones.

S tokens per row, B rows, D width, n depths of multi-token prediction.
"""

import inspect
from typing import Any

import megatron.core
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stillhouse.models.head import OutputProcessor
from stillhouse.models.processors import LogProbs
from stillhouse.objective import ObjectiveOutput, OutputHead, VocabShard

_MTP_INPUTS = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "padding_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
    "sequence_len_offset",
)


class MegatronProcessor:
    """An output processor as Megatron-Core calls one. Keep it as long as the model: it holds the vocabulary shard.

    model: whose hook it will be, wrapped or not, of any pipeline stage. vocab_size: rows of the vocabulary that are
    real, where the output layer has been padded; the others then count as no token at all. None: all are real.

    flat: for `build_schedule_plan`, whose nodes take nothing but tensors and hand a gradient to each of them: a tuple
    of one tensor in the place of the processor's result, differentiable as that is. It holds the result's tensors one
    after the other, of an `ObjectiveOutput` the loss and its metrics, for which `unpack` is the way back.

    Raises ValueError for a model that would not call it, or would minimise something of its own beside it.
    """

    def __init__(
        self, model: nn.Module, processor: OutputProcessor, *, vocab_size: int | None = None, flat: bool = False
    ):
        _require_hook(_unwrapped(model))
        self.processor, self.vocab_size, self.flat = processor, vocab_size, flat
        self._shards: dict[int, VocabShard] = {}
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
        """What the processor makes of the hidden states [S, B, D]. The arguments are the hook's."""
        weight_VD = output_layer.weight if output_weight is None else output_weight
        if isinstance(weight_VD, DTensor):
            raise ValueError(
                "the output layer's weight is a DTensor, which nobody gathers around the output processor: expected "
                "Megatron's own tensor parallelism, and data parallelism that keeps the output layer whole"
            )
        # the output layer is not called: what Megatron waits for before it is, a weight on its way (overlapped
        # gathering of parameters), has to be waited for here
        for hook in output_layer._forward_pre_hooks.values():
            hook(output_layer, ())
        if output_layer.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=output_layer.tp_group)
        head = OutputHead(
            weight_VD,
            output_layer.bias,
            vocab_size=self.vocab_size,
            scale=float(scale_logits(torch.ones(()))),
            shard=self._shard(output_layer, len(weight_VD)),
        )
        made = self.processor(hidden_states=hidden_states.transpose(0, 1), head=head, context=context, depth=depth)
        return self._flattened(made) if self.flat else made

    def unpack(self, packed: Tensor) -> Any:
        """The `ObjectiveOutput` that a flat processor has given: the loss, differentiable, and the metrics; nothing
        per token. Of several depths, a tuple of them.
        """
        if packed.dim() == 2:
            return tuple(self.unpack(each) for each in packed)
        loss, *metrics = packed.unbind()
        named = zip(self._metrics, (each.detach() for each in metrics), strict=True)
        return ObjectiveOutput(loss, dict(named), {})

    def _flattened(self, made: Any) -> tuple[Tensor]:
        if isinstance(made, ObjectiveOutput):
            self._metrics = tuple(made.metrics)
            return (torch.stack([made.loss, *made.metrics.values()]),)
        if isinstance(made, Tensor):
            return (made,)
        if isinstance(made, LogProbs):
            return (torch.stack([*made]),)
        raise ValueError(
            f"flat=True for a processor that returned {type(made).__name__}: expected an ObjectiveOutput, LogProbs "
            "or a tensor"
        )

    def _shard(self, output_layer: Any, rows: int) -> VocabShard | None:
        group = output_layer.tp_group
        if group is None or group.size() == 1:
            return None
        if rows not in self._shards:
            start = group.rank() * rows
            # the gather of sequence parallelism sums the gradient as it scatters it
            summed_here = not output_layer.sequence_parallel
            self._shards[rows] = VocabShard(start, start + rows, group, reduce_hidden_grad=summed_here)
        return self._shards[rows]


class MultiTokenGPTModel(GPTModel):
    """A GPTModel whose output processor is called for every depth of multi-token prediction, too.

    With an output processor the last stage returns a tuple of what it made of the main head and of depth 1 … n, and
    no logits and no loss of Megatron's own arise. Without one this is a GPTModel.
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
            options |= {"mtp_in_postprocess": mtp_in_postprocess, "extra_block_kwargs": extra_block_kwargs}
            options |= {"output_processor": output_processor, "output_processor_context": output_processor_context}
            return super()._postprocess(hidden_states=hidden_states, **options)
        if not isinstance(output_processor, MegatronProcessor):
            raise ValueError(f"output_processor={output_processor!r}: expected a MegatronProcessor, for its depths")
        if mtp_in_postprocess:
            inputs = {name: options[name] for name in _MTP_INPUTS if name in options} | (extra_block_kwargs or {})
            hidden_states = self.mtp(hidden_states=hidden_states, embedding=self.embedding, **inputs)
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        made = [
            output_processor(
                hidden_states=each,
                output_layer=self.output_layer,
                output_weight=weight.detach() if depth and self.config.mtp_detach_heads else weight,
                context=output_processor_context,
                scale_logits=self._scale_logits,
                depth=depth,
            )
            for depth, each in enumerate(hidden_states.chunk(1 + self.config.mtp_num_layers))
        ]
        return (torch.stack([packed for (packed,) in made]),) if output_processor.flat else tuple(made)


def _require_hook(model: nn.Module) -> None:
    """Raise ValueError for a model that does not call an output processor, or minimises something beside it."""
    name = f"{type(model).__name__} of megatron-core {megatron.core.__version__}"
    for part in (model.forward, getattr(model, "_postprocess", None)):
        if part is None or "output_processor" not in inspect.signature(part).parameters:
            raise ValueError(
                f"{name} does not call an output processor: expected a GPTModel of megatron-core 0.18 or later"
            )
    config = getattr(model, "config", None)
    if getattr(config, "mtp_num_layers", None) and not isinstance(model, MultiTokenGPTModel):
        raise ValueError(
            f"{name} with mtp_num_layers: it would minimise a cross-entropy of its own, from logits, beside the "
            "processor; expected stillhouse.models.megatron.MultiTokenGPTModel"
        )
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError(
            "defer_embedding_wgrad_compute=True: it keeps what the output layer multiplies, which no output "
            "processor calls; expected False"
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model
