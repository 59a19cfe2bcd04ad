"""Builds a student, and a teacher in its stages, on Megatron-Core: process groups, chunks, weights and their proof.

B rows, S tokens per row, D width.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from stillhouse.engine.megatron.model_config import require_family, transformer_config
from stillhouse.engine.megatron.student import Chunks, MegatronStudent
from stillhouse.models import Decoder, ProofError
from stillhouse.models.document_rows import COLUMNS
from stillhouse.parallel import DecoderHead, Layout, Mesh, ModelSource, load_head, prove_heads
from stillhouse.parallel.run_layout import SCHEMES

#: the tokens of the proof, and the largest error of its hidden states relative to their norm, in float32
PROOF_SHAPE_BS, LARGEST_ERROR = (2, 24), 1e-4


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

    Every process reads each full model into host memory, one after the other, and keeps its part.
    Raises ValueError for a model or a layout that Megatron-Core does not have, ProofError for wrong hidden states.
    """
    if mesh.ranks.group is None:
        raise ValueError("parallel.engine: megatron in one process: expected torchrun with at least 2 processes")
    if layout.sequence and COLUMNS % layout.degrees.tensor:
        raise ValueError(
            f"parallel.sequence with tensor {layout.degrees.tensor}: expected a divisor of {COLUMNS}, because the "
            "columns of the documents' rows are a multiple of it"
        )
    sizes = _sizes(layout)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()  # the groups of another layout, whose student is not used any more
    parallel_state.initialize_model_parallel(**sizes)
    options = sizes | {"sequence_parallel": layout.sequence, "variable_seq_lengths": layout.stages > 1}
    models: list[tuple[Chunks, Decoder]] = []
    for source in (student_source, None if teacher_head_only else teacher_source):
        if source is None:
            continue
        decoder = source.build()
        if source.load_weights is not None:
            source.load_weights(decoder)
        if (dtype := next(decoder.parameters()).dtype) != torch.float32:
            raise ValueError(
                f"{source.name}.dtype: the weights are {dtype}; expected float32 with parallel.engine: megatron"
            )
        has_experts = require_family(decoder.config).experts is not None
        of_model = {key: value for key, value in options.items() if has_experts or not key.startswith("expert_")}
        chunks = Chunks.build(decoder, transformer_config(decoder.config, **of_model))
        if prove and source.has_values:
            _prove(chunks, decoder, mesh, source.name)
        shared = decoder.shared_names()
        decoder.to("meta").share(shared)  # the move makes two parameters of a tied one
        models.append((chunks, decoder))
    (student, decoder), *others = models
    teacher, teacher_decoder = others[0] if others else (None, None)
    head = None
    if teacher_head_only and teacher_source is not None:
        head = _teacher_head(layout, mesh, teacher_source)
    return MegatronStudent(layout, mesh, student, teacher, decoder, teacher_decoder, teacher_head=head)


def _teacher_head(layout: Layout, mesh: Mesh, source: ModelSource) -> DecoderHead | None:
    """Load and prove a teacher's head on the last stage. A collective of all processes."""
    heads = {}
    with mesh.ranks.all_raise(ProofError):
        if mesh.coordinate("pipeline") == layout.last_rank:
            heads[source.name] = load_head(source, layout, mesh)
    if source.has_values:
        prove_heads(mesh, heads)
    return DecoderHead(heads[source.name]) if heads else None


def _sizes(layout: Layout) -> dict[str, Any]:
    """Return Megatron-Core's sizes of the axes. Its ranks have the order of those of `Mesh`."""
    degrees, chunks = layout.degrees, SCHEMES[layout.schedule].per_rank
    return {
        "tensor_model_parallel_size": degrees.tensor,
        "pipeline_model_parallel_size": degrees.pipeline,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 and degrees.pipeline > 1 else None,
        "context_parallel_size": degrees.context,
        "expert_model_parallel_size": degrees.experts if degrees.expert > 1 else 1,
        "expert_tensor_parallel_size": 1 if degrees.expert > 1 else None,
    }


@torch.no_grad()
def _prove(chunks: Chunks, decoder: Decoder, mesh: Mesh, name: str) -> None:
    """Compare the chunks' hidden states, under the run's layout, with those of transformers' model in this process.

    Raises ProofError on all processes.
    """
    rows, tokens = PROOF_SHAPE_BS
    tokens += -tokens % mesh.degrees.context  # context ranks divide the columns
    random = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(chunks.config.vocab_size, (rows, tokens), generator=random)
    hidden: list[Tensor] = chunks.hidden_states(ids_BS.to(mesh.device), mesh.degrees.pipeline)
    error = 0.0
    if hidden:
        expected_BSD = decoder(ids_BS.to(next(decoder.parameters()).device), head=False)
        expected_BSD = expected_BSD.chunk(mesh.degrees.context, dim=1)[mesh.coordinate("context")]
        error = float((hidden[0].to(expected_BSD) - expected_BSD).norm() / expected_BSD.norm())
    largest = max(mesh.ranks.gather(error if error == error else float("inf")))
    if largest > LARGEST_ERROR:
        raise ProofError(
            f"{name}: the hidden states of Megatron-Core differ from those of transformers by {largest:.1e} of their "
            f"norm, expected at most {LARGEST_ERROR:.0e}; parallel.engine: torch trains this model"
        )
