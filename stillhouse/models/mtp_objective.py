"""The output processor for a decoder with multi-token prediction: one loss for all depths.

    loss = main + scale · Σ_k (depth k)

Each depth's loss is a sum over the rows that have a label k tokens further in their document. All sums are divided by
the same normalizer, the step's number of target tokens. So the loss does not depend on the layout.

B rows, S tokens per row, T = B·S tokens in the rows' order, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stillhouse.models.head import OutputProcessor
from stillhouse.models.processors import full_vocab
from stillhouse.models.targets import DistillTargets
from stillhouse.objective import ObjectiveOutput, OutputHead
from stillhouse.objective.keys import CHUNK_TOKENS
from stillhouse.objective.spec import ObjectiveSpec

#: the prefix of a depth's metrics: mtp_1/forward_kl is the forward KL of depth 1
PREFIX = "mtp_"


@dataclass(frozen=True)
class MtpObjective:
    """The objective of the further depths.

    depths: their number. scale: the factor of the depths' loss in the step's loss. of_student: the signal is the
    student's own distribution of the same token, without gradients, instead of the teacher's.
    """

    spec: ObjectiveSpec
    depths: int = 1
    scale: float = 0.3
    of_student: bool = False

    @property
    def needs_teacher(self) -> bool:
        return self.spec.needs_teacher and not self.of_student


@dataclass(frozen=True, eq=False)
class MtpTargets:
    """The context of `multi_token`: the targets of depth 0, and position ids [B, S], which restart at documents."""

    targets: DistillTargets
    position_ids_BS: Tensor


def multi_token(
    main: OutputProcessor,
    further: OutputProcessor,
    scale: float,
    *,
    of_student: bool = False,
    next_tokens: Callable[[Tensor], Tensor] | None = None,
) -> OutputProcessor:
    """Return a processor for the hidden states of all depths. It gives one `ObjectiveOutput`; context: `MtpTargets`.

    main: for depth 0. further: for the other depths; it is called with each depth's targets (`shift_for_mtp`).
    of_student: see `MtpObjective`. next_tokens: if sequences continue on other ranks, it appends to a tensor
    [B, S, …] at least as many columns as there are depths.
    The depths' metrics and values per token have the prefix `mtp_<depth>/`.
    """

    def process(*, hidden_states: Any, head: OutputHead, context: MtpTargets, depth: int = 0) -> ObjectiveOutput:
        first_BSD, *later = hidden_states  # of all depths
        targets = context.targets
        outputs = [main(hidden_states=first_BSD, head=head, context=targets)]
        if of_student:
            targets = replace(targets, signal=full_vocab(hidden_states=first_BSD, head=head, context=None))
        targets = _shifted(targets, context.position_ids_BS, len(later), next_tokens)
        outputs += [
            further(hidden_states=each_BSD, head=head, context=targets, depth=number)
            for number, each_BSD in enumerate(later, start=1)
        ]
        return _combined(outputs, scale)

    return process


def _shifted(
    targets: DistillTargets,
    position_ids_BS: Tensor,
    depths: int,
    next_tokens: Callable[[Tensor], Tensor] | None,
) -> DistillTargets:
    """Return the targets with those of all depths, at the columns of `position_ids_BS`."""
    if next_tokens is None:
        return targets.shift_for_mtp(position_ids_BS, depths)
    rows, columns = position_ids_BS.shape
    more_BS = next_tokens(position_ids_BS)
    extended = targets.extended(next_tokens, (rows, columns)).shift_for_mtp(more_BS, depths)
    place_BS = torch.arange(more_BS.numel(), device=more_BS.device).view(more_BS.shape)
    return extended.rows(place_BS[:, :columns].flatten())


def with_positions(context: Callable[[Any, Any], DistillTargets]) -> Callable[[Any, Any], MtpTargets]:
    """Return a function that makes the context of `multi_token` from a micro-batch and a signal, as `context` does
    for its processor `main`.
    """
    return lambda micro_batch, signal: MtpTargets(context(micro_batch, signal), micro_batch.position_ids_BS)


def _combined(outputs: list[ObjectiveOutput], scale: float) -> ObjectiveOutput:
    first, *later = outputs
    loss, metrics, per_token = first.loss, dict(first.metrics), dict(first.per_token)
    for depth, output in enumerate(later, start=1):
        loss = loss + scale * output.loss
        metrics |= {f"{PREFIX}{depth}/{name}": each for name, each in output.metrics.items() if name != CHUNK_TOKENS}
        per_token |= {f"{PREFIX}{depth}/{name}": each_T for name, each_T in output.per_token.items()}
    return ObjectiveOutput(loss, metrics, per_token)
