"""FSDP2 and HSDP, applied to a decoder from outside: weights, gradients and optimizer state are shared by its ranks.

Each layer is gathered when it is needed, the head inside its own forward, where the output processor sees it whole.
Gradients are summed over the ranks, never averaged: losses are sums over tokens, divided by the step's count already.
"""

from collections.abc import Iterable

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from stillhouse.models import Decoder


def apply_fsdp(decoder: Decoder, mesh: DeviceMesh, *, reshard_after_forward: bool = True) -> None:
    """mesh: (shard), or (replicate, shard) for whole copies of the shards.

    reshard_after_forward: whether layers and head are gathered again in backward; a pipeline's schedule, which runs
    parts of backward by itself, needs them to stay.
    """
    for layer in decoder.layers():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    if not decoder.tied and decoder.has_head:
        # a tied weight is the embedding's, in the root's group, which stays gathered from forward to backward
        fully_shard(decoder.head, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def apply_fsdp_to_experts(
    modules: Iterable[nn.Module], mesh: DeviceMesh, *, reshard_after_forward: bool = True
) -> None:
    """Before the rest, for experts that have been dealt out: mesh is that of the processes with the same ones."""
    processes = mesh["shard"].size() if mesh.ndim > 1 else mesh.size()

    def placement(weight: nn.Parameter) -> Shard:
        """Whole experts where there are enough of them: what is cut by experts already, FSDP cuts only evenly."""
        count = len(weight.to_local()) if isinstance(weight, DTensor) else len(weight)
        return Shard(0 if count % processes == 0 else 1)

    for module in modules:
        fully_shard(module, mesh=mesh, shard_placement_fn=placement, reshard_after_forward=reshard_after_forward)
