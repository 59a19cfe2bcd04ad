"""Lets all ranks agree whether the run must stop after this step because of a signal."""

import torch
import torch.distributed as dist

from stillhouse.parallel import Mesh
from stillhouse.preemption import requested


def agreed_signal(mesh: Mesh | None) -> int:
    """The largest signal number that any rank has received; 0 if no rank has received a signal.

    It costs one all-reduce of one integer. All ranks must call it at the same steps.
    """
    if mesh is None:
        return requested()
    number = torch.tensor(requested(), device=mesh.device)
    dist.all_reduce(number, dist.ReduceOp.MAX, group=mesh.everyone)
    return int(number)
