"""Proves that Megatron-Core's chunks compute the logits of transformers' model, under the run's layout.

K depths of multi-token prediction (depth 0 is the model itself), B rows of several documents, S tokens per row, N
documents, L columns of the longest one, D width, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.megatron.chunks import Chunks
from stillhouse.megatron.loading import LOAD_ERRORS
from stillhouse.megatron.model_config import require_family
from stillhouse.models.adapter import Lora, initial_matrix, is_lora
from stillhouse.models.document_rows import UnpackedRows
from stillhouse.models.forward_modes import evaluating
from stillhouse.models.load_proof import compare
from stillhouse.objective import OutputHead
from stillhouse.parallel import Mesh, ModelSource
from stillhouse.parallel.backbone_cut import require_cuttable
from stillhouse.parallel.stages import keep_layers

#: where the documents of each row of the proof end, before the last one
ENDS, TOKENS = ((7, 8), (19,)), 24
#: the largest error of a token's logits, relative to their norm, by the dtype of the weights
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def prove_chunks(chunks: Chunks, source: ModelSource, mesh: Mesh) -> float:
    """Compare the logits of each rank of the last stage with those of transformers. A collective of all processes.

    Megatron-Core's layers get documents of different lengths as in a run, transformers' one document per row.
    It is enough that one process runs transformers, with weights that it reads again, because it sends its logits to
    all others. It has a part of the layers at a time, about as many as a process of this layout has. An adapter has
    other matrices during the proof, because the first B is 0.
    Returns the largest error (see `TOLERANCE`). Raises ProofError on all processes.
    """
    degrees, dtype = mesh.degrees, chunks.transformer.params_dtype
    tokens = TOKENS + -TOKENS % degrees.context  # context ranks divide the columns
    random = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(chunks.config.vocab_size, (len(ENDS), tokens), generator=random).to(mesh.device)
    positions_BS = torch.stack(
        [torch.cat([torch.arange(stop - start) for start, stop in pairwise((0, *ends, tokens))]) for ends in ENDS]
    ).to(mesh.device)
    depths = 1 + chunks.depths
    expected_KBSV = torch.empty(depths, *ids_BS.shape, chunks.config.vocab_size, device=mesh.device)
    with mesh.ranks.all_raise(*LOAD_ERRORS):
        if mesh.ranks.is_first:
            rows = UnpackedRows.of(positions_BS)
            alone_KNLV = _logits_of_transformers(source, rows.unpack(ids_BS), degrees.pipeline * degrees.experts)
            for expected_BSV, alone_NLV in zip(expected_KBSV, alone_KNLV, strict=True):
                expected_BSV.copy_(rows.pack(alone_NLV))
    dist.broadcast(expected_KBSV, group=mesh.ranks.group, group_src=0)
    # at the last tokens of a document, an MTP layer has no further token to read
    is_real_KBS = torch.stack([positions_BS.roll(-depth, 1) == positions_BS + depth for depth in range(depths)])
    expected_KBSV, is_real_KBS = (
        part.chunk(degrees.context, dim=2)[mesh.coordinate("context")] for part in (expected_KBSV, is_real_KBS)
    )
    # rounding can change the experts of single tokens
    is_routed = require_family(chunks.config).experts is not None and dtype != torch.float32
    errors = [torch.zeros(1)]
    with _drawn_adapter(chunks):
        logits = chunks.logits(ids_BS, positions_BS, degrees.pipeline)
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


def _logits_of_transformers(source: ModelSource, ids_NL: Tensor, parts: int) -> Tensor:
    """Return logits [K, N, L, V] in this process alone. parts: how many parts of the layers are loaded one by one."""
    full = source.build()
    count, mtp = full.config.num_hidden_layers, {} if full.mtp is None else {"mtp_input_ids": ids_NL}
    parts = min(parts, count)
    output: Tensor | None = None
    for start, stop in pairwise(count * part // parts for part in range(parts + 1)):
        decoder = source.build()
        if parts > 1:
            cut = require_cuttable(decoder.config)
            keep_layers(decoder, cut, range(start, stop), first=start == 0, last=stop == count)
        if source.load_weights is not None:
            source.load_weights(decoder)
        if decoder.lora is not None:
            names = {name: parameter.shape for name, parameter in decoder.named_parameters() if is_lora(name)}
            for name, matrix in _drawn_matrices(names, decoder.lora):
                decoder.get_parameter(name).data.copy_(matrix)
        decoder.to(ids_NL.device)  # a source may load weights into host memory
        with torch.no_grad(), evaluating(decoder):
            inputs: dict[str, Any] = {"input_ids": ids_NL} if output is None else {"inputs_embeds": output}
            head_inputs = {"processor": _stacked, **mtp} if stop == count else {}
            output = decoder(**{"input_ids": None, **inputs, **head_inputs})
    assert output is not None
    return output


@contextmanager
def _drawn_adapter(chunks: Chunks) -> Iterator[None]:
    """Let the adapter have the matrices of the proof until the context ends."""
    if chunks.lora is None:
        yield
        return
    trained = [one for model in chunks.models for one in model.parameters() if one.requires_grad]
    kept, unrounded = [parameter.detach().clone() for parameter in trained], dict(chunks.unrounded)
    chunks.set_adapter(_drawn_matrices(chunks.matrices, chunks.lora))
    try:
        yield
    finally:
        for parameter, values in zip(trained, kept, strict=True):
            parameter.data.copy_(values)
        chunks.unrounded.clear()
        chunks.unrounded.update(unrounded)


def _drawn_matrices(shapes: Mapping[str, torch.Size], lora: Lora) -> Iterator[tuple[str, Tensor]]:
    """Yield random matrices, by their names, whose product adds about a tenth of the input's size to an output."""
    for name, shape in shapes.items():
        matrix = initial_matrix(name, shape, 0, fresh=False)
        yield name, matrix if ".lora_A." in name else 0.3 * lora.r / lora.alpha * matrix


def _stacked(*, hidden_states: Any, head: OutputHead, context: Any, depth: int = 0) -> Tensor:
    """An output processor that returns the logits of all depths."""
    by_depth = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
    return torch.stack([head.logits(hidden_BSD) for hidden_BSD in by_depth])
