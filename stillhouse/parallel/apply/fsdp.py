"""FSDP2 and HSDP: shards weights, gradients and optimizer state over ranks.

The weights of each layer and of an untied head are gathered for the forward and the backward of this layer or head.
The output processor runs in the head's forward, so it sees the full weight. A vision tower is in the root's FSDP
group. A process without media in its micro-batch does not run the tower. If the tower had its own group, all other
processes would wait in a collective for this process.

Gradients are summed over ranks and not averaged, because the losses are sums over tokens that are already divided by
the step's token count.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from stillhouse.models import Decoder
from stillhouse.models.dtensors import local
from stillhouse.models.model_checks import typename


def apply_fsdp(
    decoder: Decoder,
    mesh: DeviceMesh,
    *,
    experts: Iterable[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    gather_dtype: torch.dtype | None = None,
    offload: bool = False,
) -> None:
    """Shard a decoder's weights over a mesh.

    mesh: has the axis (shard), or the axes (replicate, shard) for several replicas of the sharded model.
    experts: the modules of experts that expert parallelism has already distributed. expert_mesh: like `mesh`, for
        the processes that have the same experts.
    reshard_after_forward: whether to free the gathered weights after forward, and gather them again in backward.
    gather_dtype: the dtype in which layers and an untied head are gathered, for a forward under autocast to that
        dtype; their gradients are summed in float32. If it is None, they are gathered in the dtype of the weights.
    offload: whether to keep the shards of weights and gradients, and so the optimizer state, in host memory.
    """
    # pinned memory, from which a GPU copies while it computes, needs a GPU
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    shard = partial(fully_shard, offload_policy=policy)
    precision = MixedPrecisionPolicy()
    if gather_dtype is not None:  # hidden states keep their dtype between the layers, as they do under autocast
        precision = MixedPrecisionPolicy(gather_dtype, torch.float32, cast_forward_inputs=False)
    inner = partial(shard, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    for module in experts:  # FSDP requires that inner modules come before the layers that contain them
        assert expert_mesh is not None
        # expert parallelism shards dim 0; FSDP shards dim 0 again if this gives equal shards, otherwise dim 1
        processes = expert_mesh["shard"].size() if expert_mesh.ndim > 1 else expert_mesh.size()
        inner(
            module,
            mesh=expert_mesh,
            shard_placement_fn=lambda weight, processes=processes: Shard(int(len(local(weight)) % processes > 0)),
        )
    for layers in _by_shared_weights([*decoder.layers(), *decoder.mtp_layers()]):
        _require_one_dtype(decoder, layers)
        inner(layers if len(layers) > 1 else layers[0], mesh=mesh)
    for module in (module for loss in decoder.layer_losses.values() for module in loss.modules()):
        # a separate FSDP group for each module: the weights can be float32, and a group must have one dtype
        if next(module.parameters(recurse=False), None) is not None:
            shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    trains = any(parameter.requires_grad for parameter in decoder.parameters())
    if not decoder.tied and decoder.has_head:
        # a tied head uses the embedding's weight, which is in the root's FSDP group
        head_trains = any(parameter.requires_grad for parameter in decoder.head.parameters())
        # backward begins with the head: a trained head that is freed after forward would be gathered again at once
        inner(decoder.head, mesh=mesh, reshard_after_forward=reshard_after_forward and not head_trains)
    # keep a student's root for backward, and a frozen teacher's tied head for its use after forward (`DecoderHead`)
    keep_gathered = trains or (decoder.tied and decoder.has_head)
    # the root does not use gather_dtype, which would round the gradient of an embedding row; this gradient is a sum
    # over all occurrences of a token
    shard(decoder, mesh=mesh, reshard_after_forward=reshard_after_forward and not keep_gathered)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _require_one_dtype(decoder: Decoder, layers: Sequence[nn.Module]) -> None:
    named = [pair for layer in layers for pair in layer.named_parameters()]
    trained = {parameter.dtype: name for name, parameter in named if parameter.requires_grad}
    if len(trained) > 1:
        names = ", ".join(f"'{name}' in {str(dtype).removeprefix('torch.')}" for dtype, name in trained.items())
        raise ValueError(
            f"{typename(decoder.pretrained)} has weights of several dtypes in a layer ({names}): transformers keeps "
            "some of them in float32, and FSDP trains one dtype per layer; expected dtype float32"
        )


def _by_shared_weights(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return groups of layers. Layers that share a weight form a group, because FSDP shards a weight only once."""
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for layer in layers:
        weights, members = {id(parameter) for parameter in layer.parameters()}, [layer]
        for others, group_members in [group for group in groups if group[0] & weights]:
            groups.remove((others, group_members))
            weights, members = weights | others, group_members + members
        groups.append((weights, members))
    return [members for _, members in groups]
