"""The terms for a teacher with another tokenizer, against plain autograd in float64.

T tokens, V vocabulary.
"""

import pytest
import torch
from kit.objective_cases import TAILS, T, assert_accurate, distance, make_labels, make_leaves, make_spans, run

from stillhouse.objective import TEACHER, Continuation, CrossEntropy, SpanSignal, Term, linear_objective
from stillhouse.objective.spec import parse_objective


def terms_of(loss: str, signal: SpanSignal, temperature: float = 1.0, squared: bool = False) -> list[Term]:
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
