"""Builds a student, and a teacher in the same stages, on Megatron-Core, and compares their logits with transformers.

K depths of multi-token prediction (depth 0 is the model itself), B rows of several documents, S tokens per row, N
documents, L columns of the longest document, D width, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.megatron.chunks import Chunks
from stillhouse.megatron.families import UnsupportedModelError, require_family
from stillhouse.megatron.model_config import RECOMPUTE, split_options, transformer_config
from stillhouse.megatron.student import MegatronStudent
from stillhouse.megatron.weights import LOAD_ERRORS
from stillhouse.models import Decoder, ProofError
from stillhouse.models.adapter import Lora, initial_matrix, is_lora
from stillhouse.models.document_packing import COLUMNS, UnpackedRows
from stillhouse.models.forward_modes import evaluating
from stillhouse.models.load_proof import compare
from stillhouse.objective import OutputHead
from stillhouse.parallel import DecoderHead, Layout, Mesh, ModelSource, NextTokens, StageInputs, load_head
from stillhouse.parallel.backbone_cut import require_cuttable
from stillhouse.parallel.layer_loss import MtpLayersRun
from stillhouse.parallel.run_layout import SCHEMES
from stillhouse.parallel.stages import keep_layers
from stillhouse.proofs.layouts import prove_heads

#: the columns in which the documents of each row of the proof begin, without column 0; and the length of a row
ENDS, TOKENS = ((7, 8), (19,)), 24
#: the largest allowed error of a token's logits, relative to their norm, by the dtype of the weights
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def build_megatron_student(
    layout: Layout,
    mesh: Mesh,
    student_source: ModelSource,
    teacher_source: ModelSource | None,
    *,
    teacher_head_only: bool = False,
    prove: bool = True,
) -> MegatronStudent:
    """Build this process's part of the models, and compare their logits with transformers (`prove_chunks`).

    A collective of all processes. teacher_head_only: whether the stages need only the teacher's head.

    Raises ValueError for a model or a layout that Megatron-Core does not support, ProofError for wrong logits.
    """
    requested = None
    with suppress(AssertionError, RuntimeError):  # torch without CUDA raises AssertionError
        requested = torch.device(torch.cuda.current_device())
    if requested is None or requested.type != mesh.device.type:
        raise ValueError(
            f"parallel.engine: megatron on {mesh.device.type}: Megatron-Core needs CUDA devices; expected a "
            "machine with GPUs and device: cuda or auto, or parallel.engine: torch"
        )
    if layout.sequence and COLUMNS % layout.degrees.tensor:
        raise ValueError(
            f"parallel.sequence with parallel.tensor {layout.degrees.tensor}: expected a divisor of {COLUMNS}, "
            "because the tensor ranks share a row's columns, whose number is a multiple of it"
        )
    degrees, per_rank = layout.degrees, SCHEMES[layout.schedule].per_rank
    # Megatron-Core orders the ranks as `Mesh` does
    sizes = {
        "tensor_model_parallel_size": degrees.tensor,
        "pipeline_model_parallel_size": degrees.pipeline,
        "virtual_pipeline_model_parallel_size": per_rank if per_rank > 1 and degrees.pipeline > 1 else None,
        "context_parallel_size": degrees.context,
        "expert_model_parallel_size": degrees.experts,
        "expert_tensor_parallel_size": 1,
    }
    settings, data_parallel = split_options(layout.options)
    if layout.recompute and any(name.startswith("recompute_") for name in settings):
        raise ValueError("train.activation_checkpointing with parallel.megatron.recompute_…: expected one of the two")
    # remove the groups of an earlier student, which is not used any more
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes, num_distributed_optimizer_instances=layout.degrees.replicate)
    options = sizes | settings
    # with as many micro-batches as ranks, the interleaved schedule waits forever if its stages also send shapes
    sends_shapes = layout.stages > 1 and sizes["virtual_pipeline_model_parallel_size"] is None
    options |= {"sequence_parallel": layout.sequence, "variable_seq_lengths": sends_shapes}
    student = _build_model(student_source, layout, mesh, options, is_student=True, prove=prove)
    teacher = teacher_head = None
    if teacher_source is not None and teacher_head_only:
        teacher_head = _teacher_head(teacher_source, layout, mesh)
    elif teacher_source is not None:
        teacher = _build_model(teacher_source, layout, mesh, options, is_student=False, prove=prove)
    return MegatronStudent(
        layout,
        mesh,
        student,
        teacher=teacher,
        teacher_head=teacher_head,
        teacher_is_base=student_source.teacher_is_base,
        data_parallel=data_parallel,
    )


def _teacher_head(source: ModelSource, layout: Layout, mesh: Mesh) -> DecoderHead | None:
    """Load and prove a teacher's head on the ranks with the last stage. A collective of all processes."""
    heads: dict[str, Decoder] = {}
    with mesh.ranks.all_raise(ProofError):
        if mesh.coordinate("pipeline") == layout.last_rank:
            heads[source.name] = load_head(source, layout, mesh)
    if source.has_values:
        prove_heads(mesh, heads)
    return DecoderHead(heads[source.name]) if heads else None


def _build_model(
    source: ModelSource, layout: Layout, mesh: Mesh, options: Mapping[str, Any], *, is_student: bool, prove: bool
) -> Chunks:
    """Return a model's chunks with their weights.

    options: those options of `transformer_config` that come from the layout and from `parallel.megatron`.
    """
    decoder = source.build()
    dtype = next(decoder.parameters()).dtype
    model_options: dict[str, Any] = {"depths": 0 if decoder.mtp is None else decoder.mtp.depths}
    if is_student:
        if dtype != torch.float32 and (decoder.lora is None or dtype != layout.autocast):
            raise ValueError(
                f"student.dtype: the weights are {dtype}; expected float32 with parallel.engine: megatron. "
                "train.precision: bf16 computes in bfloat16, with weights in float32 for the optimizer; if there is "
                "an adapter, this precision also allows frozen weights in bfloat16"
            )
        dtype = layout.autocast or dtype
        model_options["fp32_residual_connection"] = dtype != torch.float32 and layout.residual_dtype is None
        model_options |= RECOMPUTE if layout.recompute else {}
        if decoder.lora is not None:
            # some linear layers of Transformer Engine normalize their input; the adapter needs the normalized input
            model_options["transformer_impl"] = "local"
    try:
        has_experts = require_family(decoder.config).experts is not None
        model_options |= {
            key: value for key, value in options.items() if has_experts or not key.startswith("expert_")
        }
        transformer = transformer_config(decoder.config, dtype=dtype, **model_options)
    except UnsupportedModelError as error:
        raise ValueError(f"{source.name}.model: {error}") from error
    chunks = Chunks.build(source, decoder, transformer, mesh)
    if prove and source.has_values:
        prove_chunks(chunks, source, mesh)
    tied = decoder.shared_names()
    decoder.to("meta").share(tied)  # the chunks have the values now; `to` has separated tied parameters
    return chunks


def prove_chunks(chunks: Chunks, source: ModelSource, mesh: Mesh) -> float:
    """Compare the logits on each rank of the last stage with transformers' logits. A collective of all processes.

    Megatron-Core's layers get documents of different lengths, as in a run. Transformers' layers get one document per
    row. One process runs transformers in parts, each with about as many layers as a process of this layout has.
    During the proof, the adapter's matrices are random, because the initial B is 0.

    Returns the largest error (see `TOLERANCE`). Raises ProofError on all processes.
    """
    degrees, dtype = mesh.degrees, chunks.transformer.params_dtype
    tokens = TOKENS + -TOKENS % degrees.context  # a multiple, because context ranks divide the columns
    random = torch.Generator().manual_seed(0)
    config = chunks.decoder.config
    ids_BS = torch.randint(config.vocab_size, (len(ENDS), tokens), generator=random).to(mesh.device)
    positions_BS = torch.stack(
        [torch.cat([torch.arange(stop - start) for start, stop in pairwise((0, *ends, tokens))]) for ends in ENDS]
    ).to(mesh.device)
    depths = 1 + chunks.depths
    expected_KBSV = torch.empty(depths, *ids_BS.shape, config.vocab_size, device=mesh.device)
    with mesh.ranks.all_raise(*LOAD_ERRORS):
        if mesh.ranks.is_first:
            rows = UnpackedRows.of(positions_BS)
            alone_KNLV = _logits_of_transformers(source, rows.unpack(ids_BS), degrees.pipeline * degrees.experts)
            for expected_BSV, alone_NLV in zip(expected_KBSV, alone_KNLV, strict=True):
                expected_BSV.copy_(rows.pack(alone_NLV))
    dist.broadcast(expected_KBSV, group=mesh.ranks.group, group_src=0)
    # at a document's last tokens, there is no later token for an MTP layer
    is_real_KBS = torch.stack([positions_BS.roll(-depth, 1) == positions_BS + depth for depth in range(depths)])
    expected_KBSV, is_real_KBS = (
        part.chunk(degrees.context, dim=2)[mesh.coordinate("context")] for part in (expected_KBSV, is_real_KBS)
    )
    # rounding can change the experts of single tokens
    is_routed = require_family(config).experts is not None and dtype != torch.float32
    errors = [torch.zeros(1)]
    with _drawn_adapter(chunks):
        logits = megatron_logits(chunks, ids_BS, positions_BS, degrees.pipeline)
    for by_depth, start in logits[:1]:
        for logits_BSV, expected_BSV, is_real_BS in zip(by_depth, expected_KBSV, is_real_KBS, strict=True):
            local_BSV = expected_BSV[..., start : start + logits_BSV.shape[-1]]
            difference_BSV = logits_BSV[..., : local_BSV.shape[-1]].float() - local_BSV
            error_BS = (difference_BSV.norm(dim=-1) / expected_BSV.norm(dim=-1))[is_real_BS]
            if error_BS.numel():
                errors.append((error_BS.median() if is_routed else error_BS.max())[None].cpu())
    return compare(
        torch.tensor(mesh.ranks.gather(float(torch.cat(errors).max()))),
        TOLERANCE[dtype],
        f"{source.name}: the logits of Megatron-Core differ from those of transformers by {{error:.1e}} of their "
        f"norm, expected at most {TOLERANCE[dtype]:.0e}; parallel.engine: torch trains this model",
    )


def megatron_logits(
    chunks: Chunks, ids_BS: Tensor, positions_BS: Tensor, micro_batches: int
) -> list[tuple[list[Tensor], int]]:
    """Run equal micro-batches without gradients. Returns results on the last stage, one for each micro-batch.

    ids_BS, positions_BS: the tokens of all context ranks, and the tokens' positions in their documents. A result has
    the logits [B, S, rows] of each depth, for this rank's columns and vocabulary rows, and the number of this rank's
    first vocabulary row.
    """
    labels_T = torch.full_like(ids_BS.flatten(), -1)
    batch = MicroBatch(
        {"input_ids": ids_BS, "position_ids": positions_BS},
        labels_T,
        weights_T=torch.zeros(labels_T.shape, device=ids_BS.device),
        document_T=torch.zeros_like(labels_T),
        valid_index=labels_T[:0],
    )
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    losses = [MtpLayersRun(NextTokens(chunks.depths))] if chunks.depths else []
    inputs = [StageInputs(batch.part(rank, size), {}, _logits, losses)] * micro_batches
    with torch.no_grad():
        return chunks.run(inputs, [None] * micro_batches, _logits, backward=False)


def _logits_of_transformers(source: ModelSource, ids_NL: Tensor, parts: int) -> Tensor:
    """Return the logits of the transformers model, [K, N, L, V].

    parts: the number of parts into which the layers are divided; one part is loaded at a time.
    """
    full = source.build()
    count, mtp = full.config.num_hidden_layers, {} if full.mtp is None else {"mtp_input_ids": ids_NL}
    parts = min(parts, count)
    output: Any = None
    for start, stop in pairwise(count * part // parts for part in range(parts + 1)):
        decoder = source.build()
        if parts > 1:
            cut = require_cuttable(decoder.config)
            keep_layers(decoder, cut, range(start, stop), first=start == 0, last=stop == count)
        if source.load_weights is not None:
            source.load_weights(decoder)
        if decoder.lora is not None:
            shapes = {name: parameter.shape for name, parameter in decoder.named_parameters() if is_lora(name)}
            for name, matrix in _drawn_matrices(shapes, decoder.lora):
                decoder.get_parameter(name).data.copy_(matrix)
        decoder.to(ids_NL.device)  # a source may load weights into host memory
        with torch.no_grad(), evaluating(decoder):
            inputs: dict[str, Any] = {"input_ids": ids_NL} if output is None else {"inputs_embeds": output}
            head_inputs = {"processor": _logits, **mtp} if stop == count else {}
            output = decoder(**{"input_ids": None, **inputs, **head_inputs})
    by_depth, _ = output
    return torch.stack(by_depth)


@contextmanager
def _drawn_adapter(chunks: Chunks) -> Iterator[None]:
    """Within the block, the adapter has random matrices (`_drawn_matrices`)."""
    if (lora := chunks.decoder.lora) is None:
        yield
        return
    trained = [parameter for _, parameter in chunks.named_parameters() if parameter.requires_grad]
    kept, unrounded = [parameter.detach().clone() for parameter in trained], dict(chunks.unrounded)
    chunks.set_adapter(_drawn_matrices(chunks.matrices, lora))
    try:
        yield
    finally:
        for parameter, values in zip(trained, kept, strict=True):
            parameter.data.copy_(values)
        chunks.unrounded.clear()
        chunks.unrounded.update(unrounded)


def _drawn_matrices(shapes: Mapping[str, torch.Size], lora: Lora) -> Iterator[tuple[str, Tensor]]:
    """Yield names and random matrices of an adapter, so that (alpha / r) B A x has about a tenth of the size of x."""
    for name, shape in shapes.items():
        matrix = initial_matrix(name, shape, 0, fresh=False)
        yield name, matrix if ".lora_A." in name else 0.3 * lora.r / lora.alpha * matrix


def _logits(*, hidden_states: Any, head: OutputHead, context: Any, depth: int = 0) -> tuple[list[Tensor], int]:
    """Return the logits of all depths, and the number of this rank's first vocabulary row. An output processor."""
    by_depth = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
    return [head.logits(hidden_BSD) for hidden_BSD in by_depth], getattr(head.shard, "start", 0)
