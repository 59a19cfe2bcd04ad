"""Terms at sampled tokens and log-probabilities, against plain autograd and in expectation over the vocabulary.

T tokens, V vocabulary.
"""

import math
from typing import Any

import pytest
import torch
from kit.largest import Largest
from kit.objective_cases import D, Leaves, T, V, assert_same, distance, generator, make_labels, make_leaves, run
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Distill,
    Divergence,
    OutputHead,
    PolicyGradient,
    SampledKL,
    Term,
    forward_kl,
    linear_log_probs,
    linear_objective,
    logits_objective,
    reverse_kl,
)
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.tile import chunks

SMALL = 7


def sampled_log_probs(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return log-probabilities of about −log V, and NaN where there is no label, because these must not be read."""
    made_T = torch.randn(T, generator=generator(seed), dtype=torch.float64).to(dtype) - math.log(V)
    return made_T.masked_fill(make_labels() < 0, math.nan)


TERMS: dict[str, dict[str, Any]] = {
    "k2": {"kind": SampledKL, "estimator": "k2"},
    "k3": {"kind": SampledKL, "estimator": "k3", "temperature": 1.7, "scale": 0.3},
    "ppo": {"kind": PolicyGradient},
    "narrow": {"kind": PolicyGradient, "clip_low": 0.0, "clip_high": 0.0, "scale": 2.0},
    "grpo": {"kind": PolicyGradient, "clip_high": 0.28, "kl_scale": 0.04, "temperature": 0.8, "reference": True},
}


def term_of(case: str, dtype: torch.dtype = torch.float64) -> Term:
    options = dict(TERMS[case])
    kind, reference = options.pop("kind"), options.pop("reference", False)
    if kind is SampledKL:
        return SampledKL(make_labels(), sampled_log_probs(31, dtype), **options)
    advantages_T = torch.randn(T, generator=generator(33), dtype=torch.float64).to(dtype)
    given = {"reference_log_probs_T": sampled_log_probs(34, dtype)} if reference else {}
    return PolicyGradient(make_labels(), advantages_T, sampled_log_probs(32, dtype), **given, **options)


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("case", TERMS)
def test_as_in_plain_autograd(case: str, chunk_tokens: int | None) -> None:
    weights_T = torch.rand(T, generator=generator(35), dtype=torch.float64)
    weights_T[3::7] = 0
    terms = [CrossEntropy(make_labels(), 0.2), term_of(case)]
    options = {"weights_T": weights_T, "normalizer": 3.0}
    found = run(linear_objective, make_leaves(), terms, chunk_tokens=chunk_tokens, **options)
    assert_same(found, run(dense_objective, make_leaves(), terms, **options))


def test_ratio_and_clipping_are_reported() -> None:
    """Half of the sampled tokens had a much larger old probability, and half had a much smaller one. All advantages
    are 1.
    """
    leaves, labels_T = make_leaves(), make_labels()
    with torch.no_grad():
        log_q_T, _ = linear_log_probs(leaves.hidden, OutputHead(leaves.weight, leaves.bias), labels_T)
    old_T = log_q_T + torch.where(torch.arange(T) % 2 == 0, 1.0, -1.0)
    output = run(linear_objective, leaves, [PolicyGradient(labels_T, torch.ones(T), old_T)]).output
    has_label_T = labels_T >= 0
    assert output.metrics["clipped"] == (has_label_T & (torch.arange(T) % 2 == 1)).sum()
    torch.testing.assert_close(output.metrics["ratio"], (log_q_T - old_T).exp()[has_label_T].sum())
    assert "reference_kl" not in output.metrics


def expected_gradient(student_V: Tensor, term: Any) -> Tensor:
    """Sum a term's gradients at each of the V tokens, weighted by the student's probability of sampling the token."""
    logits_VV = student_V.repeat(len(student_V), 1).requires_grad_()
    loss = logits_objective(logits_VV, [term(torch.arange(SMALL))], weights_T=student_V.softmax(0)).loss
    (gradient_VV,) = torch.autograd.grad(loss, logits_VV)
    return gradient_VV.sum(0)


def gradient_of(divergence: Divergence, teacher_V: Tensor, student_V: Tensor) -> Tensor:
    logits_1V = student_V[None].clone().requires_grad_()
    logits_objective(logits_1V, [Distill(DenseLogits(teacher_V[None]), divergence)]).loss.backward()
    assert logits_1V.grad is not None
    return logits_1V.grad[0]


@pytest.mark.parametrize("divergence", [reverse_kl(), forward_kl()], ids=str)
def test_the_expected_on_policy_gradient_is_the_named_divergences(divergence: Divergence) -> None:
    """k2 descends reverse KL and k3 forward KL. The expectation enumerates the vocabulary, and the two differ."""
    teacher_V, student_V = torch.randn(2, SMALL, generator=generator(36), dtype=torch.float64)
    log_p_V = teacher_V.log_softmax(0)
    for estimator in ("k2", "k3"):
        term = SampledKL(torch.arange(SMALL), log_p_V, estimator)  # type: ignore[arg-type]
        found_V = expected_gradient(student_V, lambda ids, e=estimator: SampledKL(ids, log_p_V, e))
        error = distance(found_V, gradient_of(divergence, teacher_V, student_V))
        assert error < 1e-12 if term.descends == str(divergence) else error > 0.1


def test_k1_is_an_advantage_and_no_loss() -> None:
    """As a loss, k1 has an expected gradient of 0; as an advantage, it descends reverse KL."""
    teacher_V, student_V = torch.randn(2, SMALL, generator=generator(37), dtype=torch.float64)
    log_p_V, log_q_V = teacher_V.log_softmax(0), student_V.log_softmax(0)
    assert float(expected_gradient(student_V, lambda ids: CrossEntropy(ids)).norm()) < 1e-15
    found_V = expected_gradient(student_V, lambda ids: PolicyGradient(ids, log_p_V - log_q_V, log_q_V))
    assert distance(found_V, gradient_of(reverse_kl(), teacher_V, student_V)) < 1e-12
    with pytest.raises(ValueError, match="estimator='k1' as a loss: the expected on-policy gradient"):
        SampledKL(make_labels(), torch.zeros(T), "k1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SampledKL(make_labels(), torch.zeros(T), "k4"), "estimator='k4': expected 'k2'"),  # type: ignore[arg-type]
        (lambda: SampledKL(make_labels(), torch.zeros(T + 1)), f"teacher_log_probs_T of shape ({T + 1},)"),
        (lambda: SampledKL(make_labels(), torch.zeros(T, requires_grad=True)), "requires grad: expected a constant"),
        (lambda: SampledKL(make_labels(), torch.full((T,), -math.inf)), "holds -inf at a drawn token"),
        (lambda: PolicyGradient(make_labels(), torch.zeros(T, dtype=torch.int64), torch.zeros(T)), "advantages_T of"),
        (lambda: PolicyGradient(make_labels(), torch.zeros(T), torch.zeros(T), clip_low=1.5), "clip_low=1.5"),
        (
            lambda: PolicyGradient(make_labels(), torch.zeros(T), torch.zeros(T), kl_scale=0.1),
            "without reference_log",
        ),
        (lambda: linear_log_probs(torch.zeros(T, D), OutputHead(torch.zeros(V, D)), torch.zeros(T)), "labels_T of"),
    ],
    ids=["estimator", "shape", "grad", "infinite", "dtype", "clip", "reference", "labels"],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make()


# log-probabilities


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped": {"scale": 0.7, "softcap": 2.0},
    "padded": {"vocab_size": 240},
}


def plain_log_probs(
    leaves: Leaves, labels_T: Tensor, temperature: float, head: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    options = dict(head)
    rows = options.pop("vocab_size", V)
    logits_TV = OutputHead(leaves.weight, leaves.bias, **options).logits(leaves.hidden)[:, :rows]
    log_q_TV = torch.log_softmax(logits_TV / temperature, 1)
    log_q_T = log_q_TV.gather(1, labels_T.clamp_min(0)[:, None])[:, 0].masked_fill(labels_T < 0, 0.0)
    return log_q_T, -(log_q_TV.exp() * log_q_TV).sum(1)


def sequence_objective(log_q_T: Tensor, entropy_T: Tensor) -> Tensor:
    """Compute an objective that is not a sum over tokens."""
    return (
        (log_q_T[:20].sum() / 20).exp() - (log_q_T[20:].mean() * entropy_T.sum()).tanh() + entropy_T.square().mean()
    )


def of_leaves(make: Any, leaves: Leaves) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    fresh = {name: leaf.clone().requires_grad_() for name, leaf in vars(leaves).items() if leaf is not None}
    log_q_T, entropy_T = make(Leaves(fresh["hidden"], fresh["weight"], fresh.get("bias")))
    sequence_objective(log_q_T, entropy_T).backward()
    return log_q_T, entropy_T, {name: leaf.grad for name, leaf in fresh.items()}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_logits(head: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks.TILE_ROWS, "cpu", (1, 10))
    options, labels_T = HEADS[head], make_labels(vocabulary=240)
    expected = of_leaves(lambda each: plain_log_probs(each, labels_T, temperature, options), make_leaves())
    found = of_leaves(
        lambda each: linear_log_probs(
            each.hidden, OutputHead(each.weight, each.bias, **options), labels_T, temperature=temperature
        ),
        make_leaves(),
    )
    assert distance(found[0], expected[0]) < 1e-12
    assert distance(found[1], expected[1]) < 1e-12
    for name, gradient in expected[2].items():
        assert distance(found[2][name], gradient) < 1e-12, name


@pytest.mark.parametrize("autocast", [False, True])
def test_log_probs_in_bfloat16_are_as_exact_as_plain_ones(autocast: bool) -> None:
    """The reference is float64 on the same numbers. Backward computes in the dtype of forward."""
    dtype = torch.float32 if autocast else torch.bfloat16
    leaves, labels_T = make_leaves(dtype=dtype, bias=False), make_labels()
    exact = of_leaves(
        lambda each: plain_log_probs(each, labels_T, 1.0, {}),
        Leaves(leaves.hidden.double(), leaves.weight.double(), None),
    )

    def called(make: Any) -> Any:
        def inside(each: Leaves) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return make(each)

        return inside

    plain = of_leaves(called(lambda each: plain_log_probs(each, labels_T, 1.0, {})), leaves)
    found = of_leaves(called(lambda each: linear_log_probs(each.hidden, OutputHead(each.weight), labels_T)), leaves)
    assert found[0].dtype == torch.float32
    for name, gradient in exact[2].items():
        assert found[2][name].dtype == dtype
        assert distance(found[2][name], gradient) <= distance(plain[2][name], gradient) + 1e-3, name


def test_no_logits_of_all_tokens_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks.TILE_ROWS, "cpu", (1, 64))
    tokens, vocabulary = 640, 1021
    leaves, labels_T = make_leaves(tokens, vocabulary, dtype=torch.float32), make_labels(tokens, vocabulary)
    with Largest() as largest:
        of_leaves(lambda each: linear_log_probs(each.hidden, OutputHead(each.weight, each.bias), labels_T), leaves)
    assert largest.numbers <= 64 * vocabulary


def test_only_the_gradients_that_are_asked_for() -> None:
    leaves, labels_T = make_leaves(), make_labels()
    hidden_TD = leaves.hidden.clone().requires_grad_()
    log_q_T, entropy_T = linear_log_probs(hidden_TD, OutputHead(leaves.weight, leaves.bias), labels_T)
    log_q_T.sum().backward()
    assert hidden_TD.grad is not None
    assert not linear_log_probs(leaves.hidden, OutputHead(leaves.weight, leaves.bias), labels_T)[0].requires_grad
    assert entropy_T.requires_grad
