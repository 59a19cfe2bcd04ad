"""A run's objective as an expression: its terms, its description in words, its corrections and discounts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import rollout_cases
from kit.config_cases import MESSAGES, refused_calls
from kit.objective_cases import generator, make_leaves
from kit.rollout_cases import fused, looped_sum, make_batch, teacher, without
from torch import Tensor

from stillhouse.objective import (
    TEACHER,
    Correction,
    DenseLogits,
    Distill,
    discounted_sum,
    forward_kl,
    jsd,
    logits_objective,
    parse_divergence,
)
from stillhouse.objective.metrics import ADVANTAGES, OLD_LOG_PROBS
from stillhouse.objective.policy_parameters import PolicySettings
from stillhouse.objective.spec import ObjectiveSpec, parse_objective


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return student logits and teacher logits, [6, 11] in float64, and labels."""
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(6, 11, generator=draw, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher, torch.randint(0, 11, (6,), generator=draw)


def value_and_gradient(spec: ObjectiveSpec) -> tuple[float, Tensor]:
    student, teacher, labels = problem()
    output = logits_objective(student, spec.terms(labels, {TEACHER: DenseLogits(teacher)}))
    output.loss.backward()
    return output.loss.item(), student.grad


def plain(temperature: float = 1.0) -> dict[str, Tensor]:
    """Return the sums over tokens of the textbook formulas, for a student that requires gradients."""
    student, teacher, labels = problem()
    log_q, log_p = (torch.log_softmax(logits / temperature, 1) for logits in (student, teacher))
    q, p = log_q.exp(), log_p.exp()
    m = (p + q) / 2
    smoothed = torch.nn.functional.cross_entropy(student, labels, label_smoothing=0.1, reduction="sum")
    return {
        "student": student,
        "cross_entropy": torch.nn.functional.cross_entropy(student, labels, reduction="sum"),
        "smoothed": smoothed,
        "z_loss": torch.logsumexp(student, 1).square().sum(),
        "entropy": -(q * log_q).sum(),
        "forward_kl": (p * (log_p - log_q)).sum(),
        "reverse_kl": (q * (log_q - log_p)).sum(),
        "jsd": (p * (log_p - m.log()) + q * (log_q - m.log())).sum() / 2,
    }


CASES: dict[str, dict[str, float]] = {
    "cross_entropy": {"cross_entropy": 1},
    "forward_kl": {"forward_kl": 1},
    "0.3*cross_entropy + 0.7*jsd(0.5)": {"cross_entropy": 0.3, "jsd": 0.7},
    "jsd(0.5)*0.7 + cross_entropy*0.3": {"cross_entropy": 0.3, "jsd": 0.7},
    "0.9*forward_kl + 0.1*reverse_kl": {"forward_kl": 0.9, "reverse_kl": 0.1},
    "0.5*cross_entropy + 1e-3*z_loss": {"cross_entropy": 0.5, "z_loss": 1e-3},
    "2*cross_entropy(label_smoothing=0.1) - 0.05*entropy": {"smoothed": 2, "entropy": -0.05},
    "2*cross_entropy(0.1) + -0.05*entropy": {"smoothed": 2, "entropy": -0.05},
    "reverse_kl + cross_entropy + z_loss + entropy + 0.5*jsd(0.5)": {
        **dict.fromkeys(("reverse_kl", "cross_entropy", "z_loss", "entropy"), 1),
        "jsd": 0.5,
    },
}


@pytest.mark.parametrize("text", CASES)
def test_an_expression_is_the_sum_that_it_says(text: str) -> None:
    values = plain()
    expected = sum(factor * values[name] for name, factor in CASES[text].items())
    assert isinstance(expected, Tensor)
    (gradient,) = torch.autograd.grad(expected, values["student"])
    value, actual = value_and_gradient(parse_objective(text))
    assert value == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("squared", [False, True])
def test_temperature_is_of_divergences_and_not_of_cross_entropy(squared: bool) -> None:
    hot, cold = plain(3.0), plain(1.0)
    expected = cold["cross_entropy"].item() + 0.5 * (9 if squared else 1) * hot["forward_kl"].item()
    value, _ = value_and_gradient(parse_objective("cross_entropy + 0.5*forward_kl", 3.0, squared))
    assert value == pytest.approx(expected, rel=1e-9)


def test_several_divergences_are_one_term() -> None:
    _, teacher, labels = problem()
    (term,) = parse_objective("0.9*forward_kl + 0.1*jsd(0.5)").terms(labels, {TEACHER: DenseLogits(teacher)})
    assert isinstance(term, Distill)
    assert term.scale == 1.0
    assert term.name == "0.9*forward_kl + 0.1*jsd(0.5)"
    assert parse_objective("forward_kl") == ObjectiveSpec(divergence=forward_kl())
    assert parse_objective("2*forward_kl").divergence == forward_kl()
    assert parse_objective("2*forward_kl").divergence_scale == 2.0
    assert parse_objective("jsd(beta=0.25, normalized=True)").divergence == jsd(0.25, normalized=True)


@pytest.mark.parametrize(("call", "words"), refused_calls("objectives in words"))
def test_an_objective_in_words(call: str, words: str) -> None:
    assert eval(call, vars(rollout_cases) | globals()).in_words() == words


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [(parse, *case) for parse in (parse_objective, parse_divergence) for case in MESSAGES[parse.__name__].items()],
)
def test_expressions_that_are_refused(parse: Callable[[str], Any], text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("sampled_kl", {"sampled_kl": 1.0, "estimator": "k2"}),
        ("0.5*sampled_kl(k3)", {"sampled_kl": 0.5, "estimator": "k3"}),
        ("sampled_kl(estimator=k2)*2", {"sampled_kl": 2.0, "estimator": "k2"}),
        ("policy_gradient", {"policy_gradient": 1.0, "policy": PolicySettings(), "teacher_kl": 0.0}),
        ("policy_gradient(clip_low=0.1)", {"policy": PolicySettings(clip_low=0.1)}),
        ("3*policy_gradient(clip_low=1, clip_high=0.3)", {"policy_gradient": 3.0, "policy": PolicySettings(1, 0.3)}),
        (
            "policy_gradient(surrogate=clip, ratio=sequence, dual_clip=3, kl_scale=0.01, teacher_kl=2)",
            {"policy": PolicySettings(None, None, 3, "clip", "sequence", 0.01), "teacher_kl": 2},
        ),
        ("policy_gradient(teacher_kl=2)", {"teacher_kl": 2}),
    ],
)
def test_the_grammar(text: str, fields: dict[str, Any]) -> None:
    spec = parse_objective(text)
    assert {name: getattr(spec, name) for name in fields} == fields
    assert spec.needs_rollouts


def test_what_an_objective_needs() -> None:
    needs = {
        "cross_entropy": (False, False, False),
        **{"cross_entropy + 1e-4*z_loss - 0.1*entropy": (False, False, False), "entropy": (False, False, False)},
        **{"cross_entropy + 0.1*forward_kl": (True, False, False), "reverse_kl": (True, False, False)},
        **{"sampled_kl": (True, True, False), "policy_gradient": (False, True, True)},
        "policy_gradient + 0.1*reverse_kl": (True, True, True),
        **{"policy_gradient(teacher_kl=1)": (True, True, False), "policy_gradient(kl_scale=0.1)": (True, True, True)},
    }
    for text, expected in needs.items():
        spec = parse_objective(text)
        assert (spec.needs_teacher, spec.needs_rollouts, spec.needs_rewards) == expected, text
        if not any(expected):
            student, _, labels = problem()
            labels[0] = -1
            assert math.isfinite(logits_objective(student, spec.terms(labels, {})).loss.item())
    signal, _ = teacher()
    batch, leaves = make_batch(), make_leaves()
    fused(parse_objective("sampled_kl"), leaves, without(batch, OLD_LOG_PROBS, ADVANTAGES), signal)
    fused(parse_objective("policy_gradient(teacher_kl=1)"), leaves, without(batch, ADVANTAGES), signal)


def test_weights_by_hand() -> None:
    ratio = torch.tensor([0.0, 0.4, 0.5, 1.0, 2.0, 2.5, math.inf], dtype=torch.float64)
    for kind, expected, limited in (
        ("none", [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]),
        ("truncated", [0, 0.4, 0.5, 1, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1]),
        ("masked", [0, 0, 0.5, 1, 2, 0, 0], [1, 1, 0, 0, 0, 1, 1]),
    ):
        weights, is_limited = Correction(kind, 2.0).weights(ratio)  # type: ignore[arg-type]
        assert weights.tolist() == expected
        assert is_limited.tolist() == [bool(flag) for flag in limited]


@pytest.mark.parametrize("discount", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("tokens", [0, 1, 37, 300])
def test_discounted_sums_are_those_of_a_loop(tokens: int, discount: float) -> None:
    values_T = torch.randn(tokens, generator=generator(70), dtype=torch.float64)
    length_D = torch.randint(1, 60, (tokens,), generator=generator(71))
    document_T = torch.repeat_interleave(torch.arange(tokens), length_D)[:tokens] % 3  # a number may come again
    actual_T = discounted_sum(values_T, document_T, discount)
    torch.testing.assert_close(actual_T, looped_sum(values_T, document_T, discount), rtol=1e-12, atol=1e-13)
    narrow_T = discounted_sum(values_T.float(), document_T, discount)
    torch.testing.assert_close(narrow_T.double(), actual_T, rtol=1e-5, atol=1e-5)


def test_a_long_document_neither_under_nor_overflows() -> None:
    values_T, document_T = torch.ones(100_000), torch.zeros(100_000, dtype=torch.int64)
    assert discounted_sum(values_T, document_T, 0.01)[0] == pytest.approx(1 / 0.99)
    assert discounted_sum(values_T, document_T, 1.0)[0] == 100_000
