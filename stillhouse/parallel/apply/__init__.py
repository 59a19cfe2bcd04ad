"""Applies a layout to a decoder, without changes to the model's code."""

from stillhouse.models import Decoder
from stillhouse.parallel.apply.context_parallel import apply_context_parallel
from stillhouse.parallel.apply.expert_parallel import apply_expert_parallel, dispatched_experts
from stillhouse.parallel.apply.fsdp import apply_fsdp
from stillhouse.parallel.apply.tensor_parallel import apply_tensor_parallel
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.run_layout import Layout


def apply_parallelism(decoder: Decoder, layout: Layout, mesh: Mesh) -> None:
    """Apply context, tensor and expert parallelism to a decoder, then FSDP."""
    degrees = layout.degrees
    if (context := mesh.group("context")) is not None and decoder.layers():
        apply_context_parallel(decoder, context, degrees.tensor)
    if degrees.tensor > 1:
        apply_tensor_parallel(decoder, mesh.weights["tensor"])
    experts = dispatched_experts(decoder) if degrees.experts > 1 else []
    if experts:
        apply_expert_parallel(decoder, mesh.experts["expert"], mesh.weights["tensor"])
    if mesh.sharding is not None:
        apply_fsdp(
            decoder,
            mesh.sharding,
            experts=experts,
            expert_mesh=mesh.expert_sharding,
            # a pipeline's schedule runs backward in parts, and all parts need the gathered weights
            reshard_after_forward=layout.stages == 1,
            gather_dtype=layout.gather_dtype,
            offload=layout.offload,
        )
