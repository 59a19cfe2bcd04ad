"""The interface of a student that is distributed over processes, and a step's micro-batches for each process."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.dry_run import replaceable
from stillhouse.models import Decoder, initialize_lora
from stillhouse.parallel.mesh import Degrees, Mesh
from stillhouse.parallel.ranks import Ranks
from stillhouse.parallel.run_layout import Layout
from stillhouse.parallel.teacher_prefetch import TeacherPrefetch
from stillhouse.parallel.teacher_student_pair import DecoderHead, StageInputs


class ShardedMicroBatches(list[MicroBatch]):
    """This process's micro-batches of a step, on its device. A context rank has only its columns of the sequences.

    all_ranks: all micro-batches of the step, with full sequences. uniform_shapes: see `padded_shapes`.
    on_cpu: the same micro-batches in host memory, which can be read without waiting for the device. None: `parts`.
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
    first one is repeated without targets.
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
    """Return the padded shapes of a step's micro-batches and of the repeated ones, before context ranks share them.

    uniform_shapes: all micro-batches get one shape, and the number of micro-batches per data rank becomes a multiple
        of the number of pipeline ranks. The pipeline schedules require both.
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
    """A tensor of the full student, of which the ranks of a pipeline stage have shards. empty: on the meta device.
    gather: returns it on the student's device; a collective of the ranks with its shards.
    """

    empty: Tensor
    gather: Callable[[], Tensor]


class DistributedStudent(Protocol):
    """A student that is distributed over the processes of a mesh, with the teacher in its stages if there is one.

    decoders: the student; under a pipeline, its stages on this rank.
    teacher: the teacher in the student's stages; under a pipeline, its part on this rank's first stage.
    teacher_head: the teacher's head, on ranks with the student's last stage (`has_last_stage`).
    prefetch: the object that prefetches the teacher; None if the pipeline's schedule does not prefetch.
    """

    layout: Layout
    mesh: Mesh
    decoders: list[Decoder]
    teacher: Decoder | None
    teacher_head: DecoderHead | None
    has_last_stage: bool
    prefetch: TeacherPrefetch | None

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
        """Whether this rank has the last stage and sums over ranks include it."""
        return self.is_counted and self.has_last_stage

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the student's parameters on this rank, with their names in the full model."""

    def initialize_adapter(self, seed: int, *, fresh: bool = True) -> None:
        """Initialise the adapter's matrices on this process (see `initialize_lora`)."""
        for student in self.decoders:
            initialize_lora(student, seed, fresh=fresh)

    def stage_weights(self) -> dict[str, StageWeight]:
        """Return the tensors of this rank's pipeline stages, by their names in the full model. May be a collective of
        all ranks. The ranks of a stage get the same names, and gather tensors in one order.
        """

    def forward(self, inputs: Sequence[StageInputs]) -> list[Any]:
        """Return the output processor's result for each micro-batch, without gradients; [] without the last stage."""

    def shard(self, micro_batches: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        """Return this process's share of the micro-batches of a training step, or of an evaluation."""
        return shard_micro_batches(micro_batches, self.mesh, uniform_shapes=training and self.layout.stages > 1)
