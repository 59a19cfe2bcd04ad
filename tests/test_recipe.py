"""A run's objective as one expression: what it becomes, what it says of itself, and what it refuses."""

import pytest
import torch

from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    forward_kl,
    jsd,
    logits_objective,
    reverse_kl,
)
from stillhouse.objective.recipe import Recipe, parse_recipe

LABELS = torch.tensor([0, 2, -1])
SIGNAL = DenseLogits(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))


def test_every_part_becomes_a_term() -> None:
    recipe = parse_recipe(
        "0.3*cross_entropy(label_smoothing=0.1) + 0.6*jsd(0.5) + 3e-4*z_loss - 0.01*entropy", 2.0, True
    )
    cross_entropy, distill, entropy = recipe.terms(LABELS, SIGNAL)
    assert isinstance(cross_entropy, CrossEntropy)
    assert isinstance(distill, Distill)
    assert isinstance(entropy, Entropy)
    assert (cross_entropy.scale, cross_entropy.label_smoothing) == (0.3, 0.1)
    assert cross_entropy.scale * cross_entropy.z_loss == pytest.approx(3e-4)
    assert (distill.divergence, distill.scale, distill.temperature) == (jsd(0.5), 0.6, 2.0)
    assert distill.scale_by_temperature_squared
    assert (entropy.scale, entropy.temperature) == (-0.01, 2.0)


def test_divergences_of_a_sum_share_one_term() -> None:
    recipe = parse_recipe("0.9*forward_kl + cross_entropy + 0.1*reverse_kl")
    assert recipe.divergence == 0.9 * forward_kl() + 0.1 * reverse_kl()
    assert recipe.divergence_scale == 1
    assert [term.name for term in recipe.terms(LABELS, SIGNAL)] == [
        "cross_entropy",
        "0.9*forward_kl + 0.1*reverse_kl",
    ]


@pytest.mark.parametrize("expression", ["cross_entropy", "cross_entropy + 0.1*z_loss - 0.1*entropy"])
def test_an_objective_without_a_divergence_needs_no_teacher(expression: str) -> None:
    recipe = parse_recipe(expression)
    assert not recipe.needs_teacher
    assert logits_objective(torch.randn(3, 4), recipe.terms(LABELS, None)).loss.isfinite()
    assert parse_recipe("forward_kl").needs_teacher


def test_in_words() -> None:
    recipe = parse_recipe("0.3*cross_entropy + 0.7*jsd(0.5) + 1e-4*z_loss - 0.01*entropy")
    words = recipe.in_words()
    assert words == "0.3 × cross-entropy + 0.0001 × z-loss + 0.7 × jsd(0.5) of teacher and student − 0.01 × entropy"
    assert parse_recipe("forward_kl") == Recipe(divergence=forward_kl())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crossentropy", "did you mean cross_entropy"),
        ("cross_entropy + 0.5*forwardkl", "did you mean forward_kl"),
        ("cross_entropy + 0.5*cross_entropy", "cross_entropy comes twice"),
        ("0*cross_entropy", "expected a positive coefficient"),
        ("forward_kl - 0.1*cross_entropy", "-0.1\\*cross_entropy"),
        ("forward_kl - 0.1*reverse_kl", "expected a positive number"),
        ("forward_kl + 0.1*z_loss", "z_loss without cross_entropy"),
        ("cross_entropy + z_loss(3)", "z_loss takes no arguments"),
        ("entropy(2)", "entropy takes no arguments"),
        ("cross_entropy(label_smoothing=1)", "label_smoothing < 1"),
        ("cross_entropy(smoothing=0.1)", "cross_entropy: .*smoothing"),
        ("jsd(0)", "forward_kl or reverse_kl"),
    ],
)
def test_bad_objective_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_recipe(text)
