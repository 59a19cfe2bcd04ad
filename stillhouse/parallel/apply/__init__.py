"""Applies a layout to a decoder, without changes to the model's code."""

from typing import Any

import torch
from torch import Tensor, nn

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
    if layout.residual_dtype is not None:
        apply_residual_dtype(decoder, layout.residual_dtype)
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


def apply_residual_dtype(decoder: Decoder, dtype: torch.dtype) -> None:
    """Round the output of a decoder's embedding to this dtype under autocast. Autocast itself leaves it in float32.

    In most families, the hidden states then have this dtype in all layers, so norms and additions read and write half
    as many bytes. A pipeline stage without the head always sends this dtype, because the next stage expects it.
    """

    def rounded(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        # without autocast, the hidden states must have the dtype of the layers' matrices
        return output.to(dtype) if torch.is_autocast_enabled(output.device.type) else output

    if (embedding := input_embedding(decoder.pretrained)) is not None:
        embedding.register_forward_hook(rounded)
    if not decoder.has_head:
        decoder.register_forward_hook(lambda module, inputs, output: output.to(dtype))
