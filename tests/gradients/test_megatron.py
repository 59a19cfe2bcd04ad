"""Output processors in megatron-core's GPTModel: gradients under every layout against those of one rank's logits."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test` does")

from kit.megatron_jobs import Case, compare
from kit.megatron_models import ROWS_V, B, Layout, S
from kit.megatron_mtp_jobs import compare_mtp
from kit.megatron_plan_jobs import plan, plan_on_a_gpu
from kit.megatron_processor_jobs import (
    compare_log_probs,
    compare_tap,
    gather_of_weights,
    half,
    plain_with_depths,
    refusals,
)
from kit.shard_ranks import RankPool
from megatron.core.models.hybrid.hybrid_model import HybridModel

from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.models import processors
from stillhouse.tools.parity import worst

CASES = [
    Case(Layout()),
    Case(Layout(tied=True), "0.3*cross_entropy + 0.7*jsd(0.5)", "full", 4),
    Case(Layout(tensor=2), "forward_kl", "full"),
    Case(Layout(tensor=2, tied=True), "reverse_kl", "full"),
    Case(Layout(tensor=2, sequence=True), "0.9*forward_kl + 0.1*reverse_kl", "full", 2),
    Case(Layout(tensor=2, sequence=True, tied=True), "cross_entropy + jsd(0.1)", "topk"),
    Case(Layout(pipeline=2), "0.3*cross_entropy + 0.7*jsd(0.5)", "full", 4),
    Case(Layout(pipeline=2, tied=True), "forward_kl", "topk", 4),
    Case(Layout(context=2), "jsd(0.5)", "topk", 2),
    Case(Layout(packed=True), "reverse_kl", "full"),
    Case(Layout(packed=True, tensor=2, sequence=True), "jsd(0.5)", "full"),
]
#: a tied head, sequence parallelism, pipeline, context and packing, each once
QUICK = [*CASES[4:6], *CASES[7:10]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
def test_gradients_are_those_of_logits_on_one_rank(ranks: RankPool, case: Case) -> None:
    differences = ranks.call(compare, case, limit=120)
    assert any(difference.loss is not None for difference in differences)
    for difference in differences:
        assert difference.loss is None or difference.loss < 1e-5
        assert worst(difference.gradients.items())[1] < 1e-5, difference.gradients
        assert difference.largest < B * S * ROWS_V / case.layout.tensor / case.layout.context


@pytest.mark.parametrize(
    "layout",
    [
        Layout(depths=2),
        Layout(depths=1, tensor=2, sequence=True, tied=True),
        Layout(depths=2, packed=True),
        Layout(depths=2, context=2),
        Layout(depths=2, detached=True, tied=True),
        Layout(depths=1, mup=True),
    ],
    ids=lambda layout: layout.name,
)
def test_cross_entropy_at_every_depth_is_megatrons_own(ranks: RankPool, layout: Layout) -> None:
    for answer in ranks.call(compare_mtp, layout, limit=120):
        assert len(answer.losses) == 1 + layout.depths
        for theirs, ours in answer.losses:
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert worst(answer.gradients.items())[1] < 1e-5, answer.gradients


@pytest.mark.parametrize("layout", [Layout(), Layout(depths=2, experts=2)], ids=lambda layout: layout.name)
def test_a_schedule_plan_takes_the_flat_result_and_returns_its_gradient(ranks: RankPool, layout: Layout) -> None:
    errors = ranks.call(plan, Case(layout, "cross_entropy + jsd(0.5)"), limit=120)
    assert worst(enumerate(errors))[1] < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_last_node_of_a_schedule_plan_runs_backward_on_a_gpu(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        case = Case(Layout(), "cross_entropy + jsd(0.5)")
        assert pool.submit(plan_on_a_gpu, case, str(tmp_path / "store")).result() < 1e-5


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, sequence=True)], ids=lambda layout: layout.name)
def test_log_probs_of_chosen_tokens_are_those_of_logits(ranks: RankPool, layout: Layout) -> None:
    for values, gradients in ranks.call(compare_log_probs, layout, limit=120):
        assert values < 2e-5
        assert gradients < 1e-5


def test_a_model_that_would_not_call_the_processor_is_refused() -> None:
    class Silent(nn.Module):
        """A model that accepts a processor but never calls it."""

        def forward(self, input_ids: Any, output_processor: Any = None, **_: Any) -> None: ...

    patched = Silent()
    patched.forward = lambda *_: None
    for model in (Silent(), patched, HybridModel.__new__(HybridModel)):
        with pytest.raises(
            ValueError, match=rf"{type(model).__name__} of megatron-core 0\.\d+.*does not call an output"
        ):
            MegatronProcessor(model, processors.hidden_states)


def test_a_flat_result_of_something_else_is_refused() -> None:
    class Hooked(nn.Module):
        def forward(self, output_processor: Any) -> None:
            output_processor()

    hook = MegatronProcessor(Hooked(), lambda **_: {"loss": 1.0}, flat=True)
    layer = nn.Linear(2, 3, bias=False)
    layer.sequence_parallel, layer.tp_group = False, None
    with pytest.raises(ValueError, match="returned dict: expected an ObjectiveOutput, LogProbs or a tensor"):
        hook(
            hidden_states=torch.zeros(1, 1, 2),
            output_layer=layer,
            output_weight=None,
            context=None,
            scale_logits=float,
        )


def test_a_models_own_objective_beside_the_processor_is_refused(ranks: RankPool) -> None:
    with pytest.raises(
        AssertionError, match=r"GPTModel of megatron-core .* with mtp_num_layers: Megatron would also"
    ):
        ranks.call(plain_with_depths, limit=120)


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_gradient_of_tapped_hidden_states_is_that_of_one_rank(ranks: RankPool, sequence: bool) -> None:
    errors = ranks.call(compare_tap, Layout(tensor=2, sequence=sequence), limit=120)
    assert worst(enumerate(errors))[1] < 1e-5


def test_log_probs_come_through_megatrons_wrapper_of_half_precision(ranks: RankPool) -> None:
    for name, dtype, distance in ranks.call(half, Layout(), limit=120):
        assert (name, dtype) == ("LogProbs", "torch.float32")
        assert distance < 0.05


def test_weights_that_are_still_gathered_are_waited_for(ranks: RankPool) -> None:
    for waited, distance in ranks.call(gather_of_weights, Layout(), limit=120):
        assert waited
        assert distance < 1e-5


def test_settings_that_would_fail_later_are_refused(ranks: RankPool) -> None:
    for bare, dtensor_weight, deferred in ranks.call(refusals, limit=120):
        assert "expected a MegatronProcessor with its depths" in bare
        assert deferred.startswith("defer_embedding_wgrad_compute=True")
        assert dtensor_weight.startswith("the output layer's weight is a DTensor")
