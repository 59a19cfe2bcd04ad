"""A run's objective as an expression: its terms, its description in words, its corrections and discounts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.objective_cases import generator, make_leaves
from kit.rollout_cases import fused, looped_sum, make_batch, spec_of, teacher, without
from torch import Tensor

from stillhouse.objective import (
    TEACHER,
    Correction,
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    discounted_sum,
    forward_kl,
    jsd,
    logits_objective,
    parse_divergence,
)
from stillhouse.objective.metric_keys import ADVANTAGES, OLD_LOG_PROBS
from stillhouse.objective.policy import PolicySettings
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
        "reverse_kl": 1,
        "cross_entropy": 1,
        "z_loss": 1,
        "entropy": 1,
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


def test_terms_and_their_scales() -> None:
    spec = parse_objective("0.3*cross_entropy(label_smoothing=0.1) + 0.7*jsd(0.5) - 0.01*entropy + 1e-4*z_loss", 2.0)
    student, teacher, labels = problem()
    terms = spec.terms(labels, {TEACHER: DenseLogits(teacher)})
    assert [type(term) for term in terms] == [CrossEntropy, Distill, Entropy]
    assert [term.name for term in terms] == ["cross_entropy", "jsd(0.5)", "entropy"]
    assert [term.scale for term in terms] == [0.3, 0.7, -0.01]
    assert terms[0].label_smoothing == 0.1
    assert terms[0].z_loss * 0.3 == pytest.approx(1e-4)
    assert (terms[1].temperature, terms[2].temperature) == (2.0, 2.0)
    assert not terms[1].scale_by_temperature_squared
    output = logits_objective(student, terms)
    total = sum(term.scale * float(output.metrics[term.name]) for term in terms)
    assert output.loss.item() == pytest.approx(total)


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


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (parse_objective("cross_entropy"), "cross-entropy"),
        (parse_objective("forward_kl"), "forward_kl of teacher and student"),
        (parse_objective("cross_entropy - 0.01*entropy"), "cross-entropy − 0.01 × entropy"),
        (
            parse_objective("0.3*cross_entropy(0.1) + 0.7*jsd(0.5) + 1e-4*z_loss - 0.01*entropy"),
            "0.3 × cross-entropy (label smoothing 0.1) + 0.0001 × z-loss + 0.7 × jsd(0.5) of teacher and student "
            "− 0.01 × entropy",
        ),
        (
            parse_objective("0.5*reverse_kl", temperature=2.0, scale_by_temperature_squared=True),
            "0.5 × reverse_kl·τ², τ = 2 of teacher and student",
        ),
        (
            parse_objective("0.5*cross_entropy + 0.5*uld"),
            "0.5 × cross-entropy + 0.5 × distance of the sorted probabilities (ULD) of teacher and student",
        ),
        (spec_of("k2"), "sampled KL (k2, descends reverse KL) at the student's own tokens"),
        (
            spec_of("k2, truncated"),
            "sampled KL (k2, descends reverse KL, ratio truncated at 1.3) at the student's own tokens",
        ),
        (spec_of("rewards"), "2 × policy gradient (advantage from rewards)"),
        (spec_of("clip"), "policy gradient (advantage from rewards, ratio clipped to 0.9 … 1.2)"),
        (spec_of("dual clip"), "policy gradient (advantage from rewards, ratio clipped to 0.8 … 1.1, dual clip 1.3)"),
        (spec_of("cispo"), "policy gradient (advantage from rewards, ratio clipped to 0 … 1.3 (cispo))"),
        (
            spec_of("sequence"),
            "policy gradient (advantage from rewards, ratio of each sequence clipped to 0.98 … 1.02)",
        ),
        (
            spec_of("discount"),
            "policy gradient (advantage from rewards, if any, and from (log p − log q) discounted by 0.9 of teacher "
            "and student, ratio truncated at 2)",
        ),
    ],
)
def test_an_objective_in_words(spec: ObjectiveSpec, words: str) -> None:
    assert spec.in_words() == words


#: expressions of an objective, and words of their errors (regular expressions)
EXPRESSIONS = {
    "forward_kll": r"unknown name 'forward_kll'; did you mean forward_kl\?",
    "cross_entropy + 0.5*forwardkl": r"did you mean forward_kl\?",
    "crossentropy": r"did you mean cross_entropy\?",
    "jds(0.5)": "did you mean jsd",
    "0.5*forward_kl + total_varation": "did you mean total_variation",
    "policy_gradientt": "did you mean policy_gradient",
    "kd": r"unknown name 'kd' \(known: .*cross_entropy.*z_loss\)",
    # no sum
    "": "cannot read ''.*expected a sum",
    "0.3*": r"cannot read '0.3\*'",
    "forward_kl +": "expected a sum",
    "0.3 cross_entropy": "cannot read",
    "cross_entropy * forward_kl": "cannot read",
    "cross_entropy / 2": "cannot read 'cross_entropy / 2'",
    "2*(forward_kl + reverse_kl)": "cannot read",
    "forward_kl*reverse_kl": "expected a number",
    "2": "cannot read '2'",
    "forward_kl()()": "cannot read",
    "__import__('os').system('true')": "cannot read",
    # arguments
    "__import__('os')": "expected a number",
    "jsd(__import__)": "cannot read '__import__'",
    "jsd('0.5')": "expected a number",
    "jsd(x)": "expected a number",
    "jsd({[]: 1})": "expected a number",
    "jsd(*[0.5])": "expected a number",
    "jsd(**x)": "expected a number",
    "jsd(k2)": "cannot read 'k2' .*expected a number",
    "jsd": "jsd: .*beta",
    "jsd()": "jsd: .*beta",
    "jsd(0.5, 0.5, 0.5)": "jsd: ",
    "jsd(gamma=1)": "jsd: .*gamma",
    "jsd(0.5, 0.3)": "normalized=0.3.*True or False",
    "jsd(0)": "beta.*forward_kl or reverse_kl",
    "jsd(1.0)": "beta.*forward_kl or reverse_kl",
    "jsd(-0.1)": "beta.*forward_kl or reverse_kl",
    "jsd(1.5, normalized=True)": "forward_kl or reverse_kl",
    "skew_forward_kl(1)": "0 ≤ alpha < 1",
    "skew_reverse_kl(-0.1)": "0 ≤ alpha < 1",
    "alpha_beta(-0.5, 1)": "negative exponent",
    "alpha_beta(2, -1)": "negative exponent",
    "alpha_beta(1e999, 1)": "finite",
    "forward_kl(2)": "forward_kl: ",
    "z_loss(2) + cross_entropy": "z_loss takes no arguments",
    "entropy(temperature=2)": "entropy takes no arguments",
    "uld(3)": "uld takes no arguments",
    "cross_entropy(label_smoothing=1)": "expected 0 ≤ label_smoothing < 1",
    "cross_entropy(label_smoothing=-0.1)": "expected 0 ≤ label_smoothing < 1",
    "cross_entropy(smoothing=0.1)": "cross_entropy: .*smoothing",
    "sampled_kl(k1)": "estimator='k1' as a loss: the expected on-policy gradient .* k1 is an advantage",
    "sampled_kl(k4)": "estimator='k4': expected 'k2'",
    "sampled_kl(2)": "cannot read '2' .*expected a word",
    "sampled_kl('k2')": "expected a word",
    "sampled_kl(k2, k3)": "sampled_kl: ",
    "policy_gradient(0.2)": "policy_gradient: .*expected policy_gradient",
    "policy_gradient(clip=0.2)": "policy_gradient: .*clip",
    "policy_gradient(clip_low=2)": "clip_low=2.*expected 0 ≤ clip_low ≤ 1",
    "policy_gradient(clip_low=-0.1)": "clip_low=-0.1",
    "policy_gradient(clip_high=True)": "clip_high=True",
    "policy_gradient(dual_clip=1)": "dual_clip=1.*expected a number above 1",
    "policy_gradient(surrogate=cispo, dual_clip=3)": "dual_clip=3.*expected none: the gradient of surrogate=cispo",
    "policy_gradient(surrogate=corrected, clip_high=0.3)": "clip_high=0.3.*expected surrogate=clip or cispo",
    "policy_gradient(surrogate=ppo)": "surrogate=ppo.*expected one of clip, cispo, corrected",
    "policy_gradient(surrogate='clip')": "cannot read .'clip'.*expected a word, without quotation marks",
    "policy_gradient(ratio=0.3)": "cannot read '0.3'.*expected a word",
    "policy_gradient(ratio=document)": "ratio=document.*expected one of token, sequence",
    "policy_gradient(clip_low=low)": "cannot read 'low'.*expected a number",
    "policy_gradient(kl_scale=-1)": "kl_scale=-1.*expected a finite number",
    "policy_gradient(teacher_kl=0)": "teacher_kl=0.*expected a positive number",
    "policy_gradient(teacher_kl=-1)": "teacher_kl=-1",
    # the place of a wrong summand
    "0.1*reverse_kl + 2*policy_gradient(clip_low=2)": (
        r"expected 0 ≤ clip_low ≤ 1 .*; see '2\*policy_gradient\(clip_low=2\)' at character 18 of '0.1\*reverse_kl"
    ),
    "jsd(2) + cross_entropy": r"beta.*; see 'jsd\(2\)' at character 1 of",
    "cross_entropy + forwardkl": "did you mean forward_kl.*; see 'forwardkl' at character 17 of",
    # coefficients
    "True*forward_kl": r"coefficient True in 'True\*forward_kl': expected a number",
    "0.5*forward_kl + cross_entropy*True": "coefficient True in .*expected a number",
    "-True*forward_kl": "True.*expected a number",
    "-1*forward_kl": "-1.0 of forward_kl",
    "-forward_kl": "-1.0 of forward_kl",
    "0*forward_kl": "forward_kl: expected a positive",
    "forward_kl - 0.1*reverse_kl": "-0.1 of reverse_kl",
    "1e999*forward_kl": "inf",
    "1e999*cross_entropy": "inf.*expected a finite coefficient",
    "cross_entropy + 1e999*entropy": "inf.*expected a finite coefficient",
    "1e999*policy_gradient": "inf.*expected a finite coefficient",
    "-0.5*cross_entropy": r"-0.5\*cross_entropy .*expected a positive coefficient",
    "0*cross_entropy": r"0\*cross_entropy .*expected a positive coefficient",
    "cross_entropy - 1e-4*z_loss": "z_loss .*expected a positive coefficient",
    "-1*uld": r"-1\*uld in '-1\*uld': expected a positive coefficient",
    "-1*sampled_kl": r"-1\*sampled_kl .*expected a positive coefficient",
    "0*policy_gradient": r"0\*policy_gradient .*expected a positive coefficient",
    "z_loss": "z_loss without cross_entropy",
    "cross_entropy + cross_entropy": "cross_entropy comes twice",
    "entropy + cross_entropy + 2*entropy": "entropy comes twice",
    "sampled_kl + sampled_kl(k3)": "sampled_kl comes twice",
}
#: the same for an expression of divergences alone, whose parser has names and coefficients of its own
DIVERGENCE_EXPRESSIONS = {
    "foward_kl": "unknown name 'foward_kl'; did you mean forward_kl",
    "banana": "known: acceptance, alpha_beta, forward_kl, jsd",
    "cross_entropy": "unknown name 'cross_entropy'",
    "jsd": "jsd: .*beta",
    "0.5": "cannot read",
    "-0.5*forward_kl": "-0.5 of forward_kl",
    "forward_kl - 0.1*reverse_kl": "-0.1 of reverse_kl",
    "0*forward_kl": "positive",
    "forward_kl + False*reverse_kl": "False.*expected a number",
}


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [(parse_objective, *case) for case in EXPRESSIONS.items()]
    + [(parse_divergence, *case) for case in DIVERGENCE_EXPRESSIONS.items()],
)
def test_expressions_that_are_refused(parse: Callable[[str], Any], text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


# objectives on sampled tokens


# the grammar


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
        "cross_entropy + 1e-4*z_loss - 0.1*entropy": (False, False, False),
        "entropy": (False, False, False),
        "cross_entropy + 0.1*forward_kl": (True, False, False),
        "uld": (True, False, False),
        "reverse_kl": (True, False, False),
        "sampled_kl": (True, True, False),
        "policy_gradient": (False, True, True),
        "policy_gradient + 0.1*reverse_kl": (True, True, True),
        "policy_gradient(teacher_kl=1)": (True, True, False),
        "policy_gradient(kl_scale=0.1)": (True, True, True),
    }
    for text, expected in needs.items():
        spec = parse_objective(text)
        assert (spec.needs_teacher, spec.needs_rollouts, spec.needs_rewards) == expected, text
        if not any(expected):
            student, _, labels = problem()
            labels[0] = -1
            assert math.isfinite(logits_objective(student, spec.terms(labels, {})).loss.item())


def test_what_a_batch_may_lack() -> None:
    signal, _ = teacher()
    batch, leaves = make_batch(), make_leaves()
    fused(parse_objective("sampled_kl"), leaves, without(batch, OLD_LOG_PROBS, ADVANTAGES), signal)
    fused(parse_objective("policy_gradient(teacher_kl=1)"), leaves, without(batch, ADVANTAGES), signal)


# corrections and discounts


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
