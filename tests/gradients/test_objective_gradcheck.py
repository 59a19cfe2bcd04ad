"""Gradients against finite differences in float64, for every divergence on every signal and every other term."""

import pytest
import torch
from kit.objective_cases import ALL_DIVERGENCES, SIGNALS, make_labels, make_leaves, make_signal
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    Entropy,
    OutputHead,
    Sampled,
    Term,
    forward_kl,
    linear_objective,
    logits_objective,
    parse_divergence,
)

TOKENS, VOCABULARY, WIDTH, TEMPERATURE = 3, 7, 2, 1.7


def check(terms: list[Term], **head_options: float | None) -> None:
    """Check the gradients of hidden states, weight and bias over several chunks, with weights and a normaliser."""
    leaves = make_leaves(TOKENS, VOCABULARY, WIDTH)
    weights_T = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = OutputHead(weight, bias, **head_options)  # type: ignore[arg-type]
        return linear_objective(hidden, head, terms, weights_T=weights_T, normalizer=3.7, chunk_tokens=2).loss

    assert leaves.bias is not None
    inputs = tuple(each.requires_grad_() for each in (leaves.hidden, leaves.weight, leaves.bias))
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("expression", ALL_DIVERGENCES)
def test_divergence_on_signal(expression: str, signal: str) -> None:
    teacher = make_signal(signal, TOKENS, VOCABULARY, temperature=TEMPERATURE, entries=4)
    check([Distill(teacher, parse_divergence(expression), 0.7, TEMPERATURE, True)])


SAMPLED = Sampled(torch.tensor([[0, 3, 3], [6, -1, 2], [1, 1, 1]]), torch.rand(3, 3, dtype=torch.float64))
LABELS = make_labels(TOKENS, VOCABULARY)
TERMS = {
    "cross_entropy": CrossEntropy(LABELS),
    "label_smoothing": CrossEntropy(LABELS, 0.6, label_smoothing=0.2),
    "z_loss": CrossEntropy(LABELS, 0.6, z_loss=0.3),
    "label_smoothing_and_z_loss": CrossEntropy(LABELS, label_smoothing=0.2, z_loss=0.3),
    "entropy": Entropy(-0.4, TEMPERATURE),
    "sampled": Distill(SAMPLED, forward_kl(), 0.7, TEMPERATURE),
}


@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS)
def test_other_terms(term: Term) -> None:
    check([term])


@pytest.mark.parametrize(
    "head_options",
    [{"softcap": 1.5}, {"scale": 0.3}, {"scale": 2.0, "softcap": 3.0}, {"vocab_size": 5}],
    ids=str,
)
def test_head_options_under_a_sum_of_terms(head_options: dict[str, float]) -> None:
    full = make_signal("full", TOKENS, VOCABULARY)
    labels = LABELS.clamp(max=4)
    check([CrossEntropy(labels, 0.3, z_loss=0.1), Distill(full, parse_divergence("jsd(0.3)"), 0.7)], **head_options)


def test_logits_objective() -> None:
    teacher = make_signal("bucket", TOKENS, VOCABULARY, entries=3)
    terms = [CrossEntropy(LABELS, 0.3), Distill(teacher, parse_divergence("reverse_kl"), 0.7)]
    logits = torch.randn(TOKENS, VOCABULARY, dtype=torch.float64, requires_grad=True)
    weights_T = torch.tensor([1.0, 0.0, 2.0])
    assert torch.autograd.gradcheck(
        lambda each: logits_objective(each, terms, weights_T=weights_T, normalizer=3.7).loss, (logits,)
    )
