"""Runs student and teacher, distributed over processes, by the same calls under every layout.

runner = build_runner(layout, mesh, student_source, teacher_source)
results = runner.forward(inputs)     one result of the output processor for each micro-batch
norm = runner.clip(1.0)

`Runner` implements the interface `DistributedStudent` for torch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.dry_run import replaceable
from stillhouse.models import Decoder, initialize_lora
from stillhouse.models.dtensors import gathered_tensor
from stillhouse.parallel.gradients import add_up_gradients, gradient_norm, reduce_partial_grads, scale_gradients
from stillhouse.parallel.mesh import Degrees, Mesh
from stillhouse.parallel.pipeline import Pipeline
from stillhouse.parallel.ranks import Ranks
from stillhouse.parallel.run_layout import Layout
from stillhouse.parallel.teacher_student_pair import DecoderHead, StageInputs, StageResults, TeacherStudentPair


class ShardedMicroBatches(list[MicroBatch]):
    """This process's micro-batches of a step, on its device. A context rank has only its columns of the sequences.

    all_ranks: all micro-batches of the step, with full sequences. uniform_shapes: see `padded_shapes`.
    on_cpu: a copy of `parts` in host memory, where reading does not wait for the device; by default `parts` itself.
    """

    def __init__(
        self,
        parts: Sequence[MicroBatch],
        all_ranks: StepMicroBatches,
        *,
        uniform_shapes: bool = False,
        on_cpu: Sequence[MicroBatch] | None = None,
    ):
        super().__init__(parts)
        self.all_ranks, self.uniform_shapes = all_ranks, uniform_shapes
        self.on_cpu: Sequence[MicroBatch] = parts if on_cpu is None else on_cpu


@replaceable
def shard_micro_batches(step: StepMicroBatches, mesh: Mesh, *, uniform_shapes: bool = False) -> ShardedMicroBatches:
    """Return this process's part of a step. All data ranks get the same number of micro-batches; if necessary, the
    first micro-batch is repeated without targets.
    """
    degrees, parts = mesh.degrees, []
    shapes_BS = padded_shapes(step.shapes_BS, degrees, uniform_shapes=uniform_shapes)
    for number in range(mesh.coordinate("data"), len(shapes_BS), degrees.data):
        micro_batch = step[number] if number < len(step) else step[0].without_targets()
        parts.append(micro_batch.padded(*shapes_BS[number]).part(mesh.coordinate("context"), degrees.context))
    moved = [part.to(mesh.device) for part in parts]
    return ShardedMicroBatches(moved, step, uniform_shapes=uniform_shapes, on_cpu=parts)


def padded_shapes(
    shapes_BS: Sequence[tuple[int, int]], degrees: Degrees, *, uniform_shapes: bool = False
) -> list[tuple[int, int]]:
    """Return the padded shapes of a step's micro-batches, with repetitions, before context ranks divide the columns.

    uniform_shapes: whether all micro-batches get one shape, and the number of micro-batches per data rank becomes a
        multiple of the number of pipeline ranks. The pipeline's schedules require this.
    """
    divisor = degrees.data * (degrees.pipeline if uniform_shapes else 1)
    count = math.ceil(len(shapes_BS) / divisor) * divisor
    shapes = list(shapes_BS)
    if uniform_shapes:
        rows_B, tokens_S = zip(*shapes, strict=True)
        shapes = [(max(rows_B), max(tokens_S))] * len(shapes)
    shapes += shapes[:1] * (count - len(shapes))
    return [(rows, math.ceil(tokens / degrees.context) * degrees.context) for rows, tokens in shapes]


@dataclass(frozen=True)
class StageWeight:
    """A tensor of the full student. The ranks of a pipeline stage have shards of the tensor.

    empty: a tensor of the same shape and dtype on the meta device.
    gather: returns the full tensor on the student's device; a collective of the ranks that have shards.
    """

    empty: Tensor
    gather: Callable[[], Tensor]


class DistributedStudent(Protocol):
    """A student that is distributed over the processes of a mesh, with the teacher in its stages if there is one.

    decoders: the student; under a pipeline, the student's stages on this rank.
    teacher: the teacher in the student's stages; under a pipeline, the teacher's part on this rank's first stage.
    teacher_head: the teacher's head, on ranks that have the student's last stage (`has_last_stage`).
    """

    layout: Layout
    mesh: Mesh
    decoders: list[Decoder]
    teacher: Decoder | None
    teacher_head: DecoderHead | None
    has_last_stage: bool

    @property
    def ranks(self) -> Ranks:
        return self.mesh.ranks

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def is_counted(self) -> bool:
        """Whether sums over ranks include this rank: only tensor rank 0, because tensor ranks have equal tokens."""
        return self.mesh.coordinate("tensor") == 0

    @property
    def has_results(self) -> bool:
        """Whether this rank has the last stage, and sums over ranks include this rank."""
        return self.is_counted and self.has_last_stage

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the student's parameters on this rank, with their names in the full model."""

    def initialize_adapter(self, seed: int, *, fresh: bool = True) -> None:
        """Initialise the adapter's matrices on this process (see `initialize_lora`)."""
        for student in self.decoders:
            initialize_lora(student, seed, fresh=fresh)

    def stage_weights(self) -> dict[str, StageWeight]:
        """Return the tensors of this rank's pipeline stages, by their names in the full model. The call can be a
        collective, so all ranks must call it. All ranks of a stage get the same names, and must gather the tensors in
        the same order.
        """

    def forward(self, inputs: Sequence[StageInputs]) -> list[Any]:
        """Return the output processor's result for each micro-batch, without gradients. On a rank without the last
        stage, the list is empty.
        """

    def shard(self, micro_batches: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        """Return this process's share of the micro-batches of a training step, or of an evaluation."""
        return shard_micro_batches(micro_batches, self.mesh, uniform_shapes=training and self.layout.stages > 1)


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
        """Without a pipeline: yield the pair and the inputs of each micro-batch. The caller runs forward and
        backward. With HSDP, the backward of the last micro-batch all-reduces the gradients that each replica has
        accumulated.
        """
        pair = self.pairs[0]
        for number, batch in enumerate(inputs, start=1):
            if isinstance(pair.student, FSDPModule):
                pair.student.set_requires_all_reduce(number == len(inputs))
            yield pair, batch

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the student's parameters on this rank. If a tied head and the embedding are on different stages, the
        head's weight has the head's name (see `shared_name`). A copy of the embedding for MTP layers on the last
        stage has the embedding's name.
        """
        for student in self.decoders:
            yield from student.named_parameters()

    def stage_weights(self) -> dict[str, StageWeight]:
        weights: dict[str, StageWeight] = {}
        for name, tensor in (pair for student in self.decoders for pair in student.state_dict().items()):
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            weights[name] = StageWeight(empty, partial(gathered_tensor, tensor, self.device))
        return weights

    def shared_name(self, name: str) -> str:
        """Return a parameter's name in the full model, where a tied head's weight has the embedding's name."""
        return self.decoders[0].embedding_name if self.tied and name == "head.linear.weight" else name

    def zero_grad(self) -> None:
        for _, parameter in self.named_parameters():
            parameter.grad = None

    @replaceable
    def clip(self, limit: float) -> Tensor:
        """Scale the gradient down to a norm of at most `limit`; a limit of 0 does not scale. Returns the norm of the
        unscaled global gradient, which is the same on every rank.
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
        """Sum over the tensor ranks the gradients that the block adds to `summed_over_tensor_ranks`."""
        before = [parameter.grad for parameter in self.summed_over_tensor_ranks]
        for parameter in self.summed_over_tensor_ranks:
            parameter.grad = None
        yield
        if self.summed_over_tensor_ranks:
            add_up_gradients(self.summed_over_tensor_ranks, self.mesh.weights.get_group("tensor"), self.device)
        for parameter, gradient in zip(self.summed_over_tensor_ranks, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad


def reshard(module: nn.Module) -> None:
    """Free the weights that FSDP has gathered for a forward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
