"""An objective for each origin of a document, in one pass, against plain autograd on the rows of each origin.

T tokens, V vocabulary.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    DTYPES,
    Leaves,
    T,
    converted,
    distance,
    make_leaves,
    make_signal,
    rebuilt_terms,
    trainable,
)
from kit.rollout_cases import NORMALIZER, SAMPLING, Batch, fused, make_batch
from kit.tensors import Largest, assert_equal_tensors
from torch import Tensor

from stillhouse.engine.loss import StepLoss
from stillhouse.loops.step_metrics import step_metrics
from stillhouse.objective import TEACHER, OutputHead, Signal
from stillhouse.objective.metrics import IS_SAMPLED, POLICY_VERSION
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.sampled_tokens import origin_masks
from stillhouse.objective.spec import ObjectiveSpec, parse_objective

#: the expressions of each origin, and the signal of the teacher
CASES: dict[str, tuple[dict[str, str], str]] = {
    "distillm": ({"dataset": "skew_forward_kl(0.1)", "student": "skew_reverse_kl(0.1)"}, "full"),
    "top-k": ({"dataset": "0.3*cross_entropy + jsd(0.5)", "student": "reverse_kl"}, "bucket"),
    "a teacher's completions": ({"dataset": "cross_entropy + 1e-2*z_loss", "teacher": "forward_kl"}, "mixture"),
    "three origins": (
        {
            "dataset": "cross_entropy + forward_kl",
            "student": "0.5*forward_kl + sampled_kl(k2) - 0.01*entropy",
            "teacher": "0.3*cross_entropy + 0.1*total_variation",
        },
        "full",
    ),
}
#: as in test_objective_rollouts.py
WITHIN = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 4e-3}


def batch_of(dtype: torch.dtype = torch.float64) -> Batch:
    """A batch whose rows come from all three origins, with the versions that `step_documents` gives them."""
    batch = make_batch(dtype=dtype)
    of_teacher_T = (batch.per_token[IS_SAMPLED] == 0) & (torch.arange(T) % 8 == 1)
    versions_T = torch.where(of_teacher_T | (batch.per_token[IS_SAMPLED] != 0), 0.0, -1.0)
    return replace(batch, per_token=batch.per_token | {POLICY_VERSION: versions_T})


def spec_of(case: str) -> ObjectiveSpec:
    return ObjectiveSpec.from_origins(
        {
            origin: replace(parse_objective(text), sampling_temperature=SAMPLING)
            for origin, text in CASES[case][0].items()
        }
    )


def plain(spec: ObjectiveSpec, leaves: Leaves, batch: Batch, signal: Signal) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of plain objectives, each on the rows of its origin, from whole logits."""
    copies = trainable(leaves)
    head = OutputHead(copies["weight"], copies.get("bias"))
    masks, loss = origin_masks(batch.labels_T, batch.per_token), torch.zeros((), dtype=torch.float64)
    for origin, part in spec.by_origin.items():
        terms = part.terms(batch.labels_T, {TEACHER: signal}, batch.per_token, student=head)
        weights_T = batch.weights_T * masks[origin]
        loss = loss + dense_objective(copies["hidden"], head, terms, weights_T=weights_T, normalizer=NORMALIZER).loss
    gradients = torch.autograd.grad(loss, list(copies.values()))
    return loss.detach(), dict(zip(copies, gradients, strict=True))


@pytest.mark.parametrize("rows_are_compiled", [False, True])
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("case", CASES)
def test_rows_have_the_gradient_of_their_origins_objective(case: str, dtype: str, rows_are_compiled: bool) -> None:
    """rows_are_compiled: the terms are rebuilt from the tensors of a chunk, as on a GPU."""
    spec, leaves = spec_of(case), make_leaves(dtype=DTYPES[dtype])
    narrow = "float64" if dtype == "float64" else "float32"
    signal = make_signal(CASES[case][1])
    with rebuilt_terms() if rows_are_compiled else nullcontext(), torch._dynamo.config.patch(disable=True):
        output, gradients = fused(spec, leaves, batch_of(DTYPES[narrow]), converted(signal, DTYPES[narrow]), 9)
    loss, expected = plain(spec, converted(leaves, torch.float64), batch_of(), signal)
    assert distance(output.loss, loss) < WITHIN[dtype]
    for name, gradient in expected.items():
        assert gradient.norm() > 1e-4
        assert distance(gradients[name], gradient) < WITHIN[dtype], name


def test_equal_objectives_are_the_plain_one_to_the_bit() -> None:
    text = "0.3*cross_entropy + 0.7*jsd(0.5)"
    spec = ObjectiveSpec.from_origins(dict.fromkeys(("dataset", "student", "teacher"), parse_objective(text)))
    batch, signal = batch_of(torch.float32), make_signal("full", dtype=torch.float32)
    output, gradients = fused(spec, make_leaves(dtype=torch.float32), batch, signal)
    plain_output, expected = fused(parse_objective(text), make_leaves(dtype=torch.float32), batch, signal)
    assert torch.equal(output.loss, plain_output.loss)
    assert_equal_tensors(output.metrics, plain_output.metrics)
    assert_equal_tensors(gradients, expected)


def test_one_value_for_several_origins_has_the_plain_gradient_to_the_bit() -> None:
    """Two terms with one divergence, apart by their weights: each row has the coefficients of one term."""
    parts = {"dataset": parse_objective("forward_kl"), "student": parse_objective("forward_kl")}
    batch, signal = batch_of(torch.float32), make_signal("full", dtype=torch.float32)
    batch = replace(batch, per_token=batch.per_token | {POLICY_VERSION: batch.per_token[POLICY_VERSION].fill_(-1)})
    output, gradients = fused(ObjectiveSpec(by_origin=parts), make_leaves(dtype=torch.float32), batch, signal)
    plain_output, expected = fused(parts["dataset"], make_leaves(dtype=torch.float32), batch, signal)
    assert distance(output.loss, plain_output.loss) < 1e-6
    assert_equal_tensors(gradients, expected)


def test_the_objectives_of_all_origins_share_one_pass() -> None:
    def products(spec: ObjectiveSpec) -> int:
        with Largest() as recorder:
            fused(spec, make_leaves(), batch_of(), make_signal("full"), 20)
        return recorder.products

    assert products(spec_of("distillm")) == products(parse_objective("forward_kl"))


def test_metrics_are_means_over_the_tokens_of_their_origin() -> None:
    spec, batch, signal = spec_of("distillm"), batch_of(), make_signal("full")
    output, _ = fused(spec, make_leaves(), batch, signal)
    sums = {name: float(value) for name, value in output.metrics.items()} | {"loss": float(output.loss.detach())}
    metrics = step_metrics(sums, spec, [])
    masks = origin_masks(batch.labels_T, batch.per_token)
    for origin, text in CASES["distillm"][0].items():
        weights_T = batch.weights_T * masks[origin]
        plain_spec: Any = parse_objective(text)
        terms = plain_spec.terms(batch.labels_T, {TEACHER: signal})
        leaves = make_leaves()
        expected = dense_objective(leaves.hidden, OutputHead(leaves.weight, leaves.bias), terms, weights_T=weights_T)
        mean = float(expected.loss) / int((weights_T != 0).sum())
        assert metrics[f"loss/{text}/{origin}_nats_per_token"] == pytest.approx(mean, rel=1e-9)
        assert f"train/student_entropy_nats/{origin}" in metrics
        assert metrics[f"train/agreement/{origin}"] <= 1


def test_a_batch_that_does_not_say_who_wrote_it_is_refused() -> None:
    batch = make_batch()
    processor = StepLoss(spec_of("distillm"), NORMALIZER)
    leaves = make_leaves()
    with pytest.raises(ValueError, match="policy_version is missing in per_token"):
        processor(
            hidden_states=leaves.hidden[None],
            head=OutputHead(leaves.weight),
            context=batch.targets(make_signal("full")),
        )


def test_without_rollouts_all_rows_are_of_the_dataset() -> None:
    batch, signal = replace(batch_of(), per_token={}), make_signal("full")
    _, gradients = fused(spec_of("distillm"), make_leaves(), batch, signal)
    _, expected = fused(parse_objective("skew_forward_kl(0.1)"), make_leaves(), batch, signal)
    assert_equal_tensors(gradients, expected)
