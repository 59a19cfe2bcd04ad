"""Proves that Megatron-Core's chunks compute the logits of transformers' model, under the run's layout.

B rows of one document each, S tokens per row, D width, V vocabulary.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.engine.megatron.loading import LOAD_ERRORS
from stillhouse.engine.megatron.model_config import require_family
from stillhouse.engine.megatron.student import Chunks
from stillhouse.models import ProofError
from stillhouse.models.forward_modes import evaluating
from stillhouse.parallel import Mesh, ModelSource
from stillhouse.parallel.backbone_cut import require_cuttable
from stillhouse.parallel.stages import keep_layers

#: the tokens of the proof
SHAPE_BS = 2, 24
#: the largest error of a token's logits, relative to their norm, by the dtype of the weights
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def prove_chunks(chunks: Chunks, source: ModelSource, mesh: Mesh) -> float:
    """Compare the logits of each rank of the last stage with those of transformers. A collective of all processes.

    It is enough that one process runs transformers, with weights that it reads again, because it sends its logits to
    all others. It has a part of the layers at a time, about as many as a process of this layout has.
    Returns the largest error (see `TOLERANCE`). Raises ProofError on all processes.
    """
    degrees, dtype = mesh.degrees, chunks.transformer.params_dtype
    rows, tokens = SHAPE_BS
    tokens += -tokens % degrees.context  # context ranks divide the columns
    random = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(chunks.config.vocab_size, (rows, tokens), generator=random).to(mesh.device)
    expected_BSV = torch.empty(*ids_BS.shape, chunks.config.vocab_size, device=mesh.device)
    with mesh.ranks.all_raise(*LOAD_ERRORS):
        if mesh.ranks.is_first:
            expected_BSV.copy_(_logits_of_transformers(source, ids_BS, degrees.pipeline * degrees.experts))
    dist.broadcast(expected_BSV, group=mesh.ranks.group, group_src=0)
    expected_BSV = expected_BSV.chunk(degrees.context, dim=1)[mesh.coordinate("context")]
    error = 0.0
    for logits_BSV, start in chunks.logits(ids_BS, degrees.pipeline)[:1]:
        of_rank_BSV = expected_BSV[..., start : start + logits_BSV.shape[-1]]
        difference_BSV = logits_BSV[..., : of_rank_BSV.shape[-1]].float() - of_rank_BSV
        error_BS = difference_BSV.norm(dim=-1) / expected_BSV.norm(dim=-1)
        # rounding can change the experts of single tokens
        is_routed = require_family(chunks.config).experts is not None and dtype != torch.float32
        error = float(error_BS.median() if is_routed else error_BS.max())
    largest = max(mesh.ranks.gather(error if math.isfinite(error) else math.inf))
    if largest > TOLERANCE[dtype]:
        raise ProofError(
            f"{source.name}: the logits of Megatron-Core differ from those of transformers by {largest:.1e} of their "
            f"norm, expected at most {TOLERANCE[dtype]:.0e}; parallel.engine: torch trains this model"
        )
    return largest


def _logits_of_transformers(source: ModelSource, ids_BS: Tensor, parts: int) -> Tensor:
    """Return logits [B, S, V] in this process alone. parts: how many parts of the layers are loaded one by one."""
    count = source.build().config.num_hidden_layers
    parts = min(parts, count)
    output: Tensor | None = None
    for start, stop in pairwise(count * part // parts for part in range(parts + 1)):
        decoder = source.build()
        if parts > 1:
            cut = require_cuttable(decoder.config)
            keep_layers(decoder, cut, range(start, stop), first=start == 0, last=stop == count)
        if source.load_weights is not None:
            source.load_weights(decoder)
        decoder.to(ids_BS.device)  # a source may load weights into host memory
        with torch.no_grad(), evaluating(decoder):
            output = decoder(ids_BS) if output is None else decoder(None, inputs_embeds=output)
    assert output is not None
    return output
