"""What objectives on drawn tokens descend: the expectation of their gradients over all tokens of a tiny vocabulary.

V vocabulary.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.objective_cases import distance, generator
from torch import Tensor

from stillhouse.objective import (
    TEACHER,
    Chosen,
    Correction,
    DenseLogits,
    Distill,
    PolicyGradient,
    Signal,
    Term,
    TopK,
    logits_objective,
    reverse_kl,
)
from stillhouse.objective.keys import IS_SAMPLED, OLD_LOG_PROBS
from stillhouse.objective.spec import parse_objective

V = 7
TEACHER_V, STUDENT_V, OLD_V = torch.randn(3, V, generator=generator(80), dtype=torch.float64)


def gradient_of(terms: list[Term], weights: Tensor | None = None) -> Tensor:
    """Sum the gradients of rows that all have the student's logits."""
    logits = STUDENT_V.repeat(1 if weights is None else V, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(logits_objective(logits, terms, weights_T=weights).loss, logits)
    return gradient.sum(0)


def expected_gradient(
    text: str, *, drawn_from: Tensor = STUDENT_V, temperature: float = 1.0, **options: Any
) -> Tensor:
    """Return the expectation of a spec's gradient over tokens drawn from softmax(drawn_from / temperature)."""
    spec = replace(parse_objective(text, temperature), sampling_temperature=temperature, **options)
    log_q_V = torch.log_softmax(drawn_from / temperature, 0)
    per_token = {IS_SAMPLED: torch.ones(V, dtype=torch.float64), OLD_LOG_PROBS: log_q_V}
    signal = DenseLogits(TEACHER_V.repeat(V, 1))
    return gradient_of(spec.terms(torch.arange(V), {TEACHER: signal}, per_token), log_q_V.exp())


def exact_gradient(text: str, temperature: float = 1.0) -> Tensor:
    signals = {TEACHER: DenseLogits(TEACHER_V[None])}
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
    """No correction has an effect on tokens that the student itself has just drawn."""
    settings = {"temperature": temperature, "correction": Correction(correction)}  # type: ignore[arg-type]
    found_V = expected_gradient(text, **settings)
    assert distance(found_V, exact_gradient(DESCENDS[text], temperature)) < 1e-12
    other = {"reverse_kl": "forward_kl", "forward_kl": "reverse_kl"}[DESCENDS[text]]
    assert distance(found_V, exact_gradient(other, temperature)) > 0.1


@pytest.mark.parametrize("kind", ["truncated", "masked"])
@pytest.mark.parametrize("text", ["sampled_kl(k2)", "sampled_kl(k3)"])
def test_a_correction_without_a_limit_makes_other_draws_on_policy(text: str, kind: str) -> None:
    exact_V = exact_gradient(DESCENDS[text])
    unlimited = Correction(kind, math.inf)  # type: ignore[arg-type]
    assert distance(expected_gradient(text, drawn_from=OLD_V, correction=unlimited), exact_V) < 1e-12
    assert distance(expected_gradient(text, drawn_from=OLD_V), exact_V) > 0.1
    limited_V = expected_gradient(text, drawn_from=OLD_V, correction=Correction(kind, 1.5))  # type: ignore[arg-type]
    assert distance(limited_V, exact_V) > 0.01


def test_the_temperature_of_the_draws_may_differ_from_the_terms() -> None:
    """Tokens drawn at 0.6, a term at 1: the weight is a ratio at 0.6, and the expectation is over the student's."""
    temperature, log_q_V = 0.6, torch.log_softmax(STUDENT_V / 0.6, 0)
    log_old_V = torch.log_softmax(OLD_V / temperature, 0)
    spec = replace(
        parse_objective("sampled_kl"),
        sampling_temperature=temperature,
        correction=Correction("truncated", math.inf),
    )
    signal, ones_V = DenseLogits(TEACHER_V.repeat(V, 1)), torch.ones(V, dtype=torch.float64)

    def expectation(drawn_V: Tensor) -> Tensor:
        per_token = {IS_SAMPLED: ones_V, OLD_LOG_PROBS: drawn_V}
        return gradient_of(spec.terms(torch.arange(V), {TEACHER: signal}, per_token), drawn_V.exp())

    assert distance(expectation(log_old_V), expectation(log_q_V)) < 1e-12


def sparse(kind: str, log_p_V: Tensor, log_q_V: Tensor, rows: int) -> Signal:
    ids_K = (log_q_V if kind == "chosen" else log_p_V).topk(3).indices
    signal = Chosen if kind == "chosen" else TopK
    return signal(ids_K.repeat(rows, 1), log_p_V[ids_K].repeat(rows, 1))


@pytest.mark.parametrize("kind", ["top-k", "chosen"])
def test_a_top_k_kl_is_a_loss_and_no_advantage(kind: str) -> None:
    """A state's KL does not depend on the token that is drawn there.

    As a detached advantage it multiplies every token's score alike, and the expected score is 0; the differentiable
    divergence of the same ids has a gradient.
    """
    log_p_V, log_q_V = TEACHER_V.log_softmax(0), STUDENT_V.log_softmax(0)
    term = Distill(sparse(kind, log_p_V, log_q_V, V), reverse_kl())
    kl_V = logits_objective(STUDENT_V.repeat(V, 1), [term]).per_token["reverse_kl"]
    assert kl_V[0] > 0.01
    q_V = log_q_V.exp()
    for surrogate in ("corrected", "clip"):
        policy = PolicyGradient(torch.arange(V), -kl_V, log_q_V, surrogate=surrogate)  # type: ignore[arg-type]
        assert gradient_of([policy], q_V).norm() < 1e-15
    differentiable_V = gradient_of([Distill(sparse(kind, log_p_V, log_q_V, 1), reverse_kl())])
    assert differentiable_V.norm() > 0.05
    # on the rows of all draws, weighted by their probability, it is the same
    assert distance(gradient_of([term], q_V), differentiable_V) < 1e-12


@pytest.mark.parametrize("text", ["reverse_kl", "jsd(0.3) + 0.1*forward_kl"])
def test_a_divergence_needs_no_correction(text: str) -> None:
    """Its gradient at a state is the same to the last bit, whatever token was drawn there and from what."""
    spec = replace(parse_objective(text), correction=Correction("masked", 1.1))
    signal = DenseLogits(TEACHER_V.repeat(V, 1))
    gradients = []
    for labels_V, old_V in ((torch.arange(V), STUDENT_V), (torch.arange(V).flip(0), OLD_V)):
        per_token = {IS_SAMPLED: torch.ones(V, dtype=torch.float64), OLD_LOG_PROBS: old_V.log_softmax(0)}
        logits_VV = STUDENT_V.repeat(V, 1).requires_grad_()
        loss = logits_objective(logits_VV, spec.terms(labels_V, {TEACHER: signal}, per_token)).loss
        gradients += torch.autograd.grad(loss, logits_VV)
    assert torch.equal(*gradients)


def test_discounted_advantages_are_minillms() -> None:
    """Over all sequences of two tokens, γ = 1 gives the gradient of the sequences' reverse KL.

    The second token's distributions depend on the first token. The gradient is that of all logits at once.
    """
    student, teacher = torch.randn(2, V + 1, V, generator=generator(81), dtype=torch.float64)
    first, second = torch.arange(V).repeat_interleave(V), torch.arange(V).repeat(V)
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
    document = torch.arange(V * V).repeat_interleave(2)
    for discount, is_exact in ((1.0, True), (0.0, False)):
        spec = replace(parse_objective("policy_gradient(teacher_kl=1)"), discount=discount)
        signals = {TEACHER: DenseLogits(teacher[rows])}
        terms = spec.terms(labels, signals, per_token, document_T=document)
        leaf = student.clone().requires_grad_()
        logits_objective(leaf[rows], terms, weights_T=weights).loss.backward()
        error = distance(leaf.grad, exact)  # type: ignore[arg-type]
        assert error < 1e-12 if is_exact else error > 0.05
