"""A pipeline stage for torch 2.11 and 2.12, whose PipelineStage requires a gradient for each of its inputs.

The teacher's hidden states have no gradient. From torch 2.13 on, PipelineStage sends gradients only for inputs whose
meta tensor requires a gradient. Delete this file when pyproject.toml requires torch 2.13.
"""

from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage


class StageWithConstants(PipelineStage):
    """A stage whose last inputs and outputs may be constants, that is, tensors without a gradient. The meta tensors
    of constants in `input_args` and `output_args` require no gradient.
    """

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.input_requires = [tensor.requires_grad for tensor in named["input_args"]]
        self.output_requires = [tensor.requires_grad for tensor in named["output_args"]]

    def _prepare_forward_infra(self, *arguments: Any, **options: Any) -> Any:
        outputs = super()._prepare_forward_infra(*arguments, **options)
        for number in self.args_recv_info:
            self._mark_constants(number)
        return outputs

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        super().set_local_fwd_input(prev_stage_outputs, mb_index)
        self._mark_constants(mb_index)

    def _mark_constants(self, number: int) -> None:
        """Set requires_grad=False for received constants, because torch 2.11 sets True for every received tensor."""
        if self.is_first:
            return
        for info, requires in zip(self.args_recv_info[number], self.input_requires, strict=True):
            if info.buffer is not None and not requires:
                info.buffer.requires_grad_(False)

    def _create_grad_send_info(self, args_recv_info: tuple[Any, ...]) -> list[int | None]:
        targets = super()._create_grad_send_info(args_recv_info)
        return [to if requires else None for to, requires in zip(targets, self.input_requires, strict=True)]

    def _create_grad_recv_info(self, act_send_info: dict[int, list[Any]]) -> tuple[Any, ...]:
        received = super()._create_grad_recv_info(act_send_info)
        if not self.is_last:
            for info in self._differentiable(received, inverse=True):
                info.buffer = None  # this stage receives no gradient of a constant
        return received

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if not self.has_backward or self.is_last:
            return []
        return self._get_recv_ops(tuple(self._differentiable(self.grad_recv_info[bwd_chunk_id])))

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        # torch 2.11 expects a gradient for every output of the stage
        infos = self._differentiable(self.grad_recv_info[mb_index])
        for info, gradient in zip(infos, next_stage_bwd_outputs, strict=False):
            assert gradient is not None
            info.buffer = gradient

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> Any:
        outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs.get("output_grads")
        if not self.is_last and gradients is not None:
            kept = {"stage_output": self._differentiable(outputs), "output_grads": self._differentiable(gradients)}
            bwd_kwargs = bwd_kwargs | kept
        input_gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *rest, **named)
        # the result of torch 2.11 lacks the inputs that require no gradient; the result of torch 2.12 has them
        missing = len(self.input_requires) - len(input_gradients)
        return (*input_gradients, *[None] * missing), groups

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # in a V schedule, neighbouring stages can be on one rank, and gloo cannot send from a rank to itself
        return [message for message in super()._get_init_p2p_neighbors_ops() if message.group_peer != self.group_rank]

    def _differentiable(self, values: Any, *, inverse: bool = False) -> tuple[Any, ...]:
        """Return the values of outputs that require a gradient; with `inverse`, the values of all other outputs."""
        pairs = zip(values, self.output_requires, strict=True)
        return tuple(value for value, requires in pairs if requires != inverse)
