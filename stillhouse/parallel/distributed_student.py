"""The interface of a student that is distributed over processes: what generation and signals need.

`runner.py` has the student of `TorchEngine`; an engine on another library has one of its own.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from stillhouse.data import StepMicroBatches
from stillhouse.models import Decoder
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.pair import StageInputs
from stillhouse.parallel.ranks import Ranks
from stillhouse.parallel.run_layout import Layout
from stillhouse.parallel.sharding import ShardedMicroBatches, shard_micro_batches
from stillhouse.parallel.teacher_head import DecoderHead
from stillhouse.parallel.teacher_prefetch import TeacherPrefetch


class DistributedStudent(Protocol):
    """A student, and a teacher in its stages if there is one, over the processes of a mesh."""

    layout: Layout
    mesh: Mesh

    @property
    def decoders(self) -> list[Decoder]:
        """The student, or this rank's parts of it."""
        ...

    @property
    def teacher(self) -> Decoder | None:
        """The teacher in the student's stages, or its part on this rank's first stage."""
        ...

    @property
    def teacher_head(self) -> DecoderHead | None:
        """The teacher's head, on processes with the student's last stage."""
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
        """Whether sums over ranks include this rank: of tensor-parallel ranks, which share tokens, one counts."""
        return self.mesh.coordinate("tensor") == 0

    @property
    def has_results(self) -> bool:
        """Whether sums over ranks include this rank and it has the last stage."""
        return self.is_counted and self.has_last_stage

    @property
    def prefetch(self) -> TeacherPrefetch | None:
        """Runs the teacher ahead of the student, if the pipeline's schedule does."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the student's parameters on this rank, by their names in the whole model."""
        ...

    def forward(self, inputs: Sequence[StageInputs]) -> list[Any]:
        """Return the processor's results of some micro-batches, without gradients.

        Under a pipeline, only the ranks of the last stage have results; the others return an empty list.
        """
        ...

    def shard(self, micro_batches: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        """This process's part of a step's micro-batches. training=False: of an evaluation's micro-batches."""
        return shard_micro_batches(micro_batches, self.mesh, uniform_shapes=training and self.layout.stages > 1)
