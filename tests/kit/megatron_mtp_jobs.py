"""A job for ranks: multi-token prediction by Megatron's own loss and by an output processor, in the same layout."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from kit.megatron_models import (
    B,
    Layout,
    S,
    build,
    context_rows,
    laid_out,
    micro_batch,
)
from kit.shard_ranks import Rank
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.models import processors
from stillhouse.models.processor_targets import Targets


@dataclass
class MtpDifference:
    """losses: the mean cross-entropy of each depth, of Megatron and of the processor. gradients: relative errors."""

    losses: list[tuple[float, float]]
    gradients: dict[str, float]


def compare_mtp(rank: Rank, layout: Layout) -> MtpDifference:
    """A job: compute the cross-entropy at every depth with Megatron's own loss and with a processor."""
    with laid_out(layout):
        model = build(layout, 0)
        batch = micro_batch(0, layout.packed)
        # Megatron takes a mask and needs valid labels everywhere
        mask_BS = (batch.labels_BS >= 0).float()
        starts_BS = batch.position_ids_BS
        if batch.packed is not None:
            borders = batch.packed.cu_seqlens_q.long()
            starts_BS = torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)])[None]
        targets = Targets(batch.labels_BS, mask_BS).shift_for_mtp(starts_BS, layout.depths)
        if layout.context > 1:
            rows_S = context_rows(layout.context, S)[parallel_state.get_context_parallel_rank()]
            batch, mask_BS = batch.part(rows_S), mask_BS[:, rows_S]
            targets = targets.rows((S * torch.arange(B)[:, None] + rows_S).flatten())
        MTPLossLoggingHelper.tracker.clear()
        inputs = {"input_ids": batch.input_ids_BS, "position_ids": batch.position_ids_BS, "attention_mask": None}
        inputs |= {"packed_seq_params": batch.packed}
        loss_BS = model(**inputs, labels=batch.labels_BS.clamp(min=0), loss_mask=mask_BS)
        (loss_BS * mask_BS).sum().backward()
        expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        theirs = [(loss_BS * mask_BS).sum() / mask_BS.sum(), *MTPLossLoggingHelper.tracker["loss_values"]]
        model.zero_grad()
        hook = MegatronProcessor(model, processors.cross_entropy())
        made = model(**inputs, output_processor=hook, output_processor_context=targets)
        counts = [(targets.at(depth).labels_T >= 0).sum() for depth in range(1 + layout.depths)]
        # calculate_per_token_loss scales the mean of a depth by the number of the main head's tokens
        scales = [1.0] + [counts[0] / count / layout.depths for count in counts[1:]]
        sum(scale * output.loss for scale, output in zip(scales, made, strict=True)).backward()
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        return MtpDifference(
            [(float(a), float(b.loss / count)) for a, b, count in zip(theirs, made, counts, strict=True)],
            {
                name: float((weight.grad - expected[name]).norm() / torch.maximum(expected[name].norm(), 1e-3 * norm))
                for name, weight in model.named_parameters()
            },
        )
