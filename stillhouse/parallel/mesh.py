"""The processes of a run as meshes: the degrees of a layout, this process's coordinates, and its process groups.

The axes, from slowest to fastest, are pipeline, replicate, fsdp, context, tensor. So the ranks that communicate most
are neighbours. The experts of a layer are distributed over neighbouring ranks of the last three axes.
"""

from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup, distributed_c10d, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group

from stillhouse.dry_run import replaceable
from stillhouse.parallel.ranks import Ranks, start

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
    expert: int = 1  # uses processes of the fsdp, context and tensor axes, and adds none

    @property
    def processes(self) -> int:
        return self.pipeline * self.replicate * self.fsdp * self.context * self.tensor

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

    A mesh of one process has no process groups and no device meshes; all its coordinates are 0. In a job of several
    processes, the constructor is a collective of all ranks of the job, including ranks that are not in the mesh. With
    `single_process`, it is not a collective.

    weights: (pipeline, replicate, shard, tensor), the mesh of the weights.
    experts: (pipeline, replicate, shard, expert), the mesh of the experts' weights.
    tokens: (pipeline, data, context, tensor), the mesh of the tokens.
    ranks: all processes of the mesh.
    pipelines: two additional groups along the pipeline axis; empty if this axis has size 1. Each rank may issue the
        messages of different groups in another order.
    """

    weights: DeviceMesh
    experts: DeviceMesh
    tokens: DeviceMesh

    @replaceable
    def __init__(self, degrees: Degrees, device: torch.device, *, single_process: bool = False):
        self.degrees, self.device = degrees, device
        self.pipelines: list[ProcessGroup] = []
        self.has_groups = dist.is_initialized() and not single_process
        if not self.has_groups:
            assert degrees.processes == 1, f"{degrees} in one process"
            self.ranks = Ranks(None, device)
            return
        pipeline, replicate, shard, tensor = degrees.pipeline, degrees.replicate, degrees.shard, degrees.tensor
        self.weights = self._grid(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)
        rest = shard * tensor // degrees.experts
        self.experts = self._grid(pipeline=pipeline, replicate=replicate, shard=rest, expert=degrees.experts)
        self.tokens = self._grid(pipeline=pipeline, data=degrees.data, context=degrees.context, tensor=tensor)
        everyone = dist.new_group(list(range(degrees.processes)), timeout=_group_timeout(device))
        self.ranks = Ranks(everyone, device)
        if degrees.pipeline > 1:
            self.pipelines = [*self._along_pipeline(), *self._along_pipeline()]

    @property
    def sharding(self) -> DeviceMesh | None:
        """The mesh for `apply_fsdp`: (shard), or (replicate, shard); None if both axes have size 1."""
        return self._sharding("weights")

    @property
    def expert_sharding(self) -> DeviceMesh | None:
        """The mesh for the experts in `apply_fsdp`; None if `sharding` is None."""
        return self._sharding("experts")

    def _sharding(self, grid: str) -> DeviceMesh | None:
        if self.degrees.replicate * self.degrees.shard == 1:
            return None
        axes = ("replicate", "shard") if self.degrees.replicate > 1 else ("shard",)
        return getattr(self, grid)[axes]

    def coordinate(self, axis: str) -> int:
        """Return this process's coordinate on an axis of `tokens`."""
        return self.tokens.get_local_rank(axis) if self.has_groups else 0

    def group(self, axis: str) -> ProcessGroup | None:
        """Return the process group along an axis of `tokens`; None if the axis has size 1."""
        return self.tokens.get_group(axis) if getattr(self.degrees, axis) > 1 else None

    def _along_pipeline(self) -> list[ProcessGroup]:
        """Create a group along the pipeline axis; return it in a list (empty if this rank is not in the mesh).

        Every process creates the groups of all pipelines, because torch (2.13) names a group by the number of groups
        that the process has created so far, and all members have to use the same name.
        """
        timeout = _group_timeout(self.device)
        pipelines = self.tokens.mesh.flatten(1).T.tolist()
        groups = [(dist.new_group(ranks, timeout), ranks) for ranks in pipelines]
        return [group for group, ranks in groups if dist.get_rank() in ranks]

    def _grid(self, **sizes: int) -> DeviceMesh:
        grid = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if grid.get_coordinate() is not None:
            timeout = _group_timeout(self.device)
            if timeout is not None:
                for group in grid.get_all_groups():
                    _set_timeout(timeout, group)
        return grid


def join(degrees: Degrees, device: torch.device, timeout: float) -> Mesh:
    """Connect all processes of a run, and return their mesh. timeout: see `start`."""
    if degrees.processes > 1:
        start(device, timeout)
    return Mesh(degrees, device)


def _group_timeout(device: torch.device) -> timedelta | None:
    """Return the timeout of the default group, because new groups do not inherit it (torch 2.13).

    None for a group without messages (`plan/`).
    """
    options = _get_default_group()._get_backend(device).options
    return None if options is None else options._timeout
