"""Objectives on tokens that the student has sampled: specs against plain autograd, and what a batch's rows count for.

T tokens, V vocabulary.
"""

import math
from dataclasses import replace

import pytest
import torch
from kit.objective_cases import DTYPES, Leaves, T, V, converted, distance, make_full, make_leaves, trainable
from kit.rollout_cases import SAMPLING, SPECS, Batch, at, fused, make_batch, plain_loss, spec_of, teacher, without
from kit.tensors import assert_equal_tensors
from torch import Tensor

from stillhouse.engine.loss import StepLoss
from stillhouse.objective import Correction, OutputHead
from stillhouse.objective.metrics import IS_SAMPLED, OLD_LOG_PROBS
from stillhouse.objective.metrics import SAMPLING as NUMBER
from stillhouse.objective.spec import ObjectiveSpec, parse_objective
from stillhouse.objective.tile import chunks


def plain(spec: ObjectiveSpec, leaves: Leaves, batch: Batch, logits_TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    copies = trainable(leaves)

    def log_p(temperature: float | Tensor) -> Tensor:
        return torch.log_softmax(logits_TV / temperature, 1)

    loss = plain_loss(spec, Leaves(copies["hidden"], copies["weight"], copies.get("bias")), log_p, batch)
    gradients = torch.autograd.grad(loss, list(copies.values()))
    return loss.detach(), dict(zip(copies, gradients, strict=True))


#: the largest relative error of a gradient; the leaves' rounding is part of the problem
WITHIN = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 4e-3}


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("case", SPECS)
def test_as_in_plain_autograd(case: str, dtype: str) -> None:
    signal, logits_TV = teacher()
    spec, leaves = spec_of(case), make_leaves(dtype=DTYPES[dtype])
    narrow = make_batch(dtype=DTYPES["float64" if dtype == "float64" else "float32"])
    chunk_tokens = 5 if dtype == "float64" else None
    output, gradients = fused(spec, leaves, narrow, signal, chunk_tokens)
    loss, expected = plain(spec, converted(leaves, torch.float64), make_batch(), logits_TV)
    assert distance(output.loss, loss) < WITHIN[dtype]
    for name, gradient in expected.items():
        assert gradient.norm() > 1e-4
        assert gradients[name].dtype == DTYPES[dtype]
        assert distance(gradients[name], gradient) < WITHIN[dtype], name


#: sampling temperatures of two sources; the third one is of no row
SEVERAL = (0.8, 1.3, 2.0)


def with_two_temperatures(batch: Batch, vocabulary: int = V) -> Batch:
    """The documents of a batch have the temperatures in turn, and their tokens were sampled at these."""
    number_T = (batch.document_T % 2).to(batch.weights_T.dtype)
    leaves = make_leaves(len(number_T), vocabulary)
    logits_TV = OutputHead(leaves.weight, leaves.bias).logits(leaves.hidden)
    at_first, at_second = (at(torch.log_softmax(logits_TV / value, 1), batch.labels_T) for value in SEVERAL[:2])
    old_T = batch.per_token[OLD_LOG_PROBS] + torch.where(number_T == 0, 0.0, at_second - at_first)
    number_T = number_T.masked_fill(~batch.is_sampled_T, math.nan)  # undefined, as everything of these rows
    return replace(batch, per_token=batch.per_token | {OLD_LOG_PROBS: old_T, NUMBER: number_T})


@pytest.mark.parametrize("case", SPECS)
def test_rows_at_two_sampling_temperatures_as_in_plain_autograd(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signal, logits_TV = teacher()
    spec, leaves = replace(spec_of(case), sampling_temperatures=SEVERAL), make_leaves()
    batch = with_two_temperatures(make_batch())
    loss, expected = plain(spec, leaves, batch, logits_TV)
    plain_ratio = float(fused(replace(spec, sampling_temperatures=()), leaves, batch, signal)[0].metrics["log_ratio"])
    for devices in (set(), {"cpu"}):  # also with the work on rows that is compiled on a GPU
        monkeypatch.setattr(chunks, "ROW_DEVICES", devices)
        output, gradients = fused(spec, leaves, batch, signal, chunk_tokens=5)
        assert distance(output.loss, loss) < WITHIN["float64"]
        assert float(output.metrics["log_ratio"]) != pytest.approx(plain_ratio, rel=1e-3)
        for name, gradient in expected.items():
            assert distance(gradients[name], gradient) < WITHIN["float64"], name


def test_rows_of_one_temperature_are_the_plain_objective_to_the_bit() -> None:
    signal, _ = teacher()
    batch = make_batch()
    for case in SPECS:
        output, gradients = fused(spec_of(case), make_leaves(), batch, signal)
        several = replace(spec_of(case), sampling_temperatures=(SAMPLING, 2.0))
        zeros = replace(batch, per_token=batch.per_token | {NUMBER: torch.zeros(T, dtype=torch.float64)})
        same, same_gradients = fused(several, make_leaves(), zeros, signal)
        assert torch.equal(output.loss, same.loss), case
        assert all(torch.equal(gradients[name], same_gradients[name]) for name in gradients), case
    with pytest.raises(ValueError, match="sampling is missing in per_token"):
        fused(several, make_leaves(), batch, signal)
    beyond = replace(batch, per_token=batch.per_token | {NUMBER: torch.full((T,), 2.0, dtype=torch.float64)})
    with pytest.raises(ValueError, match="up to 2: expected whole numbers from 0 to 1"):
        fused(several, make_leaves(), beyond, signal)


def test_cross_entropy_counts_where_the_student_has_not_sampled_and_sampled_terms_where_it_has() -> None:
    signal, _ = teacher()
    batch = make_batch()
    counts_T = (batch.labels_T >= 0) & (batch.weights_T != 0)
    sampled_T = batch.is_sampled_T
    for text, expected_T in (
        ("cross_entropy + 1e-3*z_loss", counts_T & ~sampled_T),
        ("sampled_kl", counts_T & sampled_T),
        ("policy_gradient", counts_T & sampled_T),
        ("reverse_kl", batch.weights_T != 0),
        ("entropy", batch.weights_T != 0),
    ):
        spec = replace(parse_objective(text), sampling_temperature=SAMPLING)
        output, gradients = fused(spec, make_leaves(), batch, signal)
        assert torch.equal((gradients["hidden"] != 0).any(1), expected_T), text
        (name,) = output.per_token.keys() - {"log_ratio"}
        assert torch.equal(output.per_token[name] != 0, expected_T), text
        assert output.metrics["tokens"] == (batch.weights_T != 0).sum()


def test_a_batch_without_sampled_tokens_gives_an_exact_zero() -> None:
    signal, _ = teacher()
    batch = make_batch()
    none = replace(batch, per_token=batch.per_token | {IS_SAMPLED: torch.zeros(T, dtype=torch.float64)})
    empty = replace(batch, weights_T=torch.zeros(T, dtype=torch.float64))
    spec = replace(
        parse_objective("sampled_kl + policy_gradient(teacher_kl=1)"), discount=0.9, correction=Correction("masked")
    )
    for variant in (none, empty):
        output, gradients = fused(spec, make_leaves(), variant, signal)
        assert output.loss == 0
        assert output.metrics["sampled"] == output.metrics["log_ratio"] == 0
        assert all((gradient == 0).all() for gradient in gradients.values())


def test_a_token_that_has_become_impossible() -> None:
    """log q is −inf at a sampled token: a correction gives it weight 0, whatever its estimate would be."""
    batch = make_batch()
    row = int(batch.is_sampled_T.nonzero()[0])
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


@pytest.mark.parametrize(
    ("text", "vocabulary"),
    [
        ("cross_entropy + reverse_kl", V),
        ("0.3*cross_entropy + jsd(0.3) + 0.1*entropy", V),
        pytest.param("cross_entropy + reverse_kl", 2063, marks=pytest.mark.slow),
    ],
)
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
    assert_equal_tensors(gradients, expected)


def test_the_monitor_reports_each_rows_ratio() -> None:
    batch, leaves = make_batch(), make_leaves()
    batch = replace(batch, weights_T=(batch.weights_T != 0).double())
    log_q_TV = torch.log_softmax(OutputHead(leaves.weight, leaves.bias).logits(leaves.hidden) / SAMPLING, 1)
    counts_T = batch.is_sampled_T & (batch.weights_T != 0)
    log_q_T = log_q_TV.gather(1, batch.labels_T.clamp_min(0)[:, None])[:, 0]
    expected_T = torch.where(counts_T, (log_q_T - batch.per_token[OLD_LOG_PROBS]).abs(), 0.0)
    spec = replace(parse_objective("cross_entropy"), sampling_temperature=SAMPLING)
    output, gradients = fused(spec, leaves, batch, None)
    assert distance(output.per_token["log_ratio"], expected_T) < 1e-12
    torch.testing.assert_close(output.metrics["log_ratio"], expected_T.sum(), rtol=1e-12, atol=0)
    assert output.metrics["sampled"] == counts_T.sum()
    assert (gradients["hidden"][batch.is_sampled_T] == 0).all()


def test_further_depths_have_what_is_left_of_an_objective() -> None:
    signal, _ = teacher()
    batch, leaves = make_batch(), make_leaves()
    context = batch.targets(signal).shift_for_mtp(torch.arange(T)[None] % 13, 1)
    head = OutputHead(leaves.weight, leaves.bias)
    both = StepLoss(parse_objective("cross_entropy + 0.1*reverse_kl + policy_gradient + sampled_kl"))
    output = both(hidden_states=leaves.hidden[None], head=head, context=context, depth=1)
    assert output.per_token.keys() == {"cross_entropy", "reverse_kl"}
    shifted = context.at(1)
    is_other_T = (shifted.per_token[IS_SAMPLED] == 0) & (shifted.labels_T >= 0) & (shifted.weights_T != 0)
    assert torch.equal(output.per_token["cross_entropy"] != 0, is_other_T)
    alone = StepLoss(parse_objective("policy_gradient + sampled_kl"))
    with pytest.raises(
        ValueError, match=r"policy gradient .* at the depths of multi-token prediction after the first: expected"
    ):
        alone(hidden_states=leaves.hidden[None], head=head, context=context, depth=1)
