"""Mixtures of teachers against float64 autograd over all logits, with the mean of probabilities written out.

T tokens, V vocabulary. p is the mixture's probability, q the student's, τ the temperature.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    Leaves,
    T,
    V,
    assert_same,
    distance,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_mixture,
    make_signal,
    run,
    sums,
)
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    FullVocab,
    Mixture,
    OutputHead,
    Signal,
    forward_kl,
    jsd,
    linear_objective,
    logits_objective,
    parse_divergence,
)
from stillhouse.objective.reference import dense_objective

Pointwise = Callable[[Tensor, Tensor, Tensor], Tensor]


def jensen_shannon(beta: float) -> Pointwise:
    def value(p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
        m = beta * p + (1 - beta) * q
        return beta * forward(p, q, m.log()) + (1 - beta) * q * (log_q - m.log())

    return value


def alpha_beta(alpha: float, beta: float) -> Pointwise:
    def value(p: Tensor, q: Tensor, _: Tensor) -> Tensor:
        both = alpha + beta
        return (alpha / both * p**both + beta / both * q**both - p**alpha * q**beta) / (alpha * beta)

    return value


def forward(p: Tensor, _: Tensor, log_q: Tensor) -> Tensor:
    return torch.xlogy(p, p) - p * log_q


def reverse(p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
    return q * (log_q - p.log())


#: f(p, q, log q) of each divergence, as in docs/objective.md
TEXTBOOK: dict[str, Pointwise] = {
    "forward_kl": forward,
    "reverse_kl": reverse,
    "jsd(0.3)": jensen_shannon(0.3),
    "skew_forward_kl(0.1)": lambda p, q, log_q: forward(p, q, (0.1 * p + 0.9 * q).log()),
    "skew_reverse_kl(0.1)": lambda p, q, log_q: q * (log_q - (0.9 * p + 0.1 * q).log()),
    "total_variation": lambda p, q, log_q: 0.5 * (p - q).abs(),
    "alpha_beta(0.2, 0.5)": alpha_beta(0.2, 0.5),
    "0.9*forward_kl + 0.1*reverse_kl": lambda *each: 0.9 * forward(*each) + 0.1 * reverse(*each),
}
#: the divergences that are finite where the teacher has no probability
FINITE = [each for each in TEXTBOOK if "reverse_kl" not in each or "skew" in each]


def logits_of(signal: Signal, vocabulary: int) -> Tensor:
    if isinstance(signal, DenseLogits):
        return signal.logits_TV.double()
    assert isinstance(signal, FullVocab)
    head = signal.head
    logits_TV = signal.hidden_TE.double() @ head.weight_VD.double().T
    logits_TV = (logits_TV if head.bias is None else logits_TV + head.bias.double()) * head.scale
    capped_TV = logits_TV if head.softcap is None else head.softcap * torch.tanh(logits_TV / head.softcap)
    return capped_TV[:, :vocabulary]


def probabilities(mixture: Mixture, vocabulary: int = V) -> Tensor:
    parts = [
        weight / sum(mixture.weights) * torch.softmax(logits_of(each, vocabulary) / mixture.temperature, 1)
        for each, weight in zip(mixture.signals, mixture.weights, strict=True)
    ]
    return sum(parts[1:], start=parts[0])


def oracle(
    leaves: Leaves, term: Distill, weights_T: Tensor, normalizer: float, vocabulary: int = V
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss, the value per token and the gradients of one term, all float64."""
    assert isinstance(term.signal, Mixture)
    exact = {name: leaf.double().requires_grad_() for name, leaf in vars(leaves).items() if leaf is not None}
    logits_TV = exact["hidden"] @ exact["weight"].T + exact.get("bias", 0.0)
    log_q_TV = torch.log_softmax(logits_TV[:, :vocabulary] / term.temperature, 1)
    p_TV = probabilities(term.signal, vocabulary)
    value_T = TEXTBOOK[str(term.divergence)](p_TV, log_q_TV.exp(), log_q_TV).sum(1)
    loss = term.scale * (weights_T.double() * value_T).sum() / normalizer
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in exact.items() if leaf.grad is not None}
    return loss.detach(), value_T.detach() * (weights_T != 0), gradients


def assert_no_worse_than_plain(leaves: Leaves, term: Distill, tiny: float = 5e-7, **head: Any) -> None:
    """Assert the rule of test_objective_precision: error ≤ 2 × error of plain autograd in the same dtype + tiny."""
    weights_T = torch.rand(T, generator=generator(8))
    weights_T[::4] = 0
    options: dict[str, Any] = {"head": head, "weights_T": weights_T, "normalizer": 23.0}
    vocabulary = min(V, head.get("vocab_size", V))
    loss, value_T, gradients = oracle(leaves, term, weights_T, 23.0, vocabulary)
    plain = run(dense_objective, leaves, [term], **options)
    fast = run(linear_objective, leaves, [term], chunk_tokens=9, **options)
    assert fast.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert fast.gradients[name].dtype == plain.gradients[name].dtype
        allowed = 2 * distance(plain.gradients[name], gradient) + tiny
        assert distance(fast.gradients[name], gradient) <= allowed, name
    name = term.name
    allowed = 2 * distance(plain.output.per_token[name], value_T) + tiny
    assert distance(fast.output.per_token[name], value_T) <= allowed
    # the loss is one number, which the plain path may hit by chance: so the allowed error is that of its tokens
    errors = (plain.output.per_token[name].double() - value_T).abs().sum() + tiny * value_T.sum()
    assert (fast.output.loss.double() - loss).abs() <= 2 * errors / 23.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("expression", TEXTBOOK)
def test_every_divergence(expression: str, temperature: float, dtype: torch.dtype) -> None:
    teacher = make_mixture(dtype=dtype, temperature=temperature)
    assert_no_worse_than_plain(
        make_leaves(dtype=dtype), Distill(teacher, parse_divergence(expression), 0.7, temperature)
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("expression", TEXTBOOK)
def test_every_divergence_in_float64(expression: str, temperature: float) -> None:
    teacher = make_mixture(temperature=temperature)
    term = Distill(teacher, parse_divergence(expression), 0.7, temperature)
    assert_no_worse_than_plain(make_leaves(), term, tiny=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("expression", TEXTBOOK)
def test_peaked_rows(expression: str, temperature: float) -> None:
    """Some tokens have a probability near 1, and others one that float32 cannot hold."""
    leaves = make_leaves(dtype=torch.float32, sharpness=40.0)
    teacher = make_mixture(dtype=torch.float32, sharpness=40.0, temperature=temperature)
    assert_no_worse_than_plain(leaves, Distill(teacher, parse_divergence(expression), 0.7, temperature))


def masked_mixture(temperature: float = 1.0, dtype: torch.dtype = torch.float32) -> Mixture:
    """Every fifth token has no probability for both teachers, others have none for one of them."""
    random = generator(3)
    first_TV, second_TV = (torch.randn(T, V, generator=random, dtype=torch.float64) * 3 for _ in range(2))
    columns_V = torch.arange(V)
    first_TV = first_TV.masked_fill((columns_V % 5 == 0) | (columns_V % 7 == 1), -math.inf)
    second_TV = second_TV.masked_fill((columns_V % 5 == 0) | (columns_V % 3 == 2), -math.inf)
    return Mixture([DenseLogits(first_TV.to(dtype)), DenseLogits(second_TV.to(dtype))], [0.2, 0.8], temperature)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("expression", FINITE)
def test_tokens_without_probability(expression: str, temperature: float) -> None:
    teacher = masked_mixture(temperature)
    term = Distill(teacher, parse_divergence(expression), 0.7, temperature)
    assert_no_worse_than_plain(make_leaves(dtype=torch.float32), term)


def test_a_token_without_probability_makes_reverse_kl_infinite() -> None:
    output = run(linear_objective, make_leaves(), [Distill(masked_mixture(), parse_divergence("reverse_kl"))]).output
    assert output.loss == math.inf
    assert (output.per_token["reverse_kl"] == math.inf).all()


@pytest.mark.parametrize("expression", ["forward_kl", "jsd(0.3)", "alpha_beta(0.2, 0.5)"])
def test_rows_beyond_the_vocabulary_get_nothing(expression: str) -> None:
    """The second teacher's head has five more rows than the first one's. The student's has padding, too."""
    term = Distill(make_mixture(weights=[1, 2]), parse_divergence(expression))
    assert_no_worse_than_plain(make_leaves(), term, tiny=1e-12, vocab_size=240)
    gradients = run(linear_objective, make_leaves(), [term], head={"vocab_size": 240}).gradients
    assert gradients["weight"][:240].any(1).all()
    assert not gradients["weight"][240:].any()
    wide = make_leaves(vocabulary=300)
    gradients = run(linear_objective, wide, [term]).gradients
    assert not gradients["weight"][V:].any()
    narrow = Leaves(wide.hidden, wide.weight[:V], None if wide.bias is None else wide.bias[:V])
    assert distance(gradients["hidden"], run(linear_objective, narrow, [term]).gradients["hidden"]) < 1e-12


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_large_logits_keep_their_last_digits(offset: float) -> None:
    """Two teachers far from zero: a log-sum-exp of their logits, rounded to float32, would be wrong by up to 5e-4."""
    random = generator(0)
    student, first, second = (torch.randn(T, V, generator=random) * 3 for _ in range(3))
    mixture = Mixture([DenseLogits(first + offset), DenseLogits(second - offset)], [1.0, 2.0])
    fast = logits_objective(student, [Distill(mixture, jsd(0.5))]).per_token["jsd(0.5)"]
    log_q_TV = torch.log_softmax(student.double(), 1)
    exact = jensen_shannon(0.5)(probabilities(mixture), log_q_TV.exp(), log_q_TV).sum(1)
    assert distance(fast, exact) < 1e-6


def test_a_student_close_to_a_sure_mixture() -> None:
    """One token has nearly all probability on both sides; the divergence keeps its digits in float32."""
    random = generator(0)
    first, second = (torch.randn(T, V, generator=random) for _ in range(2))
    first[:, 3], second[:, 3] = 17.0, 16.0
    mixture = Mixture([DenseLogits(first), DenseLogits(second)], [0.4, 0.6])
    p_TV = probabilities(mixture)
    assert (p_TV[:, 3] > 0.9999).all()
    student = (p_TV.log() + 0.1 * torch.randn(T, V, generator=random)).float()
    exact = student.double().requires_grad_()
    log_q_TV = torch.log_softmax(exact, 1)
    value_TV = torch.xlogy(p_TV, p_TV) - p_TV * log_q_TV + log_q_TV.exp() - p_TV
    value_TV.sum().backward()
    student.requires_grad_()
    output = logits_objective(student, [Distill(mixture, forward_kl())])
    output.loss.backward()
    assert student.grad is not None
    assert exact.grad is not None
    assert distance(output.per_token["forward_kl"], value_TV.sum(1)) < 1e-4
    assert distance(student.grad, exact.grad) < 1e-4


@pytest.mark.parametrize("kind", ["full", "dense"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_mixture_of_one_signal_is_that_signal(kind: str, temperature: float) -> None:
    signal = make_signal(kind)
    terms = [
        Distill(each, parse_divergence("0.9*forward_kl + 0.1*jsd(0.3)"), 0.7, temperature)
        for each in (signal, Mixture([signal], [0.3], temperature))
    ]
    expected, actual = (run(linear_objective, make_leaves(), [term], chunk_tokens=8) for term in terms)
    assert_same(actual, expected)
    assert actual.output.metrics.keys() == expected.output.metrics.keys()
    for name, total in sums(expected.output).items():
        torch.testing.assert_close(actual.output.metrics[name], total, rtol=1e-12, atol=1e-12)


def test_statistics_are_those_of_the_mixture() -> None:
    mixture = make_mixture(temperature=2.0)
    metrics = run(linear_objective, make_leaves(), [Distill(mixture, forward_kl(), temperature=2.0)]).output.metrics
    p_TV = probabilities(mixture)
    leaves = make_leaves()
    assert leaves.bias is not None
    likeliest_T = (leaves.hidden @ leaves.weight.T + leaves.bias).argmax(1)
    assert metrics["teacher_entropy"].item() == pytest.approx(-torch.xlogy(p_TV, p_TV).sum().item(), rel=1e-12)
    assert metrics["agreement"].item() == (p_TV.argmax(1) == likeliest_T).sum()


@pytest.mark.parametrize("weights", [(2e-9, 6e-9), (1.5e308, 1e308), (1, 3)], ids=str)
def test_weights_are_normalized(weights: Sequence[float]) -> None:
    shares = torch.tensor(make_mixture(weights=weights).log_weights, dtype=torch.float64).exp()
    largest = max(weights)
    expected = torch.tensor([each / largest for each in weights], dtype=torch.float64)
    torch.testing.assert_close(shares, expected / expected.sum(), rtol=1e-13, atol=0)


def test_a_tiny_weight() -> None:
    """The quotient of the weights is not a float, but its logarithm is."""
    signal = make_full()
    term = Distill(Mixture([signal, make_signal("dense")], [1e300, 1e-300]), forward_kl())
    assert_same(
        run(linear_objective, make_leaves(), [term]),
        run(linear_objective, make_leaves(), [Distill(signal, forward_kl())]),
    )


@pytest.mark.parametrize("chunk_tokens", [1, 7, 36, 37, None])
@pytest.mark.parametrize("valid_index", [False, True])
def test_among_other_terms_in_any_chunks(chunk_tokens: int | None, valid_index: bool) -> None:
    """Two mixtures share a member, and a term has this member for itself."""
    full, weights_T = make_full(), torch.rand(T, generator=generator(8)).masked_fill(torch.arange(T) % 4 == 0, 0.0)
    mixture = Mixture([full, make_signal("dense")], [1, 2], 1.5)
    terms = [
        CrossEntropy(make_labels(), 0.3),
        Distill(mixture, jsd(0.3), 0.7, 1.5),
        Distill(mixture, forward_kl(), 0.2, 1.5, weights_T=torch.rand(T, generator=generator(5))),
        Distill(Mixture([make_signal("dense"), full], [1, 1]), forward_kl(), 0.5),
        Distill(full, forward_kl(), 0.4, 1.5),
        Entropy(-0.1),
    ]
    options: dict[str, Any] = {"weights_T": weights_T, "normalizer": 19.0}
    expected = run(dense_objective, make_leaves(), terms, **options)
    index = weights_T.nonzero()[:, 0] if valid_index else None
    actual = run(linear_objective, make_leaves(), terms, chunk_tokens=chunk_tokens, valid_index=index, **options)
    assert_same(actual, expected, within=1e-11)


def test_logits_objective() -> None:
    leaves, term = make_leaves(), Distill(make_mixture(temperature=1.5), jsd(0.3), 0.7, 1.5)
    expected = run(linear_objective, leaves, [term], weights_T=torch.ones(T), normalizer=5)
    hidden = leaves.hidden.requires_grad_()
    output = logits_objective(OutputHead(leaves.weight, leaves.bias).logits(hidden), [term], normalizer=5)
    output.loss.backward()
    assert hidden.grad is not None
    assert distance(output.loss, expected.output.loss) < 1e-13
    assert distance(hidden.grad, expected.gradients["hidden"]) < 1e-12


@pytest.mark.parametrize("tokens", [0, 12])
def test_without_a_valid_row(tokens: int) -> None:
    leaves, weights_T = make_leaves(tokens), torch.zeros(tokens)
    term = Distill(make_mixture(tokens), jsd(0.3))
    empty = run(linear_objective, leaves, [term], weights_T=weights_T)
    assert empty.output.loss == 0
    assert empty.gradients.keys() == {"hidden", "weight", "bias"}
    assert not any(each.any() for each in empty.gradients.values())
    full = run(linear_objective, make_leaves(), [Distill(make_mixture(), jsd(0.3))]).output
    assert empty.output.metrics.keys() == full.metrics.keys()
    assert not any(sums(empty.output).values())


def test_rows_that_no_term_counts_may_hold_anything() -> None:
    """The rows are computed here, because only the term's own weights leave them out."""
    own_T = torch.ones(T).index_fill(0, torch.tensor([2, 30]), 0.0)
    mixture = make_mixture(dtype=torch.float32)
    expected = run(linear_objective, make_leaves(dtype=torch.float32), [Distill(mixture, jsd(0.3), weights_T=own_T)])
    first = mixture.signals[0]
    assert isinstance(first, FullVocab)
    hidden_TE = first.hidden_TE.masked_fill(own_T[:, None] == 0, math.nan)
    broken = replace(mixture, signals=[replace(first, hidden_TE=hidden_TE), *mixture.signals[1:]])
    actual = run(linear_objective, make_leaves(dtype=torch.float32), [Distill(broken, jsd(0.3), weights_T=own_T)])
    assert_same(actual, expected, within=0.0)


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 1.7])
@pytest.mark.parametrize("expression", TEXTBOOK)
def test_gradients_against_finite_differences(expression: str, temperature: float) -> None:
    leaves = make_leaves(3, 7, 2)
    term = Distill(make_mixture(3, 7, temperature=temperature), parse_divergence(expression), 0.7, temperature, True)
    weights_T = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = OutputHead(weight, bias)
        return linear_objective(hidden, head, [term], weights_T=weights_T, normalizer=3.7, chunk_tokens=2).loss

    assert leaves.bias is not None
    inputs = tuple(each.requires_grad_() for each in (leaves.hidden, leaves.weight, leaves.bias))
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)


def test_rows_heads_and_tokens() -> None:
    mixture = make_mixture(temperature=1.5)
    assert mixture.tokens == T
    assert [each.rows for each in mixture.heads()] == [V, V + 5]
    for rows in (slice(3, 9), torch.tensor([5, 2])):
        part = mixture.rows(rows)
        assert part.tokens == (6 if isinstance(rows, slice) else 2)
        torch.testing.assert_close(probabilities(part), probabilities(mixture)[rows], rtol=1e-12, atol=0)
        assert all(one is other for one, other in zip(part.heads(), mixture.heads(), strict=True))
