"""Output processors: they compute objectives from hidden states and a head, for any model that calls them.

    decoder(input_ids, processor=selected_log_probs(), context=Targets(labels))
    model(…, output_processor=MegatronProcessor(model, cross_entropy()), output_processor_context=Targets(labels))

A processor is created once, with everything that is the same for all batches; its context holds the tensors of one
micro-batch (`targets.py`). No processor computes the logits of all tokens at once. Every processor gives the same
result over a vocabulary shard as over the whole head.

B rows of S tokens each, T = B·S tokens in the rows' order, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stillhouse.models.head import OutputProcessor
from stillhouse.models.targets import DistillTargets, PolicyTargets, Targets
from stillhouse.objective import (
    CrossEntropy,
    Entropy,
    FullVocab,
    ObjectiveOutput,
    OutputHead,
    PolicyGradient,
    RoutedSignals,
    SeveralSignals,
    Signal,
    Term,
    linear_log_probs,
    linear_objective,
    routed_objective,
)
from stillhouse.objective.keys import IS_SAMPLED, WEIGHTS
from stillhouse.objective.spec import ObjectiveSpec


@dataclass(frozen=True, eq=False)
class LogProbs:
    """The log-probability of each row's label (0 without a label) and the entropy of each row's distribution in nats.

    Both are differentiable and at least float32.
    """

    log_probs_BS: Tensor
    entropy_BS: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.log_probs_BS, self.entropy_BS))


@dataclass(frozen=True)
class Objective:
    """The processor of a weighted sum of terms. `terms` makes the terms from a micro-batch's context."""

    terms: Callable[[Any], Sequence[Term]]
    chunk_tokens: int | None = None

    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0
    ) -> ObjectiveOutput:
        here = context.at(depth)
        return linear_objective(
            hidden_states.flatten(0, -2),
            head,
            self.terms(here),
            weights_T=here.weights_T,
            valid_index=here.valid_index,
            normalizer=here.normalizer,
            chunk_tokens=self.chunk_tokens,
        )


def with_teacher_cross_entropy(processor: OutputProcessor) -> OutputProcessor:
    """Return a processor that also reports the metric `teacher_cross_entropy`, the teacher's own on the labels.

    processor: gives an `ObjectiveOutput`; its context is `DistillTargets`. The signal has to be exact, `FullVocab`.
    """

    def process(
        *, hidden_states: Tensor, head: OutputHead, context: DistillTargets, depth: int = 0
    ) -> ObjectiveOutput:
        output: ObjectiveOutput = processor(hidden_states=hidden_states, head=head, context=context, depth=depth)
        if depth:
            return output
        assert isinstance(context.signal, FullVocab)
        of_teacher = linear_objective(
            context.signal.hidden_TE,
            context.signal.head,
            [CrossEntropy(context.labels_T)],
            weights_T=context.weights_T,
            valid_index=context.valid_index,
        )
        return replace(
            output, metrics=output.metrics | {"teacher_cross_entropy": of_teacher.metrics["cross_entropy"]}
        )

    return process


def hidden_states(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Tensor:
    """Return the hidden states [B, S, D] after the last norm: for serving, and for teachers with a separate head."""
    return replicated_hidden(hidden_states, head)


def replicated_hidden(hidden_states: Tensor, head: OutputHead) -> Tensor:
    """Return hidden states for a computation that all ranks of a vocabulary shard repeat, such as a value head.

    With sequence parallelism, the layer below sums the gradient over these ranks, since each rank's vocabulary rows
    contribute only a part of it (`VocabShard.reduce_hidden_grad`). A repeated computation gives every rank the whole
    gradient, so backward divides it by the number of ranks.
    """
    shard = head.shard
    if shard is None or shard.is_alone or shard.reduce_hidden_grad:
        return hidden_states
    assert shard.group is not None
    return _PartOfGradient.apply(hidden_states, shard.group.size())


def full_vocab(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> FullVocab:
    """Return the exact teacher signal, without gradients."""
    # a frozen weight stays the same tensor: `vocab.rows_of` exchanges rows between ranks once per tensor
    if head.weight_VD.requires_grad:
        head = replace(
            head, weight_VD=head.weight_VD.detach(), bias=None if head.bias is None else head.bias.detach()
        )
    return FullVocab(hidden_states.detach().flatten(0, -2), head)


def selected_log_probs(*, temperature: float = 1.0) -> OutputProcessor:
    """Return a processor that gives `LogProbs` [B, S] of the context's labels (`Targets`) and ignores the weights."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0) -> LogProbs:
        hidden_TD, labels_T = hidden_states.flatten(0, -2), context.at(depth).labels_T
        made = linear_log_probs(hidden_TD, head, labels_T, temperature=temperature)
        return LogProbs(*(each_T.view(hidden_states.shape[:-1]) for each_T in made))

    return process


def cross_entropy(*, label_smoothing: float = 0.0, z_loss: float = 0.0) -> OutputProcessor:
    """Return a processor that gives the `ObjectiveOutput` of cross-entropy with the context's labels (`Targets`)."""
    return Objective(lambda context: [CrossEntropy(context.labels_T, 1.0, label_smoothing, z_loss)])


def distillation(spec: ObjectiveSpec, *, chunk_tokens: int | None = None) -> OutputProcessor:
    """Return a processor that gives the `ObjectiveOutput` of a spec; its context is `DistillTargets`.

    spec: for example `parse_objective("0.3*cross_entropy + 0.7*jsd(0.5)")`. With `RoutedSignals`, the metrics have
    the number of rows of each teacher as `tokens/<name>`. `weights` and `weights/<name>` are the sums of the rows'
    weights, by which the sums of entropies and agreement are divided for a mean. Further depths of multi-token
    prediction have the objective `spec.at_further_depths()`.
    """

    def process(
        *, hidden_states: Tensor, head: OutputHead, context: DistillTargets, depth: int = 0
    ) -> ObjectiveOutput:
        here = context.at(depth)
        own = spec.at_further_depths() if depth and spec.needs_rollouts else spec
        if own.needs_teacher and here.signal is None:
            raise ValueError(f"signal is missing: expected a teacher's signal for {len(here.labels_T)} tokens")
        signal = here.signal
        if not isinstance(signal, RoutedSignals):
            objective = Objective(lambda each: _terms(own, each, signal, each.valid_index, head, depth), chunk_tokens)
            output = objective(hidden_states=hidden_states, head=head, context=context, depth=depth)
            return replace(output, metrics=output.metrics | {WEIGHTS: _sum_of_weights(here, output)})
        output = routed_objective(
            hidden_states.flatten(0, -2),
            head,
            _groups(own, here, signal, head),
            weights_T=here.weights_T,
            normalizer=here.normalizer,
            chunk_tokens=chunk_tokens,
        )
        counts = {f"tokens/{name}": output.loss.new_tensor(len(each)) for name, each in signal.rows.items()}
        weights = {f"{WEIGHTS}/{name}": _sum_of_weights(here, output, each) for name, each in signal.rows.items()}
        return replace(output, metrics=output.metrics | counts | weights | {WEIGHTS: _sum_of_weights(here, output)})

    return process


def _sum_of_weights(context: DistillTargets, output: ObjectiveOutput, rows: Tensor | None = None) -> Tensor:
    """rows: the rows that count; None: those of the context. output: has the dtype and the device of the result."""
    assert context.weights_T is not None
    index = context.valid_index if rows is None else rows
    weights_T = context.weights_T.detach()
    return (weights_T if index is None else weights_T[index.to(weights_T.device)]).to(output.loss).sum()


def _groups(
    spec: ObjectiveSpec, context: DistillTargets, signals: RoutedSignals, head: OutputHead
) -> Iterator[tuple[Tensor, list[Term]]]:
    """Yield each teacher's rows and terms, while the teacher's output head is there."""
    for name, index in signals.rows.items():
        with signals.opened(name) as signal:
            yield index, _terms(spec, context, SeveralSignals({name: signal}), index, head)


def _terms(
    spec: ObjectiveSpec,
    context: DistillTargets,
    signal: Signal | None,
    valid_index: Tensor | None,
    head: OutputHead,
    depth: int = 0,
) -> list[Term]:
    """Return the terms of a depth. valid_index: the rows of these terms; None: those with a weight."""
    per_token = context.per_token
    if depth:
        # tokens are drawn from depth 0: only the kind of each token matters at further depths
        per_token = {name: each_T for name, each_T in per_token.items() if name == IS_SAMPLED}
    if valid_index is None and spec.needs_rollouts:
        assert context.weights_T is not None
        valid_index = context.weights_T.nonzero()[:, 0]
    return spec.terms(
        context.labels_T,
        signal,
        per_token,
        document_T=context.document_T,
        valid_index=valid_index,
        student=head,
    )


def policy_gradient(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_scale: float = 0.0,
    entropy_bonus: float = 0.0,
    temperature: float = 1.0,
) -> OutputProcessor:
    """Return a processor for the clipped surrogate of PPO and GRPO (`PolicyGradient`).

    It gives an `ObjectiveOutput`; its context is `PolicyTargets`. entropy_bonus: the loss is reduced by entropy_bonus
    times the entropy.
    """

    def terms(context: PolicyTargets) -> Iterator[Term]:
        assert context.advantages_T is not None
        assert context.old_log_probs_T is not None
        yield PolicyGradient(
            context.labels_T,
            context.advantages_T,
            context.old_log_probs_T,
            context.reference_log_probs_T,
            clip_low,
            clip_high,
            kl_scale,
            temperature=temperature,
        )
        if entropy_bonus:
            yield Entropy(-entropy_bonus, temperature)

    objective = Objective(lambda context: list(terms(context)))

    def process(
        *, hidden_states: Tensor, head: OutputHead, context: PolicyTargets, depth: int = 0
    ) -> ObjectiveOutput:
        if depth:
            raise ValueError(
                f"a policy gradient at depth {depth}: expected 0, the head that tokens are drawn from; "
                "by_depth(policy_gradient(…), cross_entropy()) has another objective for the others"
            )
        return objective(hidden_states=hidden_states, head=head, context=context)

    return process


def by_depth(main: OutputProcessor, mtp_targets: OutputProcessor) -> OutputProcessor:
    """Return a processor that calls `main` at depth 0 and `mtp_targets` at further depths, with the same context."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Any:
        chosen = mtp_targets if depth else main
        return chosen(hidden_states=hidden_states, head=head, context=context, depth=depth)

    return process


class _PartOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.parts, None
