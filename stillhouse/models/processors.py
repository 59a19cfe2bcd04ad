"""Output processors: they compute objectives from hidden states and a head, for any model that calls them.

    decoder(input_ids, processor=selected_log_probs(), context=Targets(labels))

A processor is created for an optimizer step; its context has the tensors of one micro-batch (`processor_targets.py`).
No processor computes the logits of all tokens at once. Every processor gives the same result over a vocabulary shard
as over the full head. `engine/loss.py` has the processor of a run's objective.

B rows of S tokens each, T = B·S tokens in the rows' order, D width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stillhouse.models.lm_head import OutputProcessor
from stillhouse.models.processor_targets import PolicyTargets, Targets
from stillhouse.objective import (
    CrossEntropy,
    Entropy,
    FullVocab,
    ObjectiveOutput,
    OutputHead,
    PolicyGradient,
    Term,
    detached,
    linear_log_probs,
    linear_objective,
)


@dataclass(frozen=True, eq=False)
class LogProbs:
    """The log-probability of each row's label (0 without a label) and the entropy of each row's distribution in nats.

    Both are differentiable and at least float32. The class is not a tuple, since models may convert tensors in those.
    """

    log_probs_BS: Tensor
    entropy_BS: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.log_probs_BS, self.entropy_BS))


def hidden_states(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Tensor:
    """Return the hidden states [B, S, D] after the final norm, for serving and for teachers with a separate head."""
    return replicated_hidden(hidden_states, head)


def replicated_hidden(hidden_states: Tensor, head: OutputHead) -> Tensor:
    """Return hidden states for a computation that all ranks of a sharded vocabulary repeat, such as a value head.

    With sequence parallelism, the layer below sums the gradient over these ranks (`VocabShard.reduce_hidden_grad`).
    A repeated computation gives every rank the full gradient, so backward divides it by the number of ranks.
    """
    shard = head.shard
    if shard is None or shard.is_alone or shard.reduce_hidden_grad:
        return hidden_states
    assert shard.group is not None
    ranks, part = shard.group.size(), hidden_states.view_as(hidden_states)
    if part.requires_grad:
        part.register_hook(lambda gradient: gradient / ranks)
    return part


def full_vocab(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> FullVocab:
    """Return the exact teacher signal, without gradients."""
    # a frozen weight must stay the same tensor: `vocab.rows_of` exchanges rows between ranks once per tensor
    return FullVocab(hidden_states.detach().flatten(0, -2), detached(head))


def selected_log_probs(*, temperature: float = 1.0) -> OutputProcessor:
    """Return a processor that gives `LogProbs` [B, S] of the context's labels (`Targets`) and ignores the weights."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0) -> LogProbs:
        hidden_TD, labels_T = hidden_states.flatten(0, -2), context.at(depth).labels_T
        outputs = linear_log_probs(hidden_TD, head, labels_T, temperature=temperature)
        return LogProbs(*(values_T.view(hidden_states.shape[:-1]) for values_T in outputs))

    return process


def cross_entropy(
    *, label_smoothing: float = 0.0, z_loss: float = 0.0, normalizer: float | Tensor = 1.0
) -> OutputProcessor:
    """Return a processor that gives the `ObjectiveOutput` of cross-entropy with the context's labels (`Targets`).

    normalizer: divides the sum over tokens; the optimizer step's global count of tokens with a non-zero weight.
    """

    def process(*, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0) -> ObjectiveOutput:
        targets = context.at(depth)
        terms = [CrossEntropy(targets.labels_T, 1.0, label_smoothing, z_loss)]
        return _objective(hidden_states, head, terms, targets, normalizer)

    return process


def policy_gradient(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_scale: float = 0.0,
    entropy_bonus: float = 0.0,
    temperature: float = 1.0,
    normalizer: float | Tensor = 1.0,
) -> OutputProcessor:
    """Return a processor for the clipped surrogate of PPO and GRPO (`PolicyGradient`), with `PolicyTargets`.

    It gives an `ObjectiveOutput`, whose loss includes −entropy_bonus · entropy. normalizer: see `cross_entropy`.
    """

    def process(
        *, hidden_states: Tensor, head: OutputHead, context: PolicyTargets, depth: int = 0
    ) -> ObjectiveOutput:
        if depth:
            raise ValueError(
                f"a policy gradient at depth {depth}: expected 0, the head that tokens are drawn from; "
                "by_depth(policy_gradient(…), cross_entropy()) has another objective for the others"
            )
        assert context.advantages_T is not None
        assert context.old_log_probs_T is not None
        policy = PolicyGradient(
            context.labels_T,
            context.advantages_T,
            context.old_log_probs_T,
            context.reference_log_probs_T,
            clip_low,
            clip_high,
            kl_scale,
            temperature=temperature,
        )
        terms = [policy, Entropy(-entropy_bonus, temperature)] if entropy_bonus else [policy]
        return _objective(hidden_states, head, terms, context, normalizer)

    return process


def _objective(
    hidden_states: Tensor, head: OutputHead, terms: Sequence[Term], targets: Targets, normalizer: float | Tensor
) -> ObjectiveOutput:
    return linear_objective(
        hidden_states.flatten(0, -2),
        head,
        terms,
        weights_T=targets.weights_T,
        valid_index=targets.valid_index,
        normalizer=normalizer,
    )


def by_depth(main: OutputProcessor, mtp_targets: OutputProcessor) -> OutputProcessor:
    """Return a processor that calls `main` at depth 0 and `mtp_targets` at MTP depths, with the same context."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Any:
        chosen = mtp_targets if depth else main
        return chosen(hidden_states=hidden_states, head=head, context=context, depth=depth)

    return process
