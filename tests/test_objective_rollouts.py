"""Objectives on tokens that the student has drawn: specs against plain autograd, and what a batch's rows count for.

T tokens, V vocabulary.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_cases import D, Leaves, T, V, distance, generator, make_full, make_labels, make_leaves
from rollout_cases import NORMALIZER, SAMPLING, Batch, looped_sum, make_batch, plain_loss
from torch import Tensor

from stillhouse.models.processors import distillation
from stillhouse.objective import (
    Correction,
    CrossEntropy,
    DenseLogits,
    LogRatio,
    ObjectiveOutput,
    OutputHead,
    PolicyGradient,
    SampledKL,
    discounted_sum,
    linear_objective,
)
from stillhouse.objective.keys import ADVANTAGES, IS_SAMPLED, OLD_LOG_PROBS
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.spec import ObjectiveSpec, parse_objective

#: objectives, and the fields of their specs that an expression does not have
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "k2": ("sampled_kl", {}),
    "k3": ("0.5*sampled_kl(k3)", {"temperature": 1.7}),
    "k2, truncated": ("sampled_kl(k2)", {"temperature": 1.7, "correction": Correction("truncated", 1.3)}),
    "k3, masked": ("sampled_kl(k3)", {"correction": Correction("masked", 1.5)}),
    "rewards": ("2*policy_gradient", {}),
    "rewards, truncated": ("policy_gradient", {"correction": Correction("truncated", 1.2)}),
    "rewards, masked": ("policy_gradient", {"correction": Correction("masked", 1.4)}),
    "clip": ("policy_gradient(clip_low=0.1)", {"correction": Correction("masked", 1.4)}),
    "clip above": ("policy_gradient(clip_high=0.3)", {}),
    "teacher": ("policy_gradient(teacher_kl=0.5)", {"temperature": 1.7, "correction": Correction("truncated")}),
    "discount": ("policy_gradient(teacher_kl=1)", {"discount": 0.9, "correction": Correction("truncated")}),
    "no discount": ("policy_gradient(teacher_kl=1, clip_low=0.2, clip_high=0.3)", {"discount": 1.0}),
    "everything": (
        "0.3*cross_entropy + 1e-2*z_loss + policy_gradient(teacher_kl=0.3) + 0.1*reverse_kl - 0.01*entropy "
        "+ 0.7*sampled_kl(k3)",
        {"temperature": 1.7, "discount": 0.5, "correction": Correction("truncated", 1.3)},
    ),
}


def spec_of(case: str) -> ObjectiveSpec:
    text, options = SPECS[case]
    return replace(parse_objective(text), sampling_temperature=SAMPLING, **options)


def fused(
    spec: ObjectiveSpec, leaves: Leaves, batch: Batch, signal: Any, chunk_tokens: int | None = None
) -> tuple[ObjectiveOutput, dict[str, Tensor]]:
    fresh = {name: leaf.clone().requires_grad_() for name, leaf in vars(leaves).items() if leaf is not None}
    head = OutputHead(fresh["weight"], fresh.get("bias"))
    processor = distillation(spec, chunk_tokens=chunk_tokens)
    output = processor(hidden_states=fresh["hidden"][None], head=head, context=batch.targets(signal))
    output.loss.backward()
    gradients = {name: leaf.grad for name, leaf in fresh.items()}
    assert all(gradient is not None for gradient in gradients.values())
    return output, gradients  # type: ignore[return-value]


def plain(spec: ObjectiveSpec, leaves: Leaves, batch: Batch, logits_TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    fresh = {name: leaf.clone().requires_grad_() for name, leaf in vars(leaves).items() if leaf is not None}

    def log_p(temperature: float) -> Tensor:
        return torch.log_softmax(logits_TV / temperature, 1)

    loss = plain_loss(spec, Leaves(fresh["hidden"], fresh["weight"], fresh.get("bias")), log_p, batch)
    gradients = torch.autograd.grad(loss, list(fresh.values()))
    return loss.detach(), dict(zip(fresh, gradients, strict=True))


def teacher() -> tuple[Any, Tensor]:
    """An exact signal and its logits [T, V] in float64."""
    signal = make_full()
    return signal, signal.head.logits(signal.hidden_TE)


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("case", SPECS)
def test_as_in_plain_autograd(case: str, chunk_tokens: int | None) -> None:
    signal, logits_TV = teacher()
    spec, batch = spec_of(case), make_batch()
    output, gradients = fused(spec, make_leaves(), batch, signal, chunk_tokens)
    loss, expected = plain(spec, make_leaves(), batch, logits_TV)
    assert distance(output.loss, loss) < 1e-12
    for name, gradient in expected.items():
        assert gradient.norm() > 1e-4
        assert distance(gradients[name], gradient) < 1e-11, name


@pytest.mark.parametrize("case", SPECS)
def test_in_float32(case: str) -> None:
    signal, logits_TV = teacher()
    spec, batch = spec_of(case), make_batch()
    narrow = make_batch(dtype=torch.float32)
    _, gradients = fused(spec, make_leaves(dtype=torch.float32), narrow, make_full(dtype=torch.float32))
    _, expected = plain(spec, make_leaves(), batch, logits_TV)
    for name, gradient in expected.items():
        assert distance(gradients[name], gradient) < 1e-5, name


@pytest.mark.parametrize("case", ["k2, truncated", "teacher", "everything"])
def test_in_bfloat16(case: str) -> None:
    """The leaves' rounding is part of the problem: plain autograd gets the rounded numbers in float64."""
    signal, logits_TV = teacher()
    spec, batch = spec_of(case), make_batch()
    leaves = make_leaves(dtype=torch.bfloat16)
    _, gradients = fused(spec, leaves, make_batch(dtype=torch.float32), signal)
    wide = Leaves(*(each.double() for each in vars(leaves).values()))
    _, expected = plain(spec, wide, batch, logits_TV)
    for name, gradient in expected.items():
        assert gradients[name].dtype == torch.bfloat16
        assert distance(gradients[name], gradient) < 4e-3, name


@pytest.mark.parametrize("case", ["k3, masked", "everything"])
def test_the_reference_agrees(case: str) -> None:
    signal, _ = teacher()
    batch, leaves = make_batch(), make_leaves()
    found = []
    for objective in (linear_objective, dense_objective):
        fresh = {name: leaf.clone().requires_grad_() for name, leaf in vars(leaves).items()}
        head = OutputHead(fresh["weight"], fresh["bias"])
        options = {"document_T": batch.document_T, "valid_index": batch.weights_T.nonzero()[:, 0]}
        terms = spec_of(case).terms(batch.labels_T, signal, batch.per_token, student=head, **options)
        output = objective(fresh["hidden"], head, terms, weights_T=batch.weights_T, normalizer=NORMALIZER)
        output.loss.backward()
        found.append((output, fresh))
    (fast, its), (slow, others) = found
    assert distance(fast.loss, slow.loss) < 1e-12
    for name in its:
        assert distance(its[name].grad, others[name].grad) < 1e-11, name
    for name, values_T in slow.per_token.items():
        assert distance(fast.per_token[name], values_T) < 1e-11, name
    assert "log_ratio" in slow.per_token


# which rows count


def without(batch: Batch, *names: str) -> Batch:
    return replace(batch, per_token={name: each for name, each in batch.per_token.items() if name not in names})


def test_cross_entropy_counts_where_the_student_has_not_drawn_and_sampled_terms_where_it_has() -> None:
    signal, _ = teacher()
    batch = make_batch()
    counts_T = (batch.labels_T >= 0) & (batch.weights_T != 0)
    drawn_T = batch.is_drawn_T
    for text, expected_T in (
        ("cross_entropy + 1e-3*z_loss", counts_T & ~drawn_T),
        ("sampled_kl", counts_T & drawn_T),
        ("policy_gradient", counts_T & drawn_T),
        ("reverse_kl", batch.weights_T != 0),
        ("entropy", batch.weights_T != 0),
    ):
        spec = replace(parse_objective(text), sampling_temperature=SAMPLING)
        output, gradients = fused(spec, make_leaves(), batch, signal)
        assert torch.equal((gradients["hidden"] != 0).any(1), expected_T), text
        (name,) = output.per_token.keys() - {"log_ratio"}
        assert torch.equal(output.per_token[name] != 0, expected_T), text
        assert output.metrics["tokens"] == (batch.weights_T != 0).sum()


def test_without_marks_everything_is_as_before() -> None:
    """The same terms as those of a spec that knows nothing of rollouts, to the last bit."""
    signal, _ = teacher()
    batch = replace(make_batch(), per_token={})
    spec = parse_objective("0.3*cross_entropy + 0.7*reverse_kl - 0.01*entropy")
    first, second, third = spec.terms(batch.labels_T, signal)
    assert [each.weights_T for each in (first, second, third)] == [None, None, None]
    output, gradients = fused(spec, make_leaves(), batch, signal)
    fresh = make_leaves()
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in vars(fresh).items()}
    plain_output = linear_objective(
        leaves["hidden"],
        OutputHead(leaves["weight"], leaves["bias"]),
        [first, second, third],
        weights_T=batch.weights_T,
        normalizer=NORMALIZER,
    )
    plain_output.loss.backward()
    assert torch.equal(output.loss, plain_output.loss)
    for name, leaf in leaves.items():
        assert torch.equal(gradients[name], leaf.grad), name


def test_a_batch_without_drawn_tokens_gives_an_exact_zero() -> None:
    signal, _ = teacher()
    batch = make_batch()
    none = replace(batch, per_token=batch.per_token | {IS_SAMPLED: torch.zeros(T, dtype=torch.float64)})
    empty = replace(batch, weights_T=torch.zeros(T, dtype=torch.float64))
    spec = replace(
        parse_objective("sampled_kl + policy_gradient(teacher_kl=1)"), discount=0.9, correction=Correction("masked")
    )
    for each in (none, empty):
        output, gradients = fused(spec, make_leaves(), each, signal)
        assert output.loss == 0
        assert output.metrics["sampled"] == output.metrics["log_ratio"] == 0
        assert all((gradient == 0).all() for gradient in gradients.values())


def test_no_rows_at_all() -> None:
    spec = replace(parse_objective("sampled_kl + policy_gradient(teacher_kl=1) + reverse_kl"), discount=0.9)
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    batch = Batch(ids, none, ids, {IS_SAMPLED: none, OLD_LOG_PROBS: none, ADVANTAGES: none})
    leaves = make_leaves(dtype=torch.float32)
    signal = make_full(dtype=torch.float32).rows(slice(0, 0))
    output, gradients = fused(spec, replace(leaves, hidden=torch.zeros(0, D)), batch, signal)
    assert output.loss == 0
    assert (gradients["weight"] == 0).all()


def test_a_token_that_has_become_impossible() -> None:
    """log q is −inf at a drawn token: a correction gives it weight 0, whatever its estimate would be."""
    batch = make_batch()
    row = int(batch.is_drawn_T.nonzero()[0])
    assert batch.weights_T[row] != 0
    bias_V = torch.zeros(V, dtype=torch.float64)
    bias_V[batch.labels_T[row]] = -math.inf
    leaves = replace(make_leaves(), bias=bias_V)
    others = batch.labels_T == batch.labels_T[row]
    assert int(others.sum()) == 1
    for kind in ("truncated", "masked"):
        spec = replace(
            parse_objective("sampled_kl(k2) + policy_gradient"),
            correction=Correction(kind),  # type: ignore[arg-type]
            sampling_temperature=SAMPLING,
        )
        signal, _ = teacher()
        output, gradients = fused(spec, leaves, batch, signal)
        assert output.loss.isfinite()
        assert output.metrics["log_ratio"] == math.inf
        assert (gradients["hidden"][row] == 0).all()
        assert all(gradients[name].isfinite().all() for name in ("hidden", "weight"))


# the monitor


@pytest.mark.parametrize("vocabulary", [V, 2063])
@pytest.mark.parametrize("text", ["cross_entropy + reverse_kl", "0.3*cross_entropy + jsd(0.3) + 0.1*entropy"])
def test_the_monitor_does_not_change_a_bit(text: str, vocabulary: int) -> None:
    """It reads a softmax at another temperature. The larger vocabulary runs in compiled functions."""
    batch = make_batch(vocabulary=vocabulary, dtype=torch.float32)
    signal = make_full(vocabulary=vocabulary, dtype=torch.float32)
    leaves = make_leaves(vocabulary=vocabulary, dtype=torch.float32)
    spec = replace(parse_objective(text), sampling_temperature=SAMPLING)
    output, gradients = fused(spec, leaves, batch, signal)
    plain_output, expected = fused(spec, leaves, without(batch, OLD_LOG_PROBS), signal)
    assert output.metrics["log_ratio"] > 0
    assert "log_ratio" not in plain_output.metrics
    assert torch.equal(output.loss, plain_output.loss)
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


def test_the_monitor_reports_each_rows_ratio() -> None:
    batch, leaves = make_batch(), make_leaves()
    batch = replace(batch, weights_T=(batch.weights_T != 0).double())
    log_q_TV = torch.log_softmax(OutputHead(leaves.weight, leaves.bias).logits(leaves.hidden) / SAMPLING, 1)
    counts_T = batch.is_drawn_T & (batch.weights_T != 0)
    log_q_T = log_q_TV.gather(1, batch.labels_T.clamp_min(0)[:, None])[:, 0]
    expected_T = torch.where(counts_T, (log_q_T - batch.per_token[OLD_LOG_PROBS]).abs(), 0.0)
    spec = replace(parse_objective("cross_entropy"), sampling_temperature=SAMPLING)
    output, gradients = fused(spec, leaves, batch, None)
    assert distance(output.per_token["log_ratio"], expected_T) < 1e-12
    torch.testing.assert_close(output.metrics["log_ratio"], expected_T.sum(), rtol=1e-12, atol=0)
    assert output.metrics["sampled"] == counts_T.sum()
    assert (gradients["hidden"][batch.is_drawn_T] == 0).all()


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
    with pytest.raises(ValueError, match="discount=0.5 without document_T"):
        discounted.terms(batch.labels_T, signal, batch.per_token)


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


# targets


def test_targets_cut_and_move_what_they_hold() -> None:
    """Rows of a context shard, and depths of multi-token prediction: every tensor moves with the labels."""
    batch = make_batch()
    positions_1T = torch.arange(T)[None] % 13
    context = batch.targets(DenseLogits(torch.arange(T).double()[:, None])).shift_for_mtp(positions_1T, 1)
    index_T = torch.tensor([5, 2, 20])
    part = context.rows(index_T)
    assert torch.equal(part.document_T, batch.document_T[index_T])
    for name, each_T in batch.per_token.items():
        assert torch.equal(part.per_token[name], each_T[index_T])
    further = context.at(1)
    for row in range(T - 1):
        if (row + 1) % 13:
            assert further.labels_T[row] == batch.labels_T[row + 1]
            assert further.per_token[IS_SAMPLED][row] == batch.per_token[IS_SAMPLED][row + 1]
        else:
            assert further.labels_T[row] < 0
    assert torch.equal(part.at(1).per_token[IS_SAMPLED], further.per_token[IS_SAMPLED][index_T])


def test_further_depths_have_what_is_left_of_an_objective() -> None:
    signal, _ = teacher()
    batch, leaves = make_batch(), make_leaves()
    context = batch.targets(signal).shift_for_mtp(torch.arange(T)[None] % 13, 1)
    head = OutputHead(leaves.weight, leaves.bias)
    both = distillation(parse_objective("cross_entropy + 0.1*reverse_kl + policy_gradient + sampled_kl"))
    output = both(hidden_states=leaves.hidden[None], head=head, context=context, depth=1)
    assert output.per_token.keys() == {"cross_entropy", "reverse_kl"}
    further = context.at(1)
    is_other_T = (further.per_token[IS_SAMPLED] == 0) & (further.labels_T >= 0) & (further.weights_T != 0)
    assert torch.equal(output.per_token["cross_entropy"] != 0, is_other_T)
    alone = distillation(parse_objective("policy_gradient + sampled_kl"))
    with pytest.raises(ValueError, match=r"policy gradient .* at further depths of multi-token prediction: expected"):
        alone(hidden_states=leaves.hidden[None], head=head, context=context, depth=1)


def test_cross_entropy_of_the_mix_is_that_of_the_other_rows() -> None:
    """A row of the other kind is absent, not scaled: the same as a batch in which it has no label."""
    batch, leaves = make_batch(), make_leaves()
    spec = parse_objective("cross_entropy(label_smoothing=0.1) + 1e-2*z_loss")
    output, gradients = fused(spec, leaves, batch, None)
    masked_T = batch.labels_T.masked_fill(batch.is_drawn_T, -1)
    fresh = {name: leaf.clone().requires_grad_() for name, leaf in vars(leaves).items()}
    term = CrossEntropy(masked_T, 1.0, 0.1, 1e-2)
    head = OutputHead(fresh["weight"], fresh["bias"])
    expected = linear_objective(fresh["hidden"], head, [term], weights_T=batch.weights_T, normalizer=NORMALIZER)
    expected.loss.backward()
    assert distance(output.loss, expected.loss) < 1e-14
    for name, leaf in fresh.items():
        assert distance(gradients[name], leaf.grad) < 1e-13, name
