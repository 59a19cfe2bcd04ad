"""FSDP2 and HSDP, applied to a decoder from outside: weights, gradients and optimizer state are shared by its ranks.

Each layer is gathered when it is needed, the head inside its own forward, where the output processor sees it whole.
Gradients are summed over the ranks, never averaged: losses are sums over tokens, divided by the step's count already.
"""

import torch
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from stillhouse.models import Decoder


def apply_fsdp(
    decoder: Decoder,
    mesh: DeviceMesh,
    *,
    gathered_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
) -> None:
    """mesh: (shard), or (replicate, shard) for whole copies of the shards.

    gathered_dtype: of the layers' weights while they are gathered (None: their own), whose gradients are summed in
    float32; embedding and head keep their own. reshard_after_forward: whether layers and head are gathered again in
    backward; a pipeline's schedule, which runs parts of backward by itself, needs them to stay.
    offload: weights, gradients and optimizer state live in host memory.
    """
    policy = MixedPrecisionPolicy()
    if gathered_dtype is not None:
        policy = MixedPrecisionPolicy(gathered_dtype, torch.float32, cast_forward_inputs=False)
    offloading = CPUOffloadPolicy() if offload else OffloadPolicy()
    for layer in decoder.layers():
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, offload_policy=offloading, reshard_after_forward=reshard_after_forward
        )
    if not decoder.tied and next(decoder.head.parameters(), None) is not None:
        # a tied weight is the embedding's, in the root's group, which stays gathered from forward to backward
        fully_shard(decoder.head, mesh=mesh, offload_policy=offloading, reshard_after_forward=reshard_after_forward)
    fully_shard(decoder, mesh=mesh, offload_policy=offloading, reshard_after_forward=False)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
