"""Objectives on drawn tokens: their expressions, what they need, their corrections and discounts, and refusals."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.objective_cases import generator, make_leaves
from kit.rollout_cases import SAMPLING, fused, looped_sum, make_batch, spec_of, teacher

from stillhouse.objective import Correction, OutputHead, discounted_sum
from stillhouse.objective.keys import OLD_LOG_PROBS
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
