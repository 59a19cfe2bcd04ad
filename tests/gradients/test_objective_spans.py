"""The terms for a teacher with another tokenizer, against plain autograd in float64: spans, and sorted probabilities.

T tokens, V vocabulary, K ids per token.
"""

import math

import pytest
import torch
from kit.objective_cases import (
    TAILS,
    T,
    V,
    assert_accurate,
    distance,
    make_labels,
    make_leaves,
    make_sorted,
    make_spans,
    run,
)
from torch import Tensor

from stillhouse.objective import (
    TEACHER,
    Continuation,
    CrossEntropy,
    SortedL1,
    SortedTopK,
    SpanSignal,
    Term,
    linear_objective,
    logits_objective,
)
from stillhouse.objective.spec import parse_objective

K = 8


def terms_of(
    loss: str, signal: SpanSignal | SortedTopK, temperature: float = 1.0, squared: bool = False
) -> list[Term]:
    return parse_objective(loss, temperature, squared).terms(make_labels(), {TEACHER: signal})


@pytest.mark.parametrize("tail", TAILS)
def test_spans_against_plain_autograd(tail: str) -> None:
    """Every divergence on a signal's first rows is in the matrix of test_objective.py."""
    terms = terms_of("0.3*cross_entropy + 0.9*forward_kl + 0.1*jsd(0.3)", make_spans(tail))
    assert_accurate(make_leaves(), terms, weights_T=(torch.arange(T) % 5).double(), normalizer=11.0)


@pytest.mark.parametrize("squared", [False, True])
def test_spans_by_their_formula(squared: bool) -> None:
    """Forward KL at first rows, and the cross-entropy at the temperature at later rows, without the engine."""
    tau, signal, labels_T = 1.7, make_spans(temperature=1.7), make_labels()
    terms = terms_of("2*forward_kl", signal, tau, squared)
    leaves = make_leaves()
    actual = run(linear_objective, leaves, terms)
    hidden_TD, weight_VD = leaves.hidden.clone().requires_grad_(), leaves.weight
    log_q_TV = torch.log_softmax((hidden_TD @ weight_VD.T + leaves.bias) / tau, 1)
    total = log_q_TV.new_zeros(())
    for row in range(T):
        if signal.first_weights_T[row]:
            ids, log_p = signal.first.ids_TK[row], signal.first.log_probs_TK[row]
            ids, log_p = ids[ids >= 0], log_p[ids >= 0]
            log_q_tail = torch.log(1 - log_q_TV[row, ids].exp().sum())
            log_p_tail = signal.first.tail_log_prob_T[row]  # type: ignore[index]
            total = total + (log_p.exp() * (log_p - log_q_TV[row, ids])).sum()
            total = total + log_p_tail.exp() * (log_p_tail - log_q_tail)
        if labels_T[row] >= 0:
            total = total - signal.continuation_weights_T[row] * log_q_TV[row, labels_T[row]]
    total = 2 * total * (tau**2 if squared else 1)
    total.backward()
    assert distance(actual.output.loss, total) < 1e-12
    assert distance(actual.gradients["hidden"], hidden_TD.grad) < 1e-11


def test_names_and_scales() -> None:
    """A sum of divergences has the sum of its coefficients at later rows."""
    (_, continuation) = terms_of("0.9*forward_kl + 0.3*reverse_kl", make_spans())
    assert isinstance(continuation, Continuation)
    assert continuation.scale == pytest.approx(1.2)
    terms = terms_of("0.3*cross_entropy + 0.7*jsd(0.5)", make_spans())
    output = run(linear_objective, make_leaves(), terms).output
    assert [term.name for term in terms] == ["cross_entropy", "jsd(0.5)", "continuation"]
    assert {"cross_entropy", "jsd(0.5)", "continuation", "student_entropy"} <= output.metrics.keys()
    alone = run(linear_objective, make_leaves(), [CrossEntropy(make_labels())]).output
    torch.testing.assert_close(output.metrics["cross_entropy"], alone.metrics["cross_entropy"])


def plain_uld(log_p_TV: Tensor, logits_TV: Tensor, tau: float) -> Tensor:
    """Σ_i |p_(i) − q_(i)| over all ranks, the shorter side padded with zeros, [T]."""
    q_TV = torch.softmax(logits_TV / tau, 1).sort(1, descending=True).values
    p_TV = log_p_TV.exp().sort(1, descending=True).values
    size = max(q_TV.shape[1], p_TV.shape[1])
    p_TV, q_TV = (torch.nn.functional.pad(probs_TV, (0, size - probs_TV.shape[1])) for probs_TV in (p_TV, q_TV))
    return (p_TV - q_TV).abs().sum(1)


@pytest.mark.parametrize("tau", [1.0, 1.7])
@pytest.mark.parametrize("rows", [V, V - 40, V + 40])
def test_sorted_probabilities_of_all_ranks_are_uld(rows: int, tau: float) -> None:
    """K = V of the teacher, whose vocabulary is as large as the student's, smaller, or larger."""
    random = torch.Generator().manual_seed(2)
    log_p_TV = torch.log_softmax(2 * torch.randn(T, rows, generator=random, dtype=torch.float64), 1)
    logits_TV = torch.randn(T, V, generator=random, dtype=torch.float64).requires_grad_()
    signal = make_sorted(log_p_TV, rows)
    actual = logits_objective(logits_TV, terms_of("2*uld", signal, tau, True), normalizer=7.0)
    (gradient_TV,) = torch.autograd.grad(actual.loss, logits_TV)
    expected_T = tau**2 * plain_uld(log_p_TV, logits_TV, tau) * signal.weights_T
    (expected_TV,) = torch.autograd.grad(2 * expected_T.sum() / 7, logits_TV)
    assert distance(actual.loss, 2 * expected_T.sum() / 7) < 1e-12
    assert distance(gradient_TV, expected_TV) < 1e-12
    assert distance(actual.per_token["uld"], expected_T) < 1e-12


@pytest.mark.parametrize("ranks", [1, K, V - 1])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 30.0])
def test_fewer_ranks_against_plain_autograd(ranks: int, sharpness: float) -> None:
    """The other ranks are one more outcome; peaked rows, too. It is at most the distance over all ranks."""
    log_p_TV = torch.log_softmax(sharpness * torch.randn(T, V, dtype=torch.float64), 1)
    leaves, signal = make_leaves(sharpness=sharpness), make_sorted(log_p_TV, ranks)
    terms = [SortedL1(signal, 0.7, 1.3, weights_T=signal.weights_T), CrossEntropy(make_labels(), 0.2)]
    actual = assert_accurate(leaves, terms)
    logits_TV = leaves.hidden @ leaves.weight.T + leaves.bias  # type: ignore[operator]
    exact_T = plain_uld(log_p_TV, logits_TV, 1.3) * signal.weights_T
    assert (actual.output.per_token["uld"] <= exact_T + 1e-12).all()


def test_equal_sides_have_no_distance_whatever_their_ids_are() -> None:
    logits_TV = torch.randn(T, V, dtype=torch.float64)
    for ranks in (1, K, V):
        signal = make_sorted(torch.log_softmax(logits_TV, 1), ranks)
        actual = logits_objective(logits_TV[:, torch.randperm(V)], [SortedL1(signal)])
        assert float(actual.loss) < 1e-12


def test_ties_and_tokens_without_mass() -> None:
    """Equal logits: a permutation of them has the same value, and the gradient is the same where signs are equal."""
    logits_TV = torch.tensor([[1.0, 1.0, 1.0, -math.inf, 0.0, 0.0]], dtype=torch.float64)
    log_p_TV = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64).log()
    signal = SortedTopK(log_p_TV[:, :3], log_p_TV[:, 3:].logsumexp(1), torch.ones(1, dtype=torch.float64))
    leaf_TV = logits_TV.clone().requires_grad_()
    actual = logits_objective(leaf_TV, [SortedL1(signal)])
    (gradient_TV,) = torch.autograd.grad(actual.loss, leaf_TV)
    q_V = torch.softmax(logits_TV, 1)[0]
    top, low = float(q_V[0]), float(q_V[4])
    assert actual.loss.item() == pytest.approx(2 * (0.5 - top) + top + 2 * low)
    # the slopes are −1, −1, +1 and +1 for the tail; of the three equal tokens, any one may be the third
    slopes = sorted(float(slope) for slope in gradient_TV[0, :3])
    mean = -2 * top + top + 2 * low
    assert slopes == pytest.approx([top * (-1 - mean)] * 2 + [top * (1 - mean)])
    assert gradient_TV[0, 3:].tolist() == pytest.approx([0.0, low * (1 - mean), low * (1 - mean)])
