"""Objectives at sampled tokens: what each descends, and the formulas of the papers.

What an objective descends is the expectation of its gradient over all tokens of a tiny vocabulary. The formulas are
written out with plain log-probabilities in float64.
T tokens, V vocabulary, S tokens of the tiny vocabulary, N sequences, K ids per token.
"""

import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.objective_cases import Leaves, T, distance, generator, make_labels, make_leaves, run, trainable
from kit.tensors import assert_near
from torch import Tensor

from stillhouse.objective import (
    TEACHER,
    Chosen,
    Correction,
    CrossEntropy,
    DenseLogits,
    Distill,
    OutputHead,
    PolicyGradient,
    SampledKL,
    Signal,
    Term,
    TopK,
    linear_log_probs,
    linear_objective,
    logits_objective,
    reverse_kl,
    sequence_ratios,
)
from stillhouse.objective.metrics import IS_SAMPLED, OLD_LOG_PROBS
from stillhouse.objective.spec import parse_objective

SMALL = 7
TEACHER_S, STUDENT_S, OLD_S = torch.randn(3, SMALL, generator=generator(80), dtype=torch.float64)


def gradient_of(terms: list[Term], weights: Tensor | None = None) -> Tensor:
    """Sum the gradients of rows that all have the student's logits."""
    logits = STUDENT_S.repeat(1 if weights is None else SMALL, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(logits_objective(logits, terms, weights_T=weights).loss, logits)
    return gradient.sum(0)


def expected_gradient(
    text: str, *, sampled_from: Tensor = STUDENT_S, temperature: float = 1.0, **options: Any
) -> Tensor:
    """Return the expectation of a spec's gradient over tokens of softmax(sampled_from / temperature)."""
    spec = replace(parse_objective(text, temperature), sampling_temperature=temperature, **options)
    log_q_S = torch.log_softmax(sampled_from / temperature, 0)
    per_token = {IS_SAMPLED: torch.ones(SMALL, dtype=torch.float64), OLD_LOG_PROBS: log_q_S}
    signal = DenseLogits(TEACHER_S.repeat(SMALL, 1))
    return gradient_of(spec.terms(torch.arange(SMALL), {TEACHER: signal}, per_token), log_q_S.exp())


def exact_gradient(text: str, temperature: float = 1.0) -> Tensor:
    signals = {TEACHER: DenseLogits(TEACHER_S[None])}
    return gradient_of(parse_objective(text, temperature).terms(torch.tensor([0]), signals))


DESCENDS = {
    "sampled_kl(k2)": "reverse_kl",
    "sampled_kl(k3)": "forward_kl",
    "policy_gradient(teacher_kl=1)": "reverse_kl",
    "policy_gradient(teacher_kl=1, clip_low=0.2)": "reverse_kl",
}


@pytest.mark.parametrize("correction", ["none", "truncated", "masked"])
@pytest.mark.parametrize("temperature", [1.0, 1.3])
@pytest.mark.parametrize("text", DESCENDS)
def test_on_policy(text: str, temperature: float, correction: str) -> None:
    """No correction has an effect on tokens that the student itself has just sampled."""
    settings = {"temperature": temperature, "correction": Correction(correction)}  # type: ignore[arg-type]
    actual_S = expected_gradient(text, **settings)
    assert distance(actual_S, exact_gradient(DESCENDS[text], temperature)) < 1e-12
    if text.startswith("sampled_kl"):
        term = SampledKL(torch.arange(SMALL), torch.zeros(SMALL), text[-3:-1])  # type: ignore[arg-type]
        assert term.descends == DESCENDS[text]
    other = {"reverse_kl": "forward_kl", "forward_kl": "reverse_kl"}[DESCENDS[text]]
    assert distance(actual_S, exact_gradient(other, temperature)) > 0.1


def test_k1_is_an_advantage_and_no_loss() -> None:
    """As a loss, k1 has an expected gradient of 0; as an advantage, it descends reverse KL."""
    log_p_S, log_q_S, ids_S = TEACHER_S.log_softmax(0), STUDENT_S.log_softmax(0), torch.arange(SMALL)
    assert float(gradient_of([CrossEntropy(ids_S)], log_q_S.exp()).norm()) < 1e-15
    actual_S = gradient_of([PolicyGradient(ids_S, log_p_S - log_q_S, log_q_S)], log_q_S.exp())
    assert distance(actual_S, exact_gradient("reverse_kl")) < 1e-12
    with pytest.raises(ValueError, match="estimator='k1' as a loss: the expected on-policy gradient"):
        SampledKL(make_labels(), torch.zeros(T), "k1")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["truncated", "masked"])
@pytest.mark.parametrize("text", ["sampled_kl(k2)", "sampled_kl(k3)"])
def test_a_correction_without_a_limit_makes_other_samples_on_policy(text: str, kind: str) -> None:
    exact_S = exact_gradient(DESCENDS[text])
    unlimited = Correction(kind, math.inf)  # type: ignore[arg-type]
    assert distance(expected_gradient(text, sampled_from=OLD_S, correction=unlimited), exact_S) < 1e-12
    assert distance(expected_gradient(text, sampled_from=OLD_S), exact_S) > 0.1
    limited_S = expected_gradient(text, sampled_from=OLD_S, correction=Correction(kind, 1.5))  # type: ignore[arg-type]
    assert distance(limited_S, exact_S) > 0.01


def test_the_sampling_temperature_may_differ_from_the_terms() -> None:
    """Tokens sampled at 0.6, a term at 1: the weight is a ratio at 0.6, and the expectation is over the student's."""
    temperature, log_q_S = 0.6, torch.log_softmax(STUDENT_S / 0.6, 0)
    log_old_S = torch.log_softmax(OLD_S / temperature, 0)
    spec = replace(
        parse_objective("sampled_kl"), sampling_temperature=temperature, correction=Correction("truncated", math.inf)
    )
    signal, ones_S = DenseLogits(TEACHER_S.repeat(SMALL, 1)), torch.ones(SMALL, dtype=torch.float64)

    def expectation(old_S: Tensor) -> Tensor:
        per_token = {IS_SAMPLED: ones_S, OLD_LOG_PROBS: old_S}
        return gradient_of(spec.terms(torch.arange(SMALL), {TEACHER: signal}, per_token), old_S.exp())

    assert distance(expectation(log_old_S), expectation(log_q_S)) < 1e-12


def sparse(kind: str, log_p_S: Tensor, log_q_S: Tensor, rows: int) -> Signal:
    ids_K = (log_q_S if kind == "chosen" else log_p_S).topk(3).indices
    signal = Chosen if kind == "chosen" else TopK
    return signal(ids_K.repeat(rows, 1), log_p_S[ids_K].repeat(rows, 1))


@pytest.mark.parametrize("kind", ["top-k", "chosen"])
def test_a_top_k_kl_is_a_loss_and_no_advantage(kind: str) -> None:
    """A state's KL does not depend on the token that is sampled there.

    As a detached advantage it multiplies every token's score alike, and the expected score is 0; the differentiable
    divergence of the same ids has a gradient.
    """
    log_p_S, log_q_S = TEACHER_S.log_softmax(0), STUDENT_S.log_softmax(0)
    term = Distill(sparse(kind, log_p_S, log_q_S, SMALL), reverse_kl())
    kl_S = logits_objective(STUDENT_S.repeat(SMALL, 1), [term]).per_token["reverse_kl"]
    assert kl_S[0] > 0.01
    q_S = log_q_S.exp()
    for surrogate in ("corrected", "clip"):
        policy = PolicyGradient(torch.arange(SMALL), -kl_S, log_q_S, surrogate=surrogate)  # type: ignore[arg-type]
        assert gradient_of([policy], q_S).norm() < 1e-15
    differentiable_S = gradient_of([Distill(sparse(kind, log_p_S, log_q_S, 1), reverse_kl())])
    assert differentiable_S.norm() > 0.05
    # on the rows of all tokens, weighted by their probability, it is the same
    assert distance(gradient_of([term], q_S), differentiable_S) < 1e-12


def test_discounted_advantages_are_minillms() -> None:
    """Over all sequences of two tokens, γ = 1 gives the gradient of the sequences' reverse KL.

    The second token's distributions depend on the first token. The gradient is that of all logits at once.
    """
    student, teacher = torch.randn(2, SMALL + 1, SMALL, generator=generator(81), dtype=torch.float64)
    first, second = torch.arange(SMALL).repeat_interleave(SMALL), torch.arange(SMALL).repeat(SMALL)
    leaf = student.clone().requires_grad_()
    log_q, log_p = leaf.log_softmax(1), teacher.log_softmax(1)
    sequence_q = log_q[0][first] + log_q[1 + first, second]
    sequence_p = log_p[0][first] + log_p[1 + first, second]
    (exact,) = torch.autograd.grad((sequence_q.exp() * (sequence_q - sequence_p)).sum(), leaf)

    # the rows of one sequence are one document; its weight is its probability
    rows = torch.stack([torch.zeros_like(first), 1 + first], 1).flatten()
    labels = torch.stack([first, second], 1).flatten()
    old = log_q.detach()[rows, labels]
    per_token = {IS_SAMPLED: torch.ones_like(old), OLD_LOG_PROBS: old}
    weights = sequence_q.detach().exp().repeat_interleave(2)
    document = torch.arange(SMALL * SMALL).repeat_interleave(2)
    for discount, is_exact in ((1.0, True), (0.0, False)):
        spec = replace(parse_objective("policy_gradient(teacher_kl=1)"), discount=discount)
        terms = spec.terms(labels, {TEACHER: DenseLogits(teacher[rows])}, per_token, document_T=document)
        leaf = student.clone().requires_grad_()
        logits_objective(leaf[rows], terms, weights_T=weights).loss.backward()
        error = distance(leaf.grad, exact)  # type: ignore[arg-type]
        assert error < 1e-12 if is_exact else error > 0.05


LABELS = make_labels()
HAS_LABEL = LABELS >= 0
#: advantages of both signs; every seventh is 0
ADVANTAGES = torch.randn(T, generator=generator(50), dtype=torch.float64) * (torch.arange(T) % 7 > 0)


def plain_log_probs(leaves: Leaves, temperature: float) -> Tensor:
    """Return log q of every token, [T, V]."""
    logits_TV = OutputHead(leaves.weight, leaves.bias).logits(leaves.hidden)
    return torch.log_softmax(logits_TV / temperature, 1)


def of_labels(leaves: Leaves, temperature: float) -> Tensor:
    """Return log q of the labels, [T]; that of token 0 without a label."""
    return plain_log_probs(leaves, temperature).gather(1, LABELS.clamp_min(0)[:, None])[:, 0]


def old_log_probs(temperature: float) -> Tensor:
    """Return old log-probabilities whose ratios lie between about 0.2 and 5, beyond every clip on both sides."""
    log_q_T = of_labels(make_leaves(), temperature)
    return log_q_T - 1.6 * (2 * torch.rand(T, generator=generator(51), dtype=torch.float64) - 1)


def ppo(ratio: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """Schulman et al. 2017, equation 7: the objective, which is maximised."""
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def dual_clip(ratio: Tensor, advantage: Tensor, log_q: Tensor) -> Tensor:
    """Ye et al. 2020 (arXiv:1912.09729), equation 5, c = 1.7."""
    return torch.where(advantage < 0, torch.max(ppo(ratio, advantage), 1.7 * advantage), ppo(ratio, advantage))


def two_sided(ratio: Tensor, advantage: Tensor, log_q: Tensor) -> Tensor:
    """INTELLECT-2 (arXiv:2505.07291), section 3.4: min(min(ρ, δ)A, clip(ρ)A), δ = 1.7; TRL's `delta`."""
    return torch.min(ratio.clamp(max=1.7) * advantage, ratio.clamp(0.8, 1.2) * advantage)


def cispo(ratio: Tensor, advantage: Tensor, log_q: Tensor) -> Tensor:
    """MiniMax-M1 (arXiv:2506.13585), equations 4 and 5: sg(clip(ρ))·A·log q."""
    return ratio.clamp(0.0, 1.5).detach() * advantage * log_q


SURROGATES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "dual clip": (dual_clip, {"dual_clip": 1.7}),
    "two-sided clip": (two_sided, {"dual_clip": 1.7}),
    "cispo": (cispo, {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.5}),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("case", SURROGATES)
def test_surrogates_are_their_papers(case: str, temperature: float) -> None:
    formula, options = SURROGATES[case]
    old_T = old_log_probs(temperature)

    leaves = trainable(make_leaves())
    log_q_T = of_labels(Leaves(**leaves), temperature)
    value_T = torch.where(HAS_LABEL, -formula((log_q_T - old_T).exp(), ADVANTAGES, log_q_T), 0.0)
    value_T.sum().backward()
    term = PolicyGradient(LABELS, ADVANTAGES, old_T, temperature=temperature, **options)
    actual = run(linear_objective, make_leaves(), [term], chunk_tokens=10)
    assert distance(actual.output.per_token["policy_gradient"], value_T) < 1e-12
    assert_near(actual.gradients, {name: leaf.grad for name, leaf in leaves.items()}, 1e-12)
    plain = run(linear_objective, make_leaves(), [PolicyGradient(LABELS, ADVANTAGES, old_T, temperature=temperature)])
    assert distance(actual.gradients["hidden"], plain.gradients["hidden"]) > 1e-2


def corrected(kind: str) -> dict[str, Any]:
    return {"surrogate": "corrected", "correction": Correction(kind, 1.5)}  # type: ignore[arg-type]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ({}, {-1: 0.8}, {1: 1.2}),
        ({"dual_clip": 1.7}, {-1: 0.8}, {1: 1.2, -1: 1.7}),
        ({"surrogate": "cispo"}, {1: 0.8, -1: 0.8}, {1: 1.2, -1: 1.2}),
        (corrected("truncated"), {}, {1: 1.5, -1: 1.5}),
        (corrected("masked"), {1: 1 / 1.5, -1: 1 / 1.5}, {1: 1.5, -1: 1.5}),
    ],
    ids=["clip", "dual clip", "cispo", "truncated", "masked"],
)
def test_ratio_and_clipping_are_reported(
    options: dict[str, Any], low: dict[int, float], high: dict[int, float], advantage: float
) -> None:
    """Clipping counts where it takes the gradient away. low, high: the limits of the ratio for each sign of A."""
    old_T, advantages_T = old_log_probs(1.0), torch.full((T,), advantage, dtype=torch.float64)
    log_q_T = of_labels(make_leaves(), 1.0)
    ratio_T, sign = (log_q_T - old_T).exp(), int(advantage)
    clipped_T = (ratio_T < low.get(sign, -math.inf)) | (ratio_T > high.get(sign, math.inf))
    terms: list[Term] = [PolicyGradient(LABELS, advantages_T, old_T, **options)]
    if "correction" in options:
        terms.append(SampledKL(LABELS, old_T, correction=options["correction"], old_log_probs_T=old_T))
    metrics = run(linear_objective, make_leaves(), terms).output.metrics
    assert 0 < (clipped_T & HAS_LABEL).sum() < HAS_LABEL.sum()
    for suffix in ("", "#2")[: len(terms)]:
        assert metrics[f"clipped{suffix}"] == (clipped_T & HAS_LABEL).sum()
        torch.testing.assert_close(metrics[f"ratio{suffix}"], ratio_T[HAS_LABEL].sum(), rtol=1e-12, atol=0)
    assert "reference_kl" not in metrics


def test_an_overflowing_ratio_of_no_advantage_is_worth_nothing() -> None:
    nothing = torch.zeros(T, dtype=torch.float64)
    for options in ({}, {"dual_clip": 3.0}, {"surrogate": "cispo"}):
        term = PolicyGradient(LABELS, nothing, torch.full_like(nothing, -1000.0), **options)
        result = run(linear_objective, make_leaves(), [term])
        assert result.output.loss == 0
        assert all((gradient == 0).all() for gradient in result.gradients.values())


def gspo(log_q_T: Tensor, old_T: Tensor, sequence_T: Tensor, advantages_N: Tensor) -> Tensor:
    """Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7, a loop over sequences; the result is maximised."""
    total = log_q_T.new_zeros(())
    for number, advantage in enumerate(advantages_N):
        of_it = (sequence_T == number) & HAS_LABEL
        ratio = ((log_q_T[of_it] - old_T[of_it]).sum() / of_it.sum()).exp()
        total = total + torch.min(ratio * advantage, ratio.clamp(1 - 3e-1, 1 + 4e-1) * advantage)
    return total / len(advantages_N)


def test_the_ratios_of_sequences_are_gspos() -> None:
    """Of the policy-gradient term, and of the loss in examples/gspo_loss.py.

    In the term, a sequence counts once if its tokens have the weight 1 / length.
    """
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "gspo_loss.py"))
    assert linear_log_probs is names["linear_log_probs"]
    sequence_T, advantages_N = torch.arange(T) // 13, torch.tensor([0.7, -1.1, 0.4], dtype=torch.float64)
    old_T, tokens_N = old_log_probs(1.0) * 0.9, torch.bincount(sequence_T[HAS_LABEL])
    leaves, shown = trainable(make_leaves()), trainable(make_leaves())
    log_q_T = of_labels(Leaves(**leaves), 1.0)
    loss = -gspo(log_q_T, old_T, sequence_T, advantages_N)
    loss.backward()
    expected = {name: leaf.grad for name, leaf in leaves.items()}
    assert all(gradient.any() for gradient in expected.values())

    ratios_T = sequence_ratios(log_q_T.detach() - old_T, sequence_T, HAS_LABEL)
    term = PolicyGradient(LABELS, advantages_N[sequence_T], old_T, None, 0.3, 0.4, sequence_ratios_T=ratios_T)
    weights_T = 1 / tokens_N[sequence_T].double()
    actual = run(linear_objective, make_leaves(), [term], weights_T=weights_T, normalizer=3.0, chunk_tokens=10)
    assert 0 < actual.output.metrics["clipped"] < 3
    torch.testing.assert_close(actual.output.loss, loss.detach(), rtol=1e-12, atol=0)
    assert_near(actual.gradients, expected, 1e-12)

    head = OutputHead(shown["weight"], shown["bias"])
    shown_loss = names["gspo_loss"](shown["hidden"], head, LABELS, old_T, sequence_T, advantages_N, 0.3, 0.4)
    shown_loss.backward()
    torch.testing.assert_close(shown_loss, loss, rtol=1e-12, atol=0)
    assert_near({name: leaf.grad for name, leaf in shown.items()}, expected, 1e-12)
