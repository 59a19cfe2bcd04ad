"""The processes of a run as meshes: the degrees of a layout, this process's coordinates, and its process groups.

The order of the axes is pipeline, replicate, fsdp, context and tensor. The tensor coordinate changes from each rank
to the next, so ranks that communicate a lot are neighbours. The experts of a layer are distributed over neighbouring
ranks of the last three axes.
"""

from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup, distributed_c10d, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group

from stillhouse.dry_run import replaceable
from stillhouse.parallel.processes import connect_processes
from stillhouse.parallel.ranks import Ranks

# torch 2.15 has made this function public and warns about the old name
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


@dataclass(frozen=True)
class Degrees:
    """The parallelism degree of each axis."""

    pipeline: int = 1
    replicate: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1  # distributes experts over the processes of the fsdp, context and tensor axes

    @property
    def processes(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def data(self) -> int:
        """The number of data ranks, over which each step's micro-batches are distributed."""
        return self.replicate * self.fsdp

    @property
    def shard(self) -> int:
        """The number of processes over which FSDP shards weights and optimizer state."""
        return self.fsdp * self.context

    @property
    def experts(self) -> int:
        """The number of processes over which a layer's experts are distributed: at least the tensor degree."""
        return max(self.expert, self.tensor)

    def __str__(self) -> str:
        return " × ".join(f"{name} {degree}" for name, degree in asdict(self).items() if degree > 1) or "1 process"


class Mesh:
    """The first `degrees.processes` ranks of the job as device meshes.

    A mesh of one process has no process groups and no device meshes, and all its coordinates are 0. Without
    `single_process`, the constructor is a collective of all ranks of the job, including ranks outside the mesh.

    weights: the mesh of the weights, with the axes (pipeline, replicate, shard, tensor).
    experts: the mesh of the experts' weights, with the axes (pipeline, replicate, shard, expert).
    tokens: the mesh of the tokens, with the axes (pipeline, data, context, tensor).
    ranks: all processes of the mesh.
    reverse_pipeline: a second group along the pipeline axis, for messages to earlier stages; None if the axis has
        size 1. With a group for each direction, two ranks can issue messages in different orders without a deadlock.
    """

    weights: DeviceMesh
    experts: DeviceMesh
    tokens: DeviceMesh

    @replaceable
    def __init__(self, degrees: Degrees, device: torch.device, *, single_process: bool = False):
        self.degrees, self.device = degrees, device
        self.reverse_pipeline: ProcessGroup | None = None
        self.has_groups = dist.is_initialized() and not single_process
        if not self.has_groups:
            assert degrees.processes == 1, f"{degrees} in one process"
            self.ranks = Ranks(None, device)
            return
        pipeline, replicate, shard, tensor = degrees.pipeline, degrees.replicate, degrees.shard, degrees.tensor
        # new groups do not inherit the default group's timeout (torch 2.13); a dry run's fake group has no timeout
        options = _get_default_group()._get_backend(device).options
        self._timeout: timedelta | None = None if options is None else options._timeout
        self.weights = self._grid(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)
        rest = shard * tensor // degrees.experts
        self.experts = self._grid(pipeline=pipeline, replicate=replicate, shard=rest, expert=degrees.experts)
        self.tokens = self._grid(pipeline=pipeline, data=degrees.data, context=degrees.context, tensor=tensor)
        self.ranks = Ranks(dist.new_group(list(range(degrees.processes)), timeout=self._timeout), device)
        # every process creates the groups of all pipelines: torch (2.13) names a group by the number of groups that
        # the process has created so far, and all members of a group must use the same name
        for ranks in self.tokens.mesh.flatten(1).T.tolist() if pipeline > 1 else []:
            group = dist.new_group(ranks, self._timeout)
            if dist.get_rank() in ranks:
                self.reverse_pipeline = group

    def sharding(self, grid: DeviceMesh) -> DeviceMesh:
        """Return the submesh of `weights` or `experts` for `apply_fsdp`: (shard), or (replicate, shard)."""
        return grid["replicate", "shard"] if self.degrees.replicate > 1 else grid["shard"]

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded or replicated, so that FSDP must be applied."""
        return self.degrees.replicate * self.degrees.shard > 1

    def coordinate(self, axis: str) -> int:
        """Return this process's coordinate on an axis of `tokens`."""
        return self.tokens.get_local_rank(axis) if self.has_groups else 0

    def group(self, axis: str) -> ProcessGroup | None:
        """Return the process group along an axis of `tokens`; None if the axis has size 1."""
        return self.tokens.get_group(axis) if getattr(self.degrees, axis) > 1 else None

    def _grid(self, **sizes: int) -> DeviceMesh:
        grid = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if grid.get_coordinate() is not None and self._timeout is not None:
            for group in grid.get_all_groups():
                _set_timeout(self._timeout, group)
        return grid


def join(degrees: Degrees, device: torch.device, timeout: float) -> Mesh:
    """Connect all processes of a run, and return their mesh. timeout: see `connect_processes`."""
    if degrees.processes > 1:
        connect_processes(device, timeout)
    return Mesh(degrees, device)
