"""Applies a layout to a decoder, without changes to the model's code."""

import torch

from stillhouse.models import Decoder
from stillhouse.models.lm_head import input_embedding
from stillhouse.parallel.apply.compiled_layers import compile_layers
from stillhouse.parallel.apply.context_parallel import apply_context_parallel
from stillhouse.parallel.apply.fsdp import apply_fsdp
from stillhouse.parallel.apply.tensor_parallel import apply_expert_parallel, apply_tensor_parallel, dispatched_experts
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.run_layout import Layout


def apply_parallelism(decoder: Decoder, layout: Layout, mesh: Mesh) -> None:
    """Apply context, tensor and expert parallelism to a decoder, compile its layers, then apply FSDP."""
    degrees = layout.degrees
    if (context := mesh.group("context")) is not None and decoder.layers():
        apply_context_parallel(decoder, context, degrees.tensor)
    if degrees.tensor > 1:
        apply_tensor_parallel(decoder, mesh.weights["tensor"])
    experts = dispatched_experts(decoder) if degrees.experts > 1 else []
    if experts:
        apply_expert_parallel(decoder, mesh.experts["expert"], mesh.weights["tensor"])
    if (dtype := layout.residual_dtype) is not None:
        if (embedding := input_embedding(decoder.pretrained)) is not None:
            # without autocast, the hidden states must have the dtype of the layers' matrices
            embedding.register_forward_hook(
                lambda module, inputs, output: (
                    output.to(dtype) if torch.is_autocast_enabled(output.device.type) else output
                )
            )
        if not decoder.has_head:  # the next stage always expects this dtype
            decoder.register_forward_hook(lambda module, inputs, output: output.to(dtype))
    if layout.compile:
        if degrees.tensor > 1 or degrees.experts > 1:
            raise ValueError(
                f"compiled layers under {degrees}: expected parallel.tensor=1 and parallel.expert=1, or "
                "train.compile: false"
            )
        compile_layers(decoder)
    if mesh.is_sharded:
        apply_fsdp(
            decoder,
            mesh.sharding(mesh.weights),
            experts=experts,
            expert_mesh=mesh.sharding(mesh.experts),
            # a pipeline's schedule splits backward into parts, and all parts need the gathered weights
            reshard_after_forward=layout.stages == 1,
            gather_dtype=layout.gather_dtype,
            offload=layout.offload,
        )
