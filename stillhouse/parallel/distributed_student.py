"""The interface of a student that is distributed over processes; `Runner` implements it for torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stillhouse.data import StepMicroBatches
from stillhouse.models import Decoder, initialize_lora
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.ranks import Ranks
from stillhouse.parallel.run_layout import Layout
from stillhouse.parallel.sharding import ShardedMicroBatches, shard_micro_batches
from stillhouse.parallel.teacher_head import DecoderHead
from stillhouse.parallel.teacher_prefetch import TeacherPrefetch
from stillhouse.parallel.teacher_student_pair import StageInputs


@dataclass(frozen=True)
class StageWeight:
    """A tensor of the full student, of which the ranks of a pipeline stage have shards.

    empty: the full tensor on the meta device. gather: returns the full tensor on the student's device; a collective
    of the ranks that have its shards.
    """

    empty: Tensor
    gather: Callable[[], Tensor]


class DistributedStudent(Protocol):
    """A student that is distributed over the processes of a mesh, with the teacher in its stages if there is one."""

    layout: Layout
    mesh: Mesh

    @property
    def decoders(self) -> list[Decoder]:
        """The student; under a pipeline, its stages on this rank."""
        ...

    @property
    def teacher(self) -> Decoder | None:
        """The teacher in the student's stages; under a pipeline, its part on this rank's first stage."""
        ...

    @property
    def teacher_head(self) -> DecoderHead | None:
        """The teacher's head, on ranks with the student's last stage."""
        ...

    @property
    def ranks(self) -> Ranks:
        return self.mesh.ranks

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def has_last_stage(self) -> bool: ...

    @property
    def is_counted(self) -> bool:
        """Whether sums over ranks include this rank: only tensor rank 0, because tensor ranks have equal tokens."""
        return self.mesh.coordinate("tensor") == 0

    @property
    def has_results(self) -> bool:
        """Whether this rank has the last stage and sums over ranks include it."""
        return self.is_counted and self.has_last_stage

    @property
    def prefetch(self) -> TeacherPrefetch | None:
        """The object that prefetches the teacher; None if the pipeline's schedule does not prefetch."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the student's parameters on this rank, with their names in the full model."""
        ...

    def initialize_adapter(self, seed: int, *, fresh: bool = True) -> None:
        """Initialise the adapter's matrices on this process (see `initialize_lora`)."""
        for student in self.decoders:
            initialize_lora(student, seed, fresh=fresh)

    def stage_weights(self) -> dict[str, StageWeight]:
        """Return the tensors of this rank's pipeline stages, by their names in the full model.

        May be a collective of all ranks. The ranks of a stage get the same names in the same order, and gather the
        tensors in one order.
        """
        ...

    def forward(self, inputs: Sequence[StageInputs]) -> list[Any]:
        """Return the output processor's result for each micro-batch, without gradients.

        Ranks without the last stage return an empty list.
        """
        ...

    def shard(self, micro_batches: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        """Return this process's share of the micro-batches of a training step, or of an evaluation."""
        return shard_micro_batches(micro_batches, self.mesh, uniform_shapes=training and self.layout.stages > 1)
