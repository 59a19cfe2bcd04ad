"""A batch of rollouts for the objective's tests, and the loss of a spec in plain autograd, written from the formulas.

T tokens, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from kit.objective_cases import Leaves, T, V, generator, make_full, make_labels, make_leaves, trainable
from torch import Tensor

from stillhouse.engine.loss import StepLoss
from stillhouse.models.processors import DistillTargets
from stillhouse.objective import TEACHER, Correction, FullVocab, ObjectiveOutput, OutputHead, Signal, Signals
from stillhouse.objective.metrics import ADVANTAGES, IS_SAMPLED, OLD_LOG_PROBS
from stillhouse.objective.metrics import SAMPLING as SAMPLING_NUMBER
from stillhouse.objective.spec import ObjectiveSpec, parse_objective

NORMALIZER = 23.0
#: the sampling temperature
SAMPLING = 0.8
#: objectives, and the fields of their specs that an expression does not have
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "k2": ("sampled_kl", {}),
    "k3": ("0.5*sampled_kl(k3)", {"temperature": 1.7}),
    "k2, truncated": ("sampled_kl(k2)", {"temperature": 1.7, "correction": Correction("truncated", 1.3)}),
    "k3, masked": ("sampled_kl(k3)", {"correction": Correction("masked", 1.5)}),
    "rewards": ("2*policy_gradient", {}),
    "rewards, truncated": ("policy_gradient", {"correction": Correction("truncated", 1.2)}),
    "rewards, masked": ("policy_gradient", {"correction": Correction("masked", 1.4)}),
    "clip": ("policy_gradient(clip_low=0.1)", {"correction": Correction("masked", 1.4)}),
    "clip above": ("policy_gradient(clip_high=0.3)", {}),
    "teacher": ("policy_gradient(teacher_kl=0.5)", {"temperature": 1.7, "correction": Correction("truncated")}),
    "discount": ("policy_gradient(teacher_kl=1)", {"discount": 0.9, "correction": Correction("truncated")}),
    "no discount": ("policy_gradient(teacher_kl=1, clip_low=0.2, clip_high=0.3)", {"discount": 1.0}),
    "dual clip": ("policy_gradient(dual_clip=1.3, clip_high=0.1)", {}),
    "cispo": ("policy_gradient(surrogate=cispo, clip_low=1, clip_high=0.3)", {}),
    "sequence": ("policy_gradient(ratio=sequence, clip_low=0.02, clip_high=0.02)", {}),
    "sequence, truncated": (
        "policy_gradient(ratio=sequence, teacher_kl=0.5)",
        {"discount": 0.9, "correction": Correction("truncated", 1.02)},
    ),
    "penalty": ("policy_gradient(clip_low=0.2, kl_scale=0.4) + 0.1*reverse_kl", {"temperature": 1.7}),
    "everything": (
        "0.3*cross_entropy + 1e-2*z_loss + policy_gradient(teacher_kl=0.3) + 0.1*reverse_kl - 0.01*entropy "
        "+ 0.7*sampled_kl(k3)",
        {"temperature": 1.7, "discount": 0.5, "correction": Correction("truncated", 1.3)},
    ),
}


@dataclass(frozen=True)
class Batch:
    """Three documents with rows of the dataset, rows without a label and rows of weight 0.

    The old log-probabilities and the advantages are NaN where nothing was sampled.
    """

    labels_T: Tensor
    weights_T: Tensor
    document_T: Tensor
    per_token: dict[str, Tensor]

    @property
    def is_sampled_T(self) -> Tensor:
        return (self.labels_T >= 0) & (self.per_token[IS_SAMPLED] != 0)

    def targets(self, teachers: Signal | Signals | None, **options: Any) -> DistillTargets:
        """teachers: the signal of the only teacher, or those of several by their names."""
        signals = {TEACHER: teachers} if isinstance(teachers, Signal) else teachers
        return DistillTargets(
            self.labels_T,
            self.weights_T,
            signals=signals or {},
            per_token=self.per_token,
            document_T=self.document_T,
            **options,
        )


def make_batch(tokens: int = T, vocabulary: int = V, *, dtype: torch.dtype = torch.float64) -> Batch:
    """Ratios of the student of `make_leaves` lie between about 0.3 and 3.3."""
    labels_T = make_labels(tokens, vocabulary)
    is_sampled_T = (torch.arange(tokens) % 4 != 1).to(dtype)
    leaves = make_leaves(tokens, vocabulary)
    logits_TV = OutputHead(leaves.weight, leaves.bias).logits(leaves.hidden)
    noise_T = 2.4 * torch.rand(tokens, generator=generator(61), dtype=torch.float64) - 1.2
    old_T = at(torch.log_softmax(logits_TV / SAMPLING, 1), labels_T) + noise_T
    sampled_T = (labels_T >= 0) & (is_sampled_T != 0)
    weights_T = torch.rand(tokens, generator=generator(62), dtype=torch.float64).to(dtype) + 0.1
    weights_T[3::7] = 0
    advantages_T = torch.randn(tokens, generator=generator(63), dtype=torch.float64)
    per_token = {
        IS_SAMPLED: is_sampled_T,
        OLD_LOG_PROBS: old_T.masked_fill(~sampled_T, math.nan).to(dtype),
        ADVANTAGES: advantages_T.masked_fill(~sampled_T, math.nan).to(dtype),
    }
    return Batch(labels_T, weights_T, torch.arange(tokens) // 13, per_token)


def at(values_TV: Tensor, labels_T: Tensor) -> Tensor:
    return values_TV.gather(1, labels_T.clamp_min(0)[:, None])[:, 0]


def plain_loss(spec: ObjectiveSpec, leaves: Leaves, log_p: Callable[[Any], Tensor], batch: Batch) -> Tensor:
    """log_p: the teacher's log-probabilities [T, V] at a temperature. Of divergences, only reverse KL."""
    logits_TV = OutputHead(leaves.weight, leaves.bias).logits(leaves.hidden)

    def log_q(temperature: float | Tensor) -> Tensor:
        return torch.log_softmax(logits_TV / temperature, 1)

    labels_T, tau = batch.labels_T, spec.temperature
    sampling: float | Tensor = spec.sampling_temperature
    if spec.sampling_temperatures:
        numbers = batch.per_token[SAMPLING_NUMBER].nan_to_num(0).long().tolist()
        by_row = [spec.sampling_temperatures[number] for number in numbers]
        sampling = torch.tensor(by_row, dtype=torch.float64)[:, None]
    sampled_T = batch.is_sampled_T
    total_T = torch.zeros_like(batch.weights_T)
    if spec.cross_entropy is not None:
        value_T = -spec.cross_entropy * at(log_q(1.0), labels_T)
        value_T = value_T + spec.z_loss * torch.logsumexp(logits_TV, 1).square()
        total_T = total_T + torch.where((labels_T >= 0) & (batch.per_token[IS_SAMPLED] == 0), value_T, 0.0)
    if spec.divergence is not None:
        assert str(spec.divergence) == "reverse_kl"
        total_T = total_T + spec.divergence_scale * (log_q(tau).exp() * (log_q(tau) - log_p(tau))).sum(1)
    if spec.entropy is not None:
        total_T = total_T - spec.entropy * (log_q(tau).exp() * log_q(tau)).sum(1)
    old_T = batch.per_token[OLD_LOG_PROBS].masked_fill(~sampled_T, 0.0)
    ratio_T = (at(log_q(sampling), labels_T) - old_T).exp()
    weight_T = corrected(ratio_T.detach(), spec.correction.kind, spec.correction.limit)
    if spec.sampled_kl is not None:
        r_T = at(log_p(tau), labels_T) - at(log_q(tau), labels_T)
        value_T = r_T**2 / 2 if spec.estimator == "k2" else r_T.exp() - 1 - r_T
        total_T = total_T + spec.sampled_kl * torch.where(sampled_T, weight_T * value_T, 0.0)
    if spec.policy_gradient is not None:
        advantages_T = torch.zeros_like(old_T)
        if ADVANTAGES in batch.per_token:
            advantages_T = batch.per_token[ADVANTAGES].masked_fill(~sampled_T, 0.0)
        if spec.teacher_kl:
            log_ratio_T = torch.where(sampled_T & (batch.weights_T != 0), at(log_p(sampling), labels_T) - old_T, 0.0)
            summed_T = looped_sum(log_ratio_T, batch.document_T, spec.discount)
            advantages_T = advantages_T + spec.teacher_kl * summed_T
        log_q_T, policy = at(log_q(sampling), labels_T), spec.policy
        if policy.ratio == "sequence":
            # GSPO-token: the sequence's ratio, with the derivative of the token's own log-probability
            counted_T = sampled_T & (batch.weights_T != 0)
            mean_T = looped_mean((log_q_T - old_T).detach(), batch.document_T, counted_T)
            ratio_T = mean_T.exp() * (log_q_T - log_q_T.detach()).exp()
            weight_T = corrected(ratio_T.detach(), spec.correction.kind, spec.correction.limit)
        gain_T = weight_T * advantages_T * log_q_T
        if policy.kind != "corrected":
            low, high = (0.2 if limit is None else limit for limit in (policy.clip_low, policy.clip_high))
            clipped_T = ratio_T.clamp(1 - low, 1 + high)
            gain_T = torch.min(ratio_T * advantages_T, clipped_T * advantages_T)
            if policy.kind == "cispo":
                gain_T = clipped_T.detach() * advantages_T * log_q_T
            elif policy.dual_clip is not None:
                gain_T = torch.where(advantages_T < 0, torch.max(gain_T, policy.dual_clip * advantages_T), gain_T)
        if policy.kl_scale:
            r_T = at(log_p(sampling), labels_T) - log_q_T
            gain_T = gain_T - policy.kl_scale * (r_T.exp() - 1 - r_T)
        total_T = total_T - spec.policy_gradient * torch.where(sampled_T, gain_T, 0.0)
    return (batch.weights_T * torch.where(batch.weights_T == 0, 0.0, total_T)).sum() / NORMALIZER


def corrected(ratio_T: Tensor, kind: str, limit: float) -> Tensor:
    if kind == "none":
        return torch.ones_like(ratio_T)
    if kind == "truncated":
        return torch.minimum(ratio_T, torch.tensor(limit, dtype=ratio_T.dtype))
    return torch.where((ratio_T >= 1 / limit) & (ratio_T <= limit), ratio_T, 0.0)


def looped_sum(values_T: Tensor, document_T: Tensor, discount: float) -> Tensor:
    """The same as `discounted_sum`, from the last row to the first."""
    sums, running = [], 0.0
    for row in reversed(range(len(values_T))):
        follows = row + 1 < len(values_T) and document_T[row + 1] == document_T[row]
        running = float(values_T[row]) + (discount * running if follows else 0.0)
        sums.append(running)
    return values_T.new_tensor(sums[::-1])


def looped_mean(values_T: Tensor, document_T: Tensor, counted_T: Tensor) -> Tensor:
    """The mean of the counted values of each row's document."""
    means = []
    for row in range(len(values_T)):
        of_it_T = (document_T == document_T[row]) & counted_T
        means.append(float(values_T[of_it_T].mean()) if of_it_T.any() else 0.0)
    return values_T.new_tensor(means)


def spec_of(case: str) -> ObjectiveSpec:
    text, options = SPECS[case]
    return replace(parse_objective(text), sampling_temperature=SAMPLING, **options)


def fused(
    spec: ObjectiveSpec,
    leaves: Leaves,
    batch: Batch,
    teachers: Signal | Signals | None,
    chunk_tokens: int | None = None,
    **head: Any,
) -> tuple[ObjectiveOutput, dict[str, Tensor]]:
    """Run a spec's processor; returns its output and the leaves' gradients. head: further arguments of the head."""
    copies = trainable(leaves)
    output_head = OutputHead(copies["weight"], copies.get("bias"), **head)
    processor = StepLoss(spec, NORMALIZER, chunk_tokens)
    output = processor(hidden_states=copies["hidden"][None], head=output_head, context=batch.targets(teachers))
    output.loss.backward()
    gradients = {name: leaf.grad for name, leaf in copies.items()}
    assert all(gradient is not None for gradient in gradients.values())
    return output, gradients  # type: ignore[return-value]


def teacher() -> tuple[FullVocab, Tensor]:
    """An exact signal and its logits [T, V] in float64."""
    signal = make_full()
    return signal, signal.head.logits(signal.hidden_TE)


def without(batch: Batch, *names: str) -> Batch:
    return replace(batch, per_token={name: value_T for name, value_T in batch.per_token.items() if name not in names})
