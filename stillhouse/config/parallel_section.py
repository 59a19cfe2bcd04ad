"""The layout: how a run is distributed over processes."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stillhouse.config.errors import ConfigError, removed_value
from stillhouse.config.section import Registered, Section, keys_of_add_ons

#: the order of the axes in messages
_AXES = ("pipeline", "replicate", "fsdp", "context", "tensor", "expert")
_NOT_FASTER = (
    "removed in November 2026, because its gain over zero_bubble was at most 8 % and only simulated (docs/scaling.md)"
)
_Schedule = Annotated[
    Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"],
    removed_value("1f1b_ahead", _NOT_FASTER, "zero_bubble"),
]
#: settings of an engine, by the engine's own names
_Settings = dict[str, bool | int | float | str | list[int] | list[str] | None] | None


if TYPE_CHECKING:
    _EngineKeys = Section
else:  # other distributions can register engines; the keys of their settings are added to this section
    _EngineKeys = keys_of_add_ons(
        "stillhouse.engines", "parallel", _Settings, "Settings of the engine {name}, by its own names."
    )


class ParallelConfig(_EngineKeys):
    """The layout of the processes that torchrun starts. Their number is the product of all degrees except expert."""

    engine: Annotated[str, Registered("stillhouse.engines")] = "torch"
    """The library that trains the student. megatron: Megatron-Core (pip install 'stillhouse[megatron]'), with its own
    tensor, pipeline, context, expert and data parallelism; fsdp is then the degree of its distributed optimizer,
    which shards the optimizer's state and the sums of gradients. All other keys have the same meaning. A key that
    Megatron does not support is refused. A run can be resumed with another engine."""
    sequence: bool = False
    """Sequence parallelism of Megatron-Core: between the matrix products, each tensor rank has a part of the
    tokens. A model with experts needs it if tensor is above 1."""
    megatron: _Settings = None
    """Settings of Megatron-Core that have no other key, by Megatron's names: fields of TransformerConfig, such as
    moe_token_dispatcher_type or recompute_granularity, and of DistributedDataParallelConfig, such as
    overlap_grad_reduce. null: no settings. A setting that another key, the model or the loss sets is refused."""
    fsdp: int | None = Field(default=None, ge=1)
    """FSDP degree: weights, gradients and optimizer state are sharded over this many processes, and each process gets
    different data. null: the number of processes divided by the other degrees."""
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel degree: matrices are sharded over this many processes, embedding and head by vocabulary row."""
    pipeline: int = Field(default=1, ge=1)
    """Pipeline degree: the layers of student and teacher are divided over this many ranks."""
    context: int = Field(default=1, ge=1)
    """Context-parallel degree: each sequence is divided over this many processes."""
    replicate: int = Field(default=1, ge=1)
    """The number of replicas of the layout of all other degrees. Each replica gets different data."""
    expert: int = Field(default=1, ge=1)
    """Expert-parallel degree: the experts of each layer are distributed over this many of the processes of fsdp,
    context and tensor; no processes are added. It is a multiple of tensor, or 1, which means tensor."""
    schedule: _Schedule = "1f1b"
    """Pipeline schedule. interleaved, zero_bubble and zbv have two stages on each rank and less idle time."""
    gather_dtype: Literal["bfloat16"] | None = None
    """The dtype in which FSDP gathers the student's layers and untied head. bfloat16 halves the traffic and memory of
    gathering; gradients are still summed in float32. null: the dtype of the weights."""
    offload: bool = False
    """Keep FSDP's shards of student and teacher (weights, gradients, optimizer state) in host memory between uses;
    the optimizer runs on the CPU."""

    @property
    def settings(self) -> dict[str, Any]:
        """The engine's settings, by the engine's own names."""
        return getattr(self, self.engine, None) or {}

    def degrees(self, processes: int, key: str = "parallel") -> dict[str, int]:
        """Return the degree of each axis by name. key: the section's key, for error messages.

        Raises ConfigError if the product of the degrees is not `processes`, or if the expert degree does not fit the
        other degrees.
        """
        names = ("pipeline", "replicate", "context", "tensor")
        others = {name: getattr(self, name) for name in names}
        fsdp = self.fsdp if self.fsdp is not None else max(1, processes // math.prod(others.values()))
        degrees = others | {"fsdp": fsdp, "expert": self.expert}
        product = fsdp * math.prod(others.values())
        if product != processes:
            shown = " × ".join(f"{name} {degrees[name]}" for name in _AXES if degrees[name] > 1) or "1 process"
            started = f"torchrun started {processes}" if processes > 1 else "there is only one, without torchrun"
            raise ConfigError(
                key,
                f"{shown} needs {product} processes, but {started}: expected "
                f"torchrun --nproc-per-node {product}, or degrees whose product is {processes}",
            )
        sharing, experts = fsdp * self.context * self.tensor, max(self.expert, self.tensor)
        if experts % self.tensor or sharing % experts:
            raise ConfigError(
                f"{key}.expert",
                f"got {self.expert}, with fsdp × context × tensor = {sharing} and tensor = {self.tensor}: "
                "expected a divisor of this product that is a multiple of tensor",
            )
        return degrees

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages on each pipeline rank."""
        return 2 if self.schedule in ("interleaved", "zero_bubble", "zbv") and self.pipeline > 1 else 1
