"""Several teachers: mixtures of their distributions, and different terms for different rows.

In test_objective.py, a mixture is one of the signals and is compared with the reference in float64. Here, the
reference's mixture is compared with the mean of probabilities, written out. Different terms for different rows are
the sum of separate passes, with one set of gradients. T tokens, V vocabulary. p is the mixture's probability.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from kit.objective_cases import (
    F_DIVERGENCES,
    D,
    T,
    V,
    assert_accurate,
    assert_same,
    distance,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_mixture,
    make_signal,
    run,
    some_weights,
    sums,
)
from torch import Tensor

from stillhouse.engine.loss import StepLoss
from stillhouse.models.processors import DistillTargets
from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Distill,
    FullVocab,
    Mixture,
    OutputHead,
    Term,
    TopK,
    forward_kl,
    jsd,
    linear_objective,
    logits_objective,
    parse_divergence,
    reverse_kl,
    routed_objective,
)
from stillhouse.objective.reference import _teacher_log_probs
from stillhouse.objective.spec import TeacherShare, parse_objective
from stillhouse.objective.tile import logits_provider


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


LABELS = make_labels().clamp(min=0)


def other_teacher() -> FullVocab:
    leaves = make_leaves(width=31, bias=False, seed=9)
    return FullVocab(leaves.hidden, OutputHead(leaves.weight))


def groups() -> list[tuple[Tensor, Sequence[Term]]]:
    """Three kinds of terms; the rows 0, 9, 18, … have none."""
    ids_TK = torch.stack([torch.randperm(V, generator=generator(5))[:7] for _ in range(T)])
    top = TopK(ids_TK, torch.full((T, 7), -3.0, dtype=torch.float64))
    rows = [torch.tensor([row for row in range(T) if row % 9 in chosen]) for chosen in ((1, 2), (3, 4, 5), (6, 7, 8))]
    return [
        (rows[0], [CrossEntropy(LABELS, 0.3), Distill(make_full(), jsd(0.5), 0.7, 2.0)]),
        (rows[1], [CrossEntropy(LABELS, 0.3), Distill(other_teacher(), reverse_kl(), 0.5)]),
        (rows[2], [Distill(top, forward_kl(), 2.0)]),
    ]


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_the_sum_of_separate_passes(chunk_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups share one weight gradient, because it is as large as the head."""
    gradients_made: list[int] = []
    zero_gradient = logits_provider.zero_gradient
    options = {"weights_T": some_weights(), "normalizer": 5.0, "chunk_tokens": chunk_tokens}
    separate = [run(linear_objective, make_leaves(), terms, valid_index=rows, **options) for rows, terms in groups()]
    monkeypatch.setattr(
        logits_provider, "zero_gradient", lambda *args: gradients_made.append(1) or zero_gradient(*args)
    )
    together = run(routed_objective, make_leaves(), groups(), **options)  # type: ignore[arg-type]
    assert len(gradients_made) == 3  # one for each leaf
    for name, gradient in together.gradients.items():
        expected = torch.stack([result.gradients[name] for result in separate]).sum(0)
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)
    assert not together.gradients["hidden"][::9].any()
    outputs = [result.output for result in separate]
    for numbers, parts in (
        (sums(together.output), [sums(output) for output in outputs]),
        (together.output.per_token, [output.per_token for output in outputs]),
    ):
        assert numbers.keys() == {name for part in parts for name in part}
        for name, value in numbers.items():
            expected = torch.stack([part[name] for part in parts if name in part]).sum(0)
            torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)


def test_an_empty_group_gives_an_exact_zero_and_no_group_is_refused() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    result = run(routed_objective, make_leaves(), [(empty, [CrossEntropy(LABELS)])])  # type: ignore[list-item]
    assert result.output.loss == 0
    assert not any(gradient.any() for gradient in result.gradients.values())
    with pytest.raises(ValueError, match="no group of rows: expected at least one"):
        run(routed_objective, make_leaves(), [])


def test_signals_of_several_teachers_are_for_the_same_tokens() -> None:
    shares = {"one": TeacherShare(), "other": TeacherShare()}
    processor = StepLoss(replace(parse_objective("forward_kl"), teachers=shares))
    hidden_1TD, head = torch.zeros(1, T, D, dtype=torch.float64), OutputHead(make_leaves().weight)
    for signals, message in (
        ({"one": make_full(), "other": make_full(3)}, "has 3 tokens, the student 37"),
        ({}, "signal is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            processor(hidden_states=hidden_1TD, head=head, context=DistillTargets(LABELS, signals=signals))
