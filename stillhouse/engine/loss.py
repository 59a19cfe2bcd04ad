"""The loss of an optimizer step. It is an output processor, which the student calls on the last pipeline stage.

    loss = StepLoss(parse_objective("0.3*cross_entropy + 0.7*jsd(0.5)"), normalizer=tokens_of_the_step)
    decoder(input_ids, processor=loss, context=DistillTargets(labels, signals={TEACHER: teacher.signal(input_ids)}))

B rows, S tokens per row, T = B·S tokens in the rows' order, D width.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stillhouse.engine.losses import LossPart
from stillhouse.models.processors import DistillTargets
from stillhouse.objective import (
    CrossEntropy,
    FullVocab,
    ObjectiveOutput,
    OutputHead,
    RoutedSignal,
    Signal,
    Signals,
    Term,
    linear_objective,
    routed_objective,
)
from stillhouse.objective.metrics import IS_SAMPLED, WEIGHTS
from stillhouse.objective.sampled_tokens import origin_masks
from stillhouse.objective.spec import ObjectiveSpec


@dataclass(frozen=True)
class StepLoss:
    """Computes the `ObjectiveOutput` of each micro-batch of a step. It needs `DistillTargets` as the `context`.

    normalizer: the number of target tokens of the step, by which the sums over tokens are divided.
    chunk_tokens: the number of rows of a logits tile. If it is None, a memory budget determines the number.
    parts: the losses that are added to the objective (`engine/losses`).
    with_teacher_cross_entropy: whether to report `teacher_cross_entropy`, the teacher's cross-entropy on the labels.
        The signal must be exact (`FullVocab`).

    The output has the objective's metrics and more. `weights` is the sum of the rows' weights, by which the sums of
    entropies and of agreement are divided. Each teacher with a routed signal, and each origin in
    `objective.by_origin`, has `weights/<name>`, the sum of the weights of its own rows, and `tokens/<name>`, the
    number of these rows. At MTP depths, `objective.at_mtp_depths()` replaces an objective that needs rollouts.
    """

    objective: ObjectiveSpec
    normalizer: float | Tensor = 1.0
    chunk_tokens: int | None = None
    parts: tuple[LossPart, ...] = ()
    with_teacher_cross_entropy: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.objective, ObjectiveSpec):
            raise ValueError(
                f"objective is of type {type(self.objective).__name__}: expected an ObjectiveSpec, such as "
                "parse_objective('0.3*cross_entropy + 0.7*jsd(0.5)')"
            )

    def __call__(
        self, *, hidden_states: Any, head: OutputHead, context: DistillTargets, depth: int = 0
    ) -> ObjectiveOutput:
        """Return the loss, the metrics and the values per token of a micro-batch, or of one MTP depth of it.

        hidden_states: [B, S, D]; with multi-token prediction, a tuple of the hidden states of depths 0, 1, ….
        """
        hidden_by_depth = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        hidden_TD, targets = hidden_by_depth[0].flatten(0, -2), context.at(depth)
        options: dict[str, Any] = {"weights_T": targets.weights_T, "normalizer": self.normalizer}
        options["chunk_tokens"] = self.chunk_tokens
        with ExitStack() as heads:
            signals = {name: heads.enter_context(signal.opened(head)) for name, signal in targets.signals.items()}
            if routed := {name: signal for name, signal in signals.items() if isinstance(signal, RoutedSignal)}:
                groups = self._routed_terms(hidden_TD, routed, targets, head)
                output = routed_objective(hidden_TD, head, groups, **options)
            else:
                terms = self._terms(hidden_TD, signals, targets, head, targets.valid_index, depth)
                output = linear_objective(hidden_TD, head, terms, valid_index=targets.valid_index, **options)
            metrics = output.metrics | _row_counts(targets, routed, self.objective.by_origin, output.loss)
            if self.with_teacher_cross_entropy and not depth:
                metrics["teacher_cross_entropy"] = _teacher_cross_entropy(signals, targets)
            output = replace(output, metrics=metrics)
            for part in self.parts:
                output = part.at_head(self, output, hidden_by_depth, head, replace(context, signals=signals))
        return output

    def _routed_terms(
        self, hidden_TD: Tensor, routed: Mapping[str, RoutedSignal], targets: DistillTargets, head: OutputHead
    ) -> Iterator[tuple[Tensor, list[Term]]]:
        """Yield each teacher's rows and terms, while the teacher's output head is in memory."""
        for name, signal in routed.items():
            with signal.signal.opened(head) as opened:
                yield signal.index, self._terms(hidden_TD, {name: opened}, targets, head, signal.index)

    def _terms(
        self,
        hidden_TD: Tensor,
        signals: Signals,
        targets: DistillTargets,
        head: OutputHead,
        valid_index: Tensor | None,
        depth: int = 0,
    ) -> list[Term]:
        """Return the objective's terms.

        valid_index: the rows that the terms must cover, or None for all rows with a non-zero weight.
        """
        objective, per_token = self.objective, targets.per_token
        if depth:
            # tokens are sampled only from depth 0; the other depths need only the mask of sampled tokens
            objective = objective.at_mtp_depths() if objective.needs_rollouts else objective
            per_token = {name: value_T for name, value_T in per_token.items() if name == IS_SAMPLED}
        if valid_index is None and objective.needs_rollouts:
            assert targets.weights_T is not None
            valid_index = targets.weights_T.nonzero()[:, 0]
        return objective.terms(
            targets.labels_T,
            signals,
            per_token,
            document_T=targets.document_T,
            valid_index=valid_index,
            student=head,
            hidden_TD=hidden_TD,
        )


def _row_counts(
    targets: DistillTargets, routed: Mapping[str, RoutedSignal], origins: Iterable[str], loss: Tensor
) -> dict[str, Tensor]:
    """Return the metrics `weights` and `tokens` of `StepLoss`, in the dtype and on the device of the loss."""
    assert targets.weights_T is not None
    weights_T = targets.weights_T.detach()
    counts = {f"tokens/{name}": loss.new_full((), len(signal.index)) for name, signal in routed.items()}
    rows: dict[str, Tensor | None] = {f"{WEIGHTS}/{name}": signal.index for name, signal in routed.items()}
    for name, index in (rows | {WEIGHTS: targets.valid_index}).items():
        counts[name] = (weights_T if index is None else weights_T[index.to(weights_T.device)]).to(loss).sum()
    masks = origin_masks(targets.labels_T, targets.per_token) if origins else {}
    for origin in origins:
        origin_weights_T = weights_T.to(loss) * masks[origin]
        counts[f"{WEIGHTS}/{origin}"] = origin_weights_T.sum()
        counts[f"tokens/{origin}"] = (origin_weights_T != 0).to(loss).sum()
    return counts


@torch.no_grad()
def _teacher_cross_entropy(signals: Mapping[str, Signal], targets: DistillTargets) -> Tensor:
    (signal,) = signals.values()
    assert isinstance(signal, FullVocab)
    output = linear_objective(
        signal.hidden_TE,
        signal.head,
        [CrossEntropy(targets.labels_T)],
        weights_T=targets.weights_T,
        valid_index=targets.valid_index,
    )
    return output.metrics["cross_entropy"]
