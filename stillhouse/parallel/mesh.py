"""Which process does what: the degrees of a layout, this process's place in it, and the groups that it talks to.

Ranks count with the tensor degree fastest, so that those who talk most are neighbours: pipeline, replicate, fsdp,
context, tensor. The experts of a layer are dealt out over neighbours of the last three.
"""

from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout


@dataclass(frozen=True)
class Degrees:
    """Into how many parts a run is cut, each way."""

    pipeline: int = 1
    replicate: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1  # some of the processes of fsdp, context and tensor, to which it adds none

    @property
    def processes(self) -> int:
        return self.pipeline * self.replicate * self.fsdp * self.context * self.tensor

    @property
    def data(self) -> int:
        """The parts among which each step's sequences are dealt out."""
        return self.replicate * self.fsdp

    @property
    def shard(self) -> int:
        """The processes that share weights, gradients and optimizer state: those of one sequence, too."""
        return self.fsdp * self.context

    @property
    def experts(self) -> int:
        """The processes among which a layer's experts are dealt out: those of tensor parallelism at least."""
        return max(self.expert, self.tensor)

    def __str__(self) -> str:
        return " × ".join(f"{name} {degree}" for name, degree in asdict(self).items() if degree > 1) or "1 process"


class Mesh:
    """The processes of a run as grids: the first `degrees.processes` of the world.

    Making one is a collective of the whole world, also of processes that it does not count.

    weights: (pipeline, replicate, shard, tensor), where weights lie.
    experts: (pipeline, replicate, shard, expert), where the weights of experts lie.
    tokens: (pipeline, data, context, tensor), where tokens lie.
    everyone: the group of all of them.
    pipelines: the group along the pipeline, two more of it: for messages that are in no order with the others.
    """

    def __init__(self, degrees: Degrees, device: torch.device):
        self.degrees, self.device = degrees, device
        pipeline, replicate, shard, tensor = degrees.pipeline, degrees.replicate, degrees.shard, degrees.tensor
        self.weights = self._grid(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)
        rest = shard * tensor // degrees.experts
        self.experts = self._grid(pipeline=pipeline, replicate=replicate, shard=rest, expert=degrees.experts)
        self.tokens = self._grid(pipeline=pipeline, data=degrees.data, context=degrees.context, tensor=tensor)
        self.everyone = dist.new_group(list(range(degrees.processes)), timeout=_group_timeout(device))
        self.pipelines = self._along_pipeline(), self._along_pipeline()

    @property
    def sharding(self) -> DeviceMesh | None:
        """What FSDP takes: (shard), or (replicate, shard); None where weights are shared by nobody."""
        return self._sharding(self.weights)

    @property
    def expert_sharding(self) -> DeviceMesh | None:
        """The same for the weights of experts."""
        return self._sharding(self.experts)

    def _sharding(self, grid: DeviceMesh) -> DeviceMesh | None:
        degrees = self.degrees
        if degrees.replicate * degrees.shard == 1:
            return None
        return grid["replicate", "shard"] if degrees.replicate > 1 else grid["shard"]

    def place(self, axis: str) -> int:
        """This process's number along an axis of `tokens`."""
        return self.tokens.get_local_rank(axis)

    def _along_pipeline(self) -> ProcessGroup | None:
        """Made by all for all: torch names a group that only its members make after what each of them has made so far
        (2.13), which differs.
        """
        if self.degrees.pipeline == 1:
            return None
        timeout = _group_timeout(self.device)
        made = {tuple(ranks): dist.new_group(ranks, timeout) for ranks in self.tokens.mesh.flatten(1).T.tolist()}
        return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)

    def _grid(self, **sizes: int) -> DeviceMesh:
        grid = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if grid.get_coordinate() is not None:
            for group in grid.get_all_groups():
                _set_pg_timeout(_group_timeout(self.device), group)
        return grid


def _group_timeout(device: torch.device) -> timedelta:
    """The time limit of the world's collectives, which groups made of it do not inherit (torch 2.13)."""
    world = _get_default_group()
    return world._get_backend(device).options._timeout
