"""FSDP2 and HSDP, applied to a decoder from outside: weights, gradients and optimizer state are shared by its ranks.

Each layer is gathered when it is needed, the head inside its own forward, where the output processor sees it whole.
Gradients are summed over the ranks, never averaged: losses are sums over tokens, divided by the step's count already.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from stillhouse.models import Decoder


def apply_fsdp(
    decoder: Decoder,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    gather_dtype: torch.dtype | None = None,
    offload: bool = False,
) -> None:
    """mesh: (shard), or (replicate, shard) for whole copies of the shards.

    reshard_after_forward: whether layers and head are gathered again in backward; a pipeline's schedule, which runs
    parts of backward by itself, needs them to stay.
    gather_dtype: what layers and an untied head are gathered in, for who computes under autocast to it; None: their
    own. Gradients are summed in float32, over ranks and micro-batches.
    offload: shards of weights and gradients lie in host memory between uses, and so does what an optimizer makes of
    them. On a CPU nothing is moved.
    """
    shard = partial(fully_shard, mesh=mesh, offload_policy=_home(mesh, offload))
    inner = partial(shard, mp_policy=_precision(gather_dtype), reshard_after_forward=reshard_after_forward)
    for layer in decoder.layers():
        inner(layer)
    trains = any(parameter.requires_grad for parameter in decoder.parameters())
    if not decoder.tied and decoder.has_head:
        # a tied weight is the embedding's, in the root's group
        learns = any(parameter.requires_grad for parameter in decoder.head.parameters())
        # backward begins where forward ends
        inner(decoder.head, reshard_after_forward=reshard_after_forward and not learns)
    # in its own dtype: a row's gradient is a sum over all places of its token
    shard(decoder, reshard_after_forward=reshard_after_forward and not trains)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def apply_fsdp_to_experts(
    modules: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    gather_dtype: torch.dtype | None = None,
    offload: bool = False,
) -> None:
    """Before the rest, for experts that have been dealt out: mesh is that of the processes with the same ones. The
    other arguments are those of `apply_fsdp`.
    """
    processes = mesh["shard"].size() if mesh.ndim > 1 else mesh.size()

    def placement(weight: nn.Parameter) -> Shard:
        """Whole experts where there are enough of them: what is cut by experts already, FSDP cuts only evenly."""
        count = len(weight.to_local()) if isinstance(weight, DTensor) else len(weight)
        return Shard(0 if count % processes == 0 else 1)

    for module in modules:
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=placement,
            reshard_after_forward=reshard_after_forward,
            mp_policy=_precision(gather_dtype),
            offload_policy=_home(mesh, offload),
        )


def _home(mesh: DeviceMesh, offload: bool) -> OffloadPolicy:
    # memory that is pinned travels while the GPU computes; there is none of that kind without one
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()


def _precision(gather_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    if gather_dtype is None:
        return MixedPrecisionPolicy()
    # hidden states keep their dtype between the layers, as they do under autocast
    return MixedPrecisionPolicy(gather_dtype, torch.float32, cast_forward_inputs=False)
