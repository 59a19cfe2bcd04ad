"""The layout of a run over processes: the degrees of parallelism, and the schedule of the pipeline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from stillhouse.parallel.mesh import Degrees

ONE = Degrees()


@dataclass(frozen=True)
class Scheme:
    """A pipeline schedule, and the assignment of stages to ranks.

    per_rank: the number of stages on each rank. in_v: whether stages are assigned to ranks in increasing and then in
        decreasing order, so that rank 0 has the first and the last stage.
    splits_backward: whether a stage computes the gradients of its input and of its weights at different times.
    """

    schedule: Callable[..., Any]
    per_rank: int = 1
    in_v: bool = False
    splits_backward: bool = False

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        if self.in_v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + turn * ranks for turn in range(self.per_rank)]

    def rank_of(self, stage: int, ranks: int) -> int:
        return 2 * ranks - 1 - stage if self.in_v and stage >= ranks else stage % ranks


SCHEMES = {
    "gpipe": Scheme(ScheduleGPipe),
    "1f1b": Scheme(Schedule1F1B),
    "interleaved": Scheme(ScheduleInterleaved1F1B, 2),
    "zero_bubble": Scheme(ScheduleInterleavedZeroBubble, 2, splits_backward=True),
    "zbv": Scheme(ScheduleZBVZeroBubble, 2, in_v=True, splits_backward=True),
}


@dataclass(frozen=True)
class Layout:
    """How a run is distributed over processes.

    schedule: the pipeline's schedule, a key of `SCHEMES`.
    gather_dtype (student only), offload: see `apply_fsdp`.
    residual_dtype (student only): see `apply_residual_dtype`.
    compile: whether the layers are compiled.
    autocast: the dtype of the student's matrix products, or None for the dtype of its weights.

    Only some engines have the following settings.

    sequence: whether each tensor rank has a part of the tokens, except in matrix products (sequence parallelism).
    recompute: whether the engine recomputes layers in backward.
    options: further settings, under the names that the engine's library uses.
    """

    degrees: Degrees = ONE
    schedule: str = "1f1b"
    gather_dtype: torch.dtype | None = None
    offload: bool = False
    residual_dtype: torch.dtype | None = None
    compile: bool = False
    autocast: torch.dtype | None = None
    sequence: bool = False
    recompute: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        schedule = f", {self.schedule}" if self.degrees.pipeline > 1 else ""
        return f"{self.degrees}{schedule}" + ", sequence" * self.sequence

    @property
    def changes_results(self) -> bool:
        """Whether compilation or a residual dtype can change a model's results."""
        return self.compile or self.residual_dtype is not None

    @property
    def stages(self) -> int:
        """The number of pipeline stages, over all ranks."""
        pipeline = self.degrees.pipeline
        return pipeline * SCHEMES[self.schedule].per_rank if pipeline > 1 else 1

    @property
    def last_rank(self) -> int:
        """The pipeline coordinate of the rank that has the last stage."""
        pipeline = self.degrees.pipeline
        return SCHEMES[self.schedule].rank_of(self.stages - 1, pipeline) if pipeline > 1 else 0
