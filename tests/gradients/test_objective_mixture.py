"""Mixtures of teachers: what the matrix of test_objective.py does not show of them.

There, a mixture is one of the signals and is compared with the reference in float64. Here, the reference's mixture is
compared with the mean of probabilities, written out. T tokens, V vocabulary. p is the mixture's probability.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from kit.objective_cases import (
    F_DIVERGENCES,
    T,
    V,
    assert_accurate,
    assert_same,
    distance,
    generator,
    make_full,
    make_leaves,
    make_mixture,
    make_signal,
    run,
    some_weights,
)
from torch import Tensor

from stillhouse.objective import (
    DenseLogits,
    Distill,
    FullVocab,
    Mixture,
    OutputHead,
    forward_kl,
    jsd,
    linear_objective,
    logits_objective,
    parse_divergence,
)
from stillhouse.objective.reference import _teacher_log_probs


def probabilities(mixture: Mixture) -> Tensor:
    total_TV = torch.zeros(T, V, dtype=torch.float64)
    for signal, weight in zip(mixture.signals, mixture.weights, strict=True):
        if isinstance(signal, FullVocab):
            head = OutputHead(signal.head.weight_VD.double(), signal.head.bias, softcap=signal.head.softcap)
            logits_TV = head.logits(signal.hidden_TE.double())[:, :V]
        else:
            assert isinstance(signal, DenseLogits)
            logits_TV = signal.logits_TV.double()
        total_TV += weight / sum(mixture.weights) * torch.softmax(logits_TV / mixture.temperature, 1)
    return total_TV


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_references_mixture_is_the_mean_of_probabilities(temperature: float) -> None:
    """The second teacher's head has five more rows than the student's."""
    mixture = make_mixture(temperature=temperature)
    log_p_TV = _teacher_log_probs(mixture, temperature, V, torch.float64)
    torch.testing.assert_close(log_p_TV.exp(), probabilities(mixture), rtol=1e-12, atol=0)


def masked_mixture(temperature: float = 1.0) -> Mixture:
    """Every fifth token has no probability for both teachers, others have none for one of them."""
    random, columns_V = generator(3), torch.arange(V)
    first_TV, second_TV = (torch.randn(T, V, generator=random, dtype=torch.float64) * 3 for _ in range(2))
    first_TV = first_TV.masked_fill((columns_V % 5 == 0) | (columns_V % 7 == 1), -math.inf)
    second_TV = second_TV.masked_fill((columns_V % 5 == 0) | (columns_V % 3 == 2), -math.inf)
    return Mixture([DenseLogits(first_TV.float()), DenseLogits(second_TV.float())], [0.2, 0.8], temperature)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    "expression",
    [expression for expression in F_DIVERGENCES if expression not in ("reverse_kl", "skew_reverse_kl(0)")],
)
def test_tokens_without_probability(expression: str, temperature: float) -> None:
    term = Distill(masked_mixture(temperature), parse_divergence(expression), 0.7, temperature)
    assert_accurate(make_leaves(dtype=torch.float32), [term], weights_T=some_weights(), normalizer=23.0)


def test_a_token_without_probability_makes_reverse_kl_infinite() -> None:
    output = run(linear_objective, make_leaves(), [Distill(masked_mixture(), parse_divergence("reverse_kl"))]).output
    assert output.loss == math.inf
    assert (output.per_token["reverse_kl"] == math.inf).all()


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_large_logits_keep_their_last_digits(offset: float) -> None:
    """Two teachers far from zero: a log-sum-exp of their logits, rounded to float32, would be wrong by up to 5e-4."""
    random = generator(0)
    student, first, second = (torch.randn(T, V, generator=random) * 3 for _ in range(3))
    mixture = Mixture([DenseLogits(first + offset), DenseLogits(second - offset)], [1.0, 2.0])
    value_T = logits_objective(student, [Distill(mixture, jsd(0.5))]).per_token["jsd(0.5)"]
    exact = Distill(DenseLogits(probabilities(mixture).log()), jsd(0.5))
    assert distance(value_T, logits_objective(student.double(), [exact]).per_token["jsd(0.5)"]) < 1e-6


def test_a_student_close_to_a_sure_mixture() -> None:
    """One token has nearly all probability on both sides; the divergence keeps its digits in float32."""
    random = generator(0)
    first, second = (torch.randn(T, V, generator=random) for _ in range(2))
    first[:, 3], second[:, 3] = 17.0, 16.0
    mixture = Mixture([DenseLogits(first), DenseLogits(second)], [0.4, 0.6])
    p_TV = probabilities(mixture)
    assert (p_TV[:, 3] > 0.9999).all()
    student = (p_TV.log() + 0.1 * torch.randn(T, V, generator=random)).float().requires_grad_()
    exact = student.detach().double().requires_grad_()
    log_q_TV = torch.log_softmax(exact, 1)
    value_T = (torch.xlogy(p_TV, p_TV) - p_TV * log_q_TV + log_q_TV.exp() - p_TV).sum(1)
    output = logits_objective(student, [Distill(mixture, forward_kl())])
    (gradient_TV,) = torch.autograd.grad(output.loss, student)
    (expected_TV,) = torch.autograd.grad(value_T.sum(), exact)
    assert distance(output.per_token["forward_kl"], value_T) < 1e-4
    assert distance(gradient_TV, expected_TV) < 1e-4


def test_statistics_are_those_of_the_mixture() -> None:
    mixture, leaves = make_mixture(temperature=2.0), make_leaves()
    metrics = run(linear_objective, leaves, [Distill(mixture, forward_kl(), temperature=2.0)]).output.metrics
    p_TV = probabilities(mixture)
    argmax_T = OutputHead(leaves.weight, leaves.bias).logits(leaves.hidden).argmax(1)
    assert metrics["teacher_entropy"].item() == pytest.approx(-torch.xlogy(p_TV, p_TV).sum().item(), rel=1e-12)
    assert metrics["agreement"].item() == (p_TV.argmax(1) == argmax_T).sum()


@pytest.mark.parametrize("weights", [(2e-9, 6e-9), (1.5e308, 1e308), (1, 3)], ids=str)
def test_weights_are_normalized(weights: Sequence[float]) -> None:
    shares = torch.tensor(make_mixture(weights=weights).log_weights, dtype=torch.float64).exp()
    expected = torch.tensor([weight / max(weights) for weight in weights], dtype=torch.float64)
    torch.testing.assert_close(shares, expected / expected.sum(), rtol=1e-13, atol=0)


def test_a_tiny_weight() -> None:
    """The quotient of the weights is not a float, but its logarithm is."""
    signal = make_full()
    mixture = Mixture([signal, make_signal("dense")], [1e300, 1e-300])
    mixed, expected = (run(linear_objective, make_leaves(), [Distill(s, forward_kl())]) for s in (mixture, signal))
    assert_same(mixed, expected)
    assert mixed.output.metrics.keys() == expected.output.metrics.keys()


def test_mixtures_that_share_a_member() -> None:
    """A term has this member for itself, too."""
    full = make_full()
    terms = [
        Distill(Mixture([full, make_signal("dense")], [1, 2], 1.5), jsd(0.3), 0.7, 1.5),
        Distill(Mixture([make_signal("dense"), full], [1, 1]), forward_kl(), 0.5),
        Distill(full, forward_kl(), 0.4, 1.5),
    ]
    assert_accurate(make_leaves(), terms, weights_T=some_weights(), normalizer=19.0)
