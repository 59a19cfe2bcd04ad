"""Objectives on drawn tokens: their expressions, what they need, their corrections and discounts, and refusals."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.objective_cases import T, generator, make_labels, make_leaves
from kit.rollout_cases import SAMPLING, fused, looped_sum, make_batch, spec_of, teacher, without

from stillhouse.objective import TEACHER, Correction, LogRatio, OutputHead, PolicyGradient, SampledKL, discounted_sum
from stillhouse.objective.keys import ADVANTAGES, IS_SAMPLED, OLD_LOG_PROBS
from stillhouse.objective.spec import parse_objective

# the grammar


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("sampled_kl", {"sampled_kl": 1.0, "estimator": "k2"}),
        ("0.5*sampled_kl(k3)", {"sampled_kl": 0.5, "estimator": "k3"}),
        ("sampled_kl(estimator=k2)*2", {"sampled_kl": 2.0, "estimator": "k2"}),
        ("policy_gradient", {"policy_gradient": 1.0, "clip_low": None, "clip_high": None, "teacher_kl": 0.0}),
        ("policy_gradient(clip_low=0.1)", {"clip_low": 0.1, "clip_high": None}),
        ("3*policy_gradient(clip_low=1, clip_high=0.3)", {"policy_gradient": 3.0, "clip_low": 1, "clip_high": 0.3}),
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
        "reverse_kl": (True, False, False),
        "sampled_kl": (True, True, False),
        "policy_gradient": (False, True, True),
        "policy_gradient + 0.1*reverse_kl": (True, True, True),
        "policy_gradient(teacher_kl=1)": (True, True, False),
    }
    for text, expected in needs.items():
        spec = parse_objective(text)
        assert (spec.needs_teacher, spec.needs_rollouts, spec.needs_rewards) == expected, text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampled_kl(k1)", "estimator='k1' as a loss: the expected on-policy gradient .* k1 is an advantage"),
        ("sampled_kl(k4)", "estimator='k4': expected 'k2'"),
        ("sampled_kl(2)", "cannot read '2' .*expected a word"),
        ("sampled_kl('k2')", "expected a word"),
        ("sampled_kl(k2, k3)", "sampled_kl: "),
        ("jsd(k2)", "cannot read 'k2' .*expected a number"),
        ("-1*sampled_kl", r"-1\*sampled_kl .*expected a positive coefficient"),
        ("0*policy_gradient", r"0\*policy_gradient .*expected a positive coefficient"),
        ("1e999*policy_gradient", "inf.*expected a finite coefficient"),
        ("sampled_kl + sampled_kl(k3)", "sampled_kl comes twice"),
        ("policy_gradient(0.2)", "policy_gradient: .*expected policy_gradient"),
        ("policy_gradient(clip=0.2)", "policy_gradient: .*clip"),
        ("policy_gradient(clip_low=2)", "clip_low=2.*expected 0 ≤ clip_low ≤ 1"),
        ("policy_gradient(clip_low=-0.1)", "clip_low=-0.1"),
        ("policy_gradient(clip_high=True)", "clip_high=True"),
        ("policy_gradient(teacher_kl=0)", "teacher_kl=0.*expected a positive number"),
        ("policy_gradient(teacher_kl=-1)", "teacher_kl=-1"),
        ("policy_gradientt", "did you mean policy_gradient"),
    ],
)
def test_expressions_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_objective(text)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("k2", "sampled KL (k2, descends reverse KL) at the student's own tokens"),
        (
            "k2, truncated",
            "sampled KL (k2, descends reverse KL, ratio truncated at 1.3) at the student's own tokens",
        ),
        ("rewards", "2 × policy gradient (advantage from rewards)"),
        ("clip", "policy gradient (advantage from rewards, ratio clipped to 0.9 … 1.2)"),
        (
            "discount",
            "policy gradient (advantage from rewards, if any, and from (log p − log q) discounted by 0.9 of teacher "
            "and student, ratio truncated at 2)",
        ),
    ],
)
def test_in_words(case: str, words: str) -> None:
    assert spec_of(case).in_words() == words


def test_a_batch_that_lacks_something_is_refused() -> None:
    signal, _ = teacher()
    batch, leaves = make_batch(), make_leaves()
    for text, missing in (
        ("sampled_kl", IS_SAMPLED),
        ("policy_gradient", ADVANTAGES),
        ("policy_gradient", OLD_LOG_PROBS),
        ("policy_gradient(teacher_kl=1)", OLD_LOG_PROBS),
    ):
        with pytest.raises(ValueError, match=f"{missing} is missing in per_token"):
            fused(parse_objective(text), leaves, without(batch, missing), signal)
    corrected = replace(parse_objective("sampled_kl"), correction=Correction("masked"))
    with pytest.raises(ValueError, match="old_log_probs is missing"):
        fused(corrected, leaves, without(batch, OLD_LOG_PROBS), signal)
    fused(parse_objective("sampled_kl"), leaves, without(batch, OLD_LOG_PROBS, ADVANTAGES), signal)
    fused(parse_objective("policy_gradient(teacher_kl=1)"), leaves, without(batch, ADVANTAGES), signal)
    with pytest.raises(ValueError, match="signal is missing"):
        fused(parse_objective("sampled_kl"), leaves, batch, None)
    with pytest.raises(ValueError, match=r"per_token\['is_sampled'\] of shape \(36,\): expected \(37,\)"):
        fused(
            parse_objective("cross_entropy"),
            leaves,
            replace(batch, per_token={IS_SAMPLED: torch.ones(T - 1)}),
            None,
        )
    discounted = replace(parse_objective("policy_gradient(teacher_kl=1)"), discount=0.5)
    with pytest.raises(ValueError, match=r"discount=0\.5 without document_T"):
        discounted.terms(batch.labels_T, {TEACHER: signal}, batch.per_token)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Correction("tis"), "correction 'tis': expected one of none, truncated, masked"),  # type: ignore[arg-type]
        (lambda: Correction("masked", 1.0), "limit=1.0 of the correction: expected a number above 1"),
        (lambda: Correction("masked", math.nan), "limit=nan"),
        (
            lambda: SampledKL(make_labels(), torch.zeros(T), correction=Correction("masked")),
            "correction='masked' without old_log_probs_T",
        ),
        (
            lambda: PolicyGradient(make_labels(), torch.zeros(T), torch.zeros(T), correction=Correction("masked")),
            "correction='masked' with surrogate='clip'",
        ),
        (lambda: discounted_sum(torch.zeros(3), torch.zeros(4), 0.5), r"values_T of shape \(3,\)"),
        (lambda: discounted_sum(torch.zeros(3), torch.zeros(3), 1.5), "discount=1.5: expected a number from 0 to 1"),
        (lambda: LogRatio(make_labels(), torch.full((T,), math.nan)), "old_log_probs_T holds nan at a drawn token"),
    ],
    ids=["kind", "limit", "nan", "no old", "surrogate", "shapes", "discount", "monitor"],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


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
        assert is_limited.tolist() == [bool(each) for each in limited]


@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_the_limited_share_is_reported(kind: str) -> None:
    batch = make_batch()
    batch = replace(batch, weights_T=(batch.weights_T != 0).double())
    signal, _ = teacher()
    spec = replace(
        parse_objective("sampled_kl + policy_gradient"),
        correction=Correction(kind, 1.5),  # type: ignore[arg-type]
        sampling_temperature=SAMPLING,
    )
    metrics = fused(spec, make_leaves(), batch, signal)[0].metrics
    log_ratio_T = fused(spec, make_leaves(), batch, signal)[0].per_token["log_ratio"]
    leaves = make_leaves()
    log_q_TV = torch.log_softmax(OutputHead(leaves.weight, leaves.bias).logits(leaves.hidden) / SAMPLING, 1)
    log_q_T = log_q_TV.gather(1, batch.labels_T.clamp_min(0)[:, None])[:, 0]
    counts_T = batch.is_drawn_T & (batch.weights_T != 0)
    ratio_T = (log_q_T - batch.per_token[OLD_LOG_PROBS]).exp()[counts_T]
    limited_T = ratio_T > 1.5 if kind == "truncated" else log_ratio_T[counts_T] > math.log(1.5)
    assert 0 < limited_T.sum() < counts_T.sum()
    for suffix in ("", "#2"):
        assert metrics[f"clipped{suffix}"] == limited_T.sum()
        torch.testing.assert_close(metrics[f"ratio{suffix}"], ratio_T.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("discount", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("tokens", [0, 1, 37, 300])
def test_discounted_sums_are_those_of_a_loop(tokens: int, discount: float) -> None:
    values_T = torch.randn(tokens, generator=generator(70), dtype=torch.float64)
    length_D = torch.randint(1, 60, (tokens,), generator=generator(71))
    document_T = torch.repeat_interleave(torch.arange(tokens), length_D)[:tokens] % 3  # a number may come again
    found_T = discounted_sum(values_T, document_T, discount)
    torch.testing.assert_close(found_T, looped_sum(values_T, document_T, discount), rtol=1e-12, atol=1e-13)
    narrow_T = discounted_sum(values_T.float(), document_T, discount)
    torch.testing.assert_close(narrow_T.double(), found_T, rtol=1e-5, atol=1e-5)


def test_a_long_document_neither_under_nor_overflows() -> None:
    values_T, document_T = torch.ones(100_000), torch.zeros(100_000, dtype=torch.int64)
    assert discounted_sum(values_T, document_T, 0.01)[0] == pytest.approx(1 / 0.99)
    assert discounted_sum(values_T, document_T, 1.0)[0] == 100_000
