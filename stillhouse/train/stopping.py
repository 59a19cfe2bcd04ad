"""Whether a run has to stop after this step: a question that all ranks must answer alike."""

import torch
import torch.distributed as dist

from stillhouse.parallel import Mesh
from stillhouse.preemption import requested


def agreed_signal(mesh: Mesh | None) -> int:
    """The number of the signal that a rank has received, the largest over all ranks; 0: no rank has received any.

    One all-reduce of one integer; all ranks have to call this at the same steps.
    """
    if mesh is None:
        return requested()
    number = torch.tensor(requested(), device=mesh.device)
    dist.all_reduce(number, dist.ReduceOp.MAX, group=mesh.everyone)
    return int(number)
