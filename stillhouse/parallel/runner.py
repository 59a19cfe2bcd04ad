"""Runs student and teacher, distributed over processes: the same calls under every layout.

runner = build_runner(layout, mesh, student_source, teacher_source)
results = runner.forward(inputs)     one result of the output processor for each micro-batch
norm = runner.clip(1.0)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stillhouse.dry_run import replaceable
from stillhouse.models.dtensors import gathered_tensor
from stillhouse.parallel.distributed_student import DistributedStudent, StageWeight
from stillhouse.parallel.gradients import add_up_gradients, gradient_norm, reduce_partial_grads, scale_gradients
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.pipeline import Pipeline
from stillhouse.parallel.run_layout import Layout
from stillhouse.parallel.teacher_student_pair import StageInputs, StageResults, TeacherStudentPair


class Runner(DistributedStudent):
    """Runs micro-batches through student and teacher, or through their stages on this rank."""

    def __init__(
        self,
        layout: Layout,
        pairs: dict[int, TeacherStudentPair],
        pipeline: Pipeline | None,
        mesh: Mesh,
        *,
        tied: bool,
    ):
        self.layout, self.pairs, self.pipeline, self.mesh, self.tied = layout, pairs, pipeline, mesh, tied
        last = pairs.get(layout.stages - 1)
        self.decoders, self.teacher = [pair.student for pair in pairs.values()], next(iter(pairs.values())).teacher
        self.has_last_stage, self.teacher_head = last is not None, None if last is None else last.teacher_head
        self.prefetch = None if pipeline is None else pipeline.prefetch
        #: the parameters whose gradients are summed over the tensor ranks after every backward: each rank has a full
        #: copy of such a parameter, but only a partial gradient
        self.summed_over_tensor_ranks: list[nn.Parameter] = []

    def forward(self, inputs: Sequence[StageInputs]) -> list[Any]:
        if not inputs:
            raise ValueError("no micro-batches: expected at least one on every process")
        with torch.no_grad():
            if self.pipeline is not None:
                results = self.pipeline.forward(inputs)
            else:
                results = [self.pairs[0](batch) for batch in inputs]
        for pair in self.pairs.values():
            reshard(pair)  # FSDP reshards in backward, and no backward follows
        return [result.output for result in results]

    def forward_backward(self, inputs: Sequence[StageInputs]) -> list[StageResults]:
        """Add the gradients of the losses to the student's parameters; return the results of this rank's stages."""
        with self.gradients_summed():
            if self.pipeline is not None:
                return self.pipeline.forward_backward(inputs)
            results = []
            for pair, batch in self.one_by_one(inputs):
                results.append(pair(batch))
                results[-1].output.loss.backward()
            return results

    def one_by_one(self, inputs: Sequence[StageInputs]) -> Iterator[tuple[TeacherStudentPair, StageInputs]]:
        """Yield the pair and the inputs of each micro-batch, without a pipeline. The caller runs the passes. With
        HSDP, the backward of the last micro-batch all-reduces the gradients that each replica has accumulated.
        """
        pair = self.pairs[0]
        for number, batch in enumerate(inputs, start=1):
            if isinstance(pair.student, FSDPModule):
                pair.student.set_requires_all_reduce(number == len(inputs))
            yield pair, batch

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the student's parameters on this rank. A tied head on another stage than the embedding has the head's
        name (see `shared_name`). A copy of the embedding for MTP layers on the last stage has the embedding's name.
        """
        for student in self.decoders:
            yield from student.named_parameters()

    def stage_weights(self) -> dict[str, StageWeight]:
        return {
            name: StageWeight(
                torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
                partial(gathered_tensor, tensor, self.device),
            )
            for student in self.decoders
            for name, tensor in student.state_dict().items()
        }

    def shared_name(self, name: str) -> str:
        """Return a parameter's name in the full model; a tied head has the embedding's name there."""
        return self.decoders[0].embedding_name if self.tied and name == "head.linear.weight" else name

    def zero_grad(self) -> None:
        for _, parameter in self.named_parameters():
            parameter.grad = None

    @replaceable
    def clip(self, limit: float) -> Tensor:
        """Scale the gradient down to a norm of at most `limit` (0: do not scale). Returns the norm of the global
        gradient before, the same on every rank.
        """
        held = reduce_partial_grads(parameter for _, parameter in self.named_parameters())
        degrees = self.layout.degrees
        # the norm counts the embedding of the first stage, but not its copy on the last stage
        copy = None if self.pipeline is None else self.pipeline.embedding_copy
        counted = [parameter for parameter in held if parameter is not copy]
        norm = gradient_norm(counted, degrees.processes // degrees.pipeline, self.ranks)
        if limit:
            scale_gradients(held, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @contextmanager
    def gradients_summed(self) -> Iterator[None]:
        """Sum over tensor ranks the gradients that the block adds to the parameters that need it."""
        before = [parameter.grad for parameter in self.summed_over_tensor_ranks]
        for parameter in self.summed_over_tensor_ranks:
            parameter.grad = None
        yield
        if self.summed_over_tensor_ranks:
            add_up_gradients(self.summed_over_tensor_ranks, self.mesh.weights.get_group("tensor"), self.mesh.device)
        for parameter, gradient in zip(self.summed_over_tensor_ranks, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad


def reshard(module: nn.Module) -> None:
    """Free the weights that FSDP has gathered for a forward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
