"""What Megatron-Core's pipeline schedule calls for each micro-batch of a pass through a model's chunks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.megatron.routers import current_in_backward
from stillhouse.megatron.rows import LayerRows
from stillhouse.models import OutputProcessor
from stillhouse.models.router_aux_loss import RouterBalance
from stillhouse.objective import OutputHead


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
        rows, of_batch, by_depth = context
        by_depth.append(rows.pack(hidden_states) if self._with_depths or not depth else hidden_states)
        if depth < self._depths:
            return hidden_states
        hidden: Any = tuple(by_depth) if self._with_depths else by_depth[0]
        self.results.append(self._processor(hidden_states=hidden, head=head, context=of_batch))
        return self.results[-1].loss if self._backward else torch.zeros((), device=hidden_states.device)


def _loss_of(loss: Tensor) -> tuple[Tensor, Tensor, None]:
    # the number of tokens is not used: the loss is divided already, by the step's normalizer
    # and with deallocate_pipeline_outputs, the schedule frees the tensor that it gets
    return loss.clone(), torch.ones((), dtype=torch.int, device=loss.device), None
