"""Builds a student, and a teacher in its stages, on Megatron-Core: process groups, chunks, weights and a proof."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state

from stillhouse.megatron.chunks import Chunks
from stillhouse.megatron.model_config import UnsupportedModelError, require_family, transformer_config
from stillhouse.megatron.options import RECOMPUTE, split_options
from stillhouse.megatron.proof import prove_chunks
from stillhouse.megatron.student import MegatronStudent
from stillhouse.models import Decoder, ProofError
from stillhouse.models.document_rows import COLUMNS
from stillhouse.parallel import DecoderHead, Layout, Mesh, ModelSource, load_head
from stillhouse.parallel.run_layout import SCHEMES
from stillhouse.proofs.layouts import prove_heads


def build_megatron_student(
    layout: Layout,
    mesh: Mesh,
    student_source: ModelSource,
    teacher_source: ModelSource | None,
    *,
    teacher_head_only: bool = False,
    prove: bool = True,
) -> MegatronStudent:
    """Build this process's part of the models, and prove it. A collective of all processes.

    Each process reads its part of the models from their files.
    Raises ValueError for a model or a layout that Megatron-Core does not have, ProofError for wrong logits.
    """
    _require_gpu(mesh.device)
    if layout.sequence and COLUMNS % layout.degrees.tensor:
        raise ValueError(
            f"parallel.sequence with tensor {layout.degrees.tensor}: expected a divisor of {COLUMNS}, because the "
            "columns of the documents' rows are a multiple of it"
        )
    sizes, (settings, data_parallel) = _sizes(layout), split_options(layout.options)
    if layout.recompute and any(name.startswith("recompute_") for name in settings):
        raise ValueError("train.activation_checkpointing with parallel.megatron.recompute_…: expected one of the two")
    parallel_state.destroy_model_parallel()  # the groups of another layout, whose student is not used any more
    parallel_state.initialize_model_parallel(**sizes, num_distributed_optimizer_instances=layout.degrees.replicate)
    options = sizes | settings
    # with as many micro-batches as ranks, the interleaved schedule waits forever if its stages also send shapes
    sends_shapes = layout.stages > 1 and sizes["virtual_pipeline_model_parallel_size"] is None
    options |= {"sequence_parallel": layout.sequence, "variable_seq_lengths": sends_shapes}
    models: list[tuple[Chunks, Decoder]] = []
    for source in (student_source, None if teacher_head_only else teacher_source):
        if source is None:
            continue
        is_student = source is student_source
        models.append(_build_model(source, layout, mesh, options, is_student=is_student, prove=prove))
    (student, decoder), *others = models
    teacher, teacher_decoder = others[0] if others else (None, None)
    head = None
    if teacher_head_only and teacher_source is not None:
        head = _teacher_head(layout, mesh, teacher_source)
    return MegatronStudent(
        layout,
        mesh,
        student,
        teacher,
        decoder,
        teacher_decoder,
        teacher_head=head,
        teacher_is_base=student_source.teacher_is_base,
        data_parallel=data_parallel,
    )


def _build_model(
    source: ModelSource, layout: Layout, mesh: Mesh, options: Mapping[str, Any], *, is_student: bool, prove: bool
) -> tuple[Chunks, Decoder]:
    """Return a model's chunks with their weights, and the full model without values.

    options: of `transformer_config`, for the layout and from `parallel.megatron`.
    """
    decoder = source.build()
    model_options = _model_options(layout, decoder, is_student=is_student)
    model_options["depths"] = 0 if decoder.mtp is None else decoder.mtp.depths
    try:
        has_experts = require_family(decoder.config).experts is not None
        model_options |= {
            key: value for key, value in options.items() if has_experts or not key.startswith("expert_")
        }
        transformer = transformer_config(decoder.config, **model_options)
    except UnsupportedModelError as error:
        raise ValueError(f"{source.name}.model: {error}") from error
    chunks = Chunks.build(source, decoder, transformer, mesh)
    if prove and source.has_values:
        prove_chunks(chunks, source, mesh)
    tied = decoder.shared_names()
    decoder.to("meta").share(tied)  # the chunks have the values now; the move makes two parameters of a tied one
    return chunks, decoder


def _teacher_head(layout: Layout, mesh: Mesh, source: ModelSource) -> DecoderHead | None:
    """Load and prove a teacher's head on the last stage. A collective of all processes."""
    heads = {}
    with mesh.ranks.all_raise(ProofError):
        if mesh.coordinate("pipeline") == layout.last_rank:
            heads[source.name] = load_head(source, layout, mesh)
    if source.has_values:
        prove_heads(mesh, heads)
    return DecoderHead(heads[source.name]) if heads else None


def _model_options(layout: Layout, decoder: Decoder, *, is_student: bool) -> dict[str, Any]:
    """Return the dtypes of a model, and whether its layers are computed again. The teacher has its weights' dtype.

    With an adapter, the layers are always Megatron-Core's local ones, because some of Transformer Engine's linear
    layers normalize their input first, which the adapter needs, too.
    Raises ValueError for a student whose trained weights are not float32: the optimizer updates float32 weights.
    """
    dtype = next(decoder.parameters()).dtype
    if not is_student:
        return {"dtype": dtype}
    if dtype != torch.float32 and (decoder.lora is None or dtype != layout.autocast):
        raise ValueError(
            f"student.dtype: the weights are {dtype}; expected float32 with parallel.engine: megatron. "
            "train.precision: bf16 computes in bfloat16, with weights in float32 for the optimizer; then the frozen "
            "weights below an adapter may be bfloat16"
        )
    dtype = layout.autocast or dtype
    has_wide_residual = dtype != torch.float32 and layout.residual_dtype is None
    recompute = RECOMPUTE if layout.recompute else {}
    layers = {} if decoder.lora is None else {"transformer_impl": "local"}
    return {"dtype": dtype, "fp32_residual_connection": has_wide_residual} | recompute | layers


def _require_gpu(device: torch.device) -> None:
    """Raises ValueError unless the device is the one that Megatron-Core requests: this process's CUDA device."""
    try:
        requested = torch.device(torch.cuda.current_device())
    except (AssertionError, RuntimeError):  # the first from a torch without CUDA
        requested = None
    if requested is None or requested.type != device.type:
        raise ValueError(
            f"parallel.engine: megatron on {device.type}: Megatron-Core requests CUDA devices; expected a machine "
            "with GPUs and device: cuda or auto, or parallel.engine: torch"
        )


def _sizes(layout: Layout) -> dict[str, Any]:
    """Return Megatron-Core's sizes of the axes. Its ranks have the order of those of `Mesh`."""
    degrees, chunks = layout.degrees, SCHEMES[layout.schedule].per_rank
    return {
        "tensor_model_parallel_size": degrees.tensor,
        "pipeline_model_parallel_size": degrees.pipeline,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 and degrees.pipeline > 1 else None,
        "context_parallel_size": degrees.context,
        "expert_model_parallel_size": degrees.experts,
        "expert_tensor_parallel_size": 1,
    }
