"""How a run is distributed over processes (`Layout`), and where its models come from (`ModelSource`)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stillhouse.models import Decoder
from stillhouse.parallel.mesh import Degrees
from stillhouse.parallel.pipeline import SCHEMES

ONE = Degrees()


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    build: returns the whole model, with weights or on the meta device; called once for each stage on this process.
    load_weights: reads the weights of a model that was built on the meta device, after the model has been cut into
    stages and distributed; None if `build` returns the weights.
    teacher_is_base: for a student with an adapter: the student without the adapter is the teacher.
    offload: keep FSDP's shards of this model in host memory between uses, whatever the layout says.
    name: how errors name the model.
    is_proven: `build` returns a whole model that has been proven, as `Decoder` does.
    """

    build: Callable[[], Decoder]
    load_weights: Callable[[Decoder], object] | None = None
    teacher_is_base: bool = False
    offload: bool = False
    name: str = "model"
    is_proven: bool = False


@dataclass(frozen=True)
class Layout:
    """How a run is distributed over processes.

    schedule: the pipeline's schedule, a key of `SCHEMES`. gather_dtype (of the student), offload: see `apply_fsdp`.
    """

    degrees: Degrees = ONE
    schedule: str = "1f1b"
    gather_dtype: torch.dtype | None = None
    offload: bool = False

    def __str__(self) -> str:
        schedule = f", {self.schedule}" if self.degrees.pipeline > 1 else ""
        return f"{self.degrees}{schedule}"

    @property
    def stages(self) -> int:
        """The number of pipeline stages, over all ranks."""
        pipeline = self.degrees.pipeline
        return pipeline * SCHEMES[self.schedule].per_rank if pipeline > 1 else 1

    @property
    def last_rank(self) -> int:
        """The coordinate of the last stage's rank on the pipeline axis."""
        pipeline = self.degrees.pipeline
        return SCHEMES[self.schedule].rank_of(self.stages - 1, pipeline) if pipeline > 1 else 0
