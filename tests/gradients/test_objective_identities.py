"""Identities for any teacher and any student, searched by Hypothesis, and the formula of the tail "zero"."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.objective_cases import (
    ALL_DIVERGENCES,
    DTYPES,
    F_DIVERGENCES,
    TAILS,
    T,
    V,
    assert_accurate,
    distance,
    generator,
    make_leaves,
    make_signal,
)
from torch import Tensor

from stillhouse.objective import (
    DenseLogits,
    Distill,
    Signal,
    Term,
    TopK,
    logits_objective,
    parse_divergence,
    reverse_kl,
)

#: the gradient of total variation is a sign, which rounding decides where both probabilities are equal
WITHOUT_SIGN = [expression for expression in ALL_DIVERGENCES if expression != "total_variation"]
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Pair:
    """Teacher and student logits [1, V] and some distinct ids [1, K]."""

    teacher: Tensor
    student: Tensor
    ids: Tensor

    def sparse(self, tail: str, *, every_id: bool = False) -> TopK:
        log_p_TV = torch.log_softmax(self.teacher, 1)
        ids = torch.argsort(self.student, 1) if every_id else self.ids
        outside_TV = log_p_TV.scatter(1, ids, -math.inf)
        send = tail == "bucket" and not every_id
        return TopK(
            ids,
            log_p_TV.gather(1, ids),
            tail=tail,  # type: ignore[arg-type]
            tail_log_prob_T=torch.logsumexp(outside_TV, 1) if send else None,
        )


@st.composite
def pairs(draw: st.DrawFn, bound: float = 30.0) -> Pair:
    vocabulary = draw(st.integers(2, 7))
    logits = st.lists(st.floats(-bound, bound, width=32), min_size=vocabulary, max_size=vocabulary)
    entries = draw(st.integers(1, vocabulary - 1))
    ids = draw(st.permutations(range(vocabulary)))[:entries]
    teacher, student = (torch.tensor([draw(logits)], dtype=torch.float64) for _ in range(2))
    return Pair(teacher, student, torch.tensor([ids]))


def of_all(student: Tensor, signal: Signal, expressions: list[str]) -> tuple[dict[str, float], Tensor]:
    """Return each divergence, and the gradient of their sum, in which each has another scale."""
    logits = student.clone().requires_grad_()
    terms = [Distill(signal, parse_divergence(text), 1 + at / 10) for at, text in enumerate(expressions)]
    output = logits_objective(logits, terms)
    (gradient,) = torch.autograd.grad(output.loss, logits)
    values = dict(zip(expressions, output.per_token.values(), strict=True))
    return {expression: value_T.item() for expression, value_T in values.items()}, gradient


@EXAMPLES
@given(pair=pairs())
def test_f_divergences_are_not_negative_and_the_bucket_is_a_lower_bound(pair: Pair) -> None:
    signals = (DenseLogits(pair.teacher), pair.sparse("bucket"), pair.sparse("renormalize"))
    full, bucket, renormalized = (of_all(pair.student, signal, F_DIVERGENCES)[0] for signal in signals)
    for expression in F_DIVERGENCES:
        assert min(full[expression], bucket[expression], renormalized[expression]) >= -1e-10, expression
        assert bucket[expression] <= full[expression] * (1 + 1e-9) + 1e-9, expression


@EXAMPLES
@given(pair=pairs())
def test_equal_distributions_have_no_divergence_and_no_gradient(pair: Pair) -> None:
    for signal, expressions in (
        (DenseLogits(pair.teacher), ALL_DIVERGENCES),
        (pair.sparse("bucket"), WITHOUT_SIGN),
        (pair.sparse("renormalize"), WITHOUT_SIGN),
    ):
        values, gradient = of_all(pair.teacher, signal, expressions)
        assert max(abs(value) for value in values.values()) < 1e-9
        assert gradient.abs().max() < 1e-9


@EXAMPLES
@given(pair=pairs(bound=8.0))
def test_all_ids_equal_the_dense_signal_whatever_the_tail(pair: Pair) -> None:
    log_ratio_TV = torch.log_softmax(pair.student, 1) - torch.log_softmax(pair.teacher, 1)
    expressions = WITHOUT_SIGN if (log_ratio_TV.abs() < 1e-9).any() else ALL_DIVERGENCES
    values, gradient = of_all(pair.student, DenseLogits(pair.teacher), expressions)
    for tail in TAILS:
        sparse_values, sparse_gradient = of_all(pair.student, pair.sparse(tail, every_id=True), expressions)
        assert sparse_values == pytest.approx(values, rel=1e-9, abs=1e-9)
        torch.testing.assert_close(sparse_gradient, gradient, rtol=1e-9, atol=1e-9)


def nemo(log_q_TV: Tensor, ids_TK: Tensor, log_p_TK: Tensor) -> Tensor:
    """NeMo RL's reverse KL with `zero_outside_topk`: the teacher conditioned on its ids, e^−100 outside of them."""
    log_p_TK, log_q_TK = torch.log_softmax(log_p_TK, 1), log_q_TV.gather(1, ids_TK)
    inside_T = (log_q_TK.exp() * (log_q_TK - log_p_TK)).sum(1)
    rest_T = (log_q_TV.exp() * log_q_TV).sum(1) - (log_q_TK.exp() * log_q_TK).sum(1)
    return inside_T + rest_T + 100 * (1 - log_q_TK.exp().sum(1))


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_zero_outside_the_ids_is_nemo_rls(temperature: float) -> None:
    log_p_TK, ids_TK = torch.randn(T, V, generator=generator(4), dtype=torch.float64).log_softmax(1).topk(9, dim=1)
    logits = torch.randn(T, V, generator=generator(5), dtype=torch.float64).requires_grad_()
    expected_T = nemo(torch.log_softmax(logits / temperature, 1), ids_TK, log_p_TK)
    (expected,) = torch.autograd.grad(expected_T.sum(), logits)
    output = logits_objective(
        logits, [Distill(TopK(ids_TK, log_p_TK, "zero"), reverse_kl(), temperature=temperature)]
    )
    (gradient,) = torch.autograd.grad(output.loss, logits)
    assert distance(output.per_token["reverse_kl"], expected_T) < 1e-12
    assert distance(gradient, expected) < 1e-12


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_zero_outside_with_absent_and_repeated_ids(dtype: str) -> None:
    """Some rows have absent ids, one row has no id and contributes 0, and one has an id twice."""
    signal = make_signal("zero", dtype=DTYPES[dtype], temperature=1.3)
    assert isinstance(signal, TopK)
    ids_TK = signal.ids_TK.clone()
    ids_TK[4] = -1
    ids_TK[5, 1] = ids_TK[5, 0]
    terms: list[Term] = [Distill(TopK(ids_TK, signal.log_probs_TK, "zero"), reverse_kl(), 0.7, 1.3)]
    result = assert_accurate(make_leaves(dtype=DTYPES[dtype]), terms)
    assert result.output.per_token["reverse_kl"][4] == 0
    assert (result.gradients["hidden"][4] == 0).all()
