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

from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist
from kit.megatron_jobs import (
    Case,
    compare,
    compare_log_probs,
    compare_tap,
    gather_of_weights,
    half,
    micro_batches,
    normalizer,
    plain_with_depths,
    refusals,
    top_k,
)
from kit.megatron_models import ROWS_V, B, Layout, MicroBatch, S, build, context_rows, laid_out, micro_batch
from kit.shard_ranks import Rank, RankPool
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from stillhouse.engine.loss import StepLoss
from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.models import processors
from stillhouse.models.processors import DistillTargets, Targets
from stillhouse.objective import TEACHER
from stillhouse.tools.parity import worst


def plan(rank: Rank, case: Case) -> float:
    """A job: the relative difference of the last node's input gradient between a flat and a structured result."""
    with laid_out(case.layout):
        return _flat_against_structured(case, torch.device("cpu"))


def plan_on_a_gpu(case: Case, store: str) -> float:
    """Run `plan` in a separate process, with the node's backward on CUDA streams."""
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    set_streams()
    return _flat_against_structured(case, torch.device("cuda"))


def _flat_against_structured(case: Case, device: torch.device) -> float:
    model, (batch,) = build(case.layout, 0).to(device), micro_batches(case)
    batch = MicroBatch(*(part.to(device) for part in (batch.input_ids_BS, batch.position_ids_BS, batch.labels_BS)))
    context = DistillTargets(batch.labels_BS, signals={TEACHER: top_k(batch)})
    context = context.shift_for_mtp(batch.position_ids_BS, case.layout.depths)
    depths = 1 + case.layout.depths
    hidden = torch.randn(depths * S, B, 32, generator=torch.Generator().manual_seed(0)).to(device)
    gradients, names = [], []
    for flat in (False, True):
        hook = MegatronProcessor(model, StepLoss(case.spec, normalizer([batch])), flat=flat)
        node, hidden_states = last_node(model, batch, hook, context), hidden.clone().requires_grad_()
        if flat:
            made = node.forward_impl(hidden_states) if device.type == "cpu" else node.forward(hidden_states)
            assert isinstance(made, tuple)
            outputs = hook.unpack(made[0]) if depths > 1 else [hook.unpack(made[0])]
            grad = torch.autograd.grad(sum(output.loss for output in outputs), made)
            back = node.default_backward_func(made, grad) if device.type == "cpu" else node.backward(grad)
            gradients.append(hidden_states.grad if device.type == "cpu" else back)
        else:
            made = node.forward_impl(hidden_states)
            outputs = made if depths > 1 else [made]
            sum(output.loss for output in outputs).backward()
            gradients.append(hidden_states.grad)
        names.append([list(output.metrics) for output in outputs])
    assert names[0] == names[1]
    return float((gradients[0] - gradients[1]).norm() / gradients[0].norm())


def last_node(model: GPTModel, batch: MicroBatch, hook: MegatronProcessor, context: Any) -> Any:
    options = {"output_processor": hook, "output_processor_context": context}
    plan = model.build_schedule_plan(batch.input_ids_BS, batch.position_ids_BS, None, **options)
    plan.pre_process.forward_impl()
    return plan.post_process


@dataclass
class MtpDifference:
    """losses: the mean cross-entropy of each depth, of Megatron and of the processor. gradients: relative errors."""

    losses: list[tuple[float, float]]
    gradients: dict[str, float]


def compare_mtp(rank: Rank, layout: Layout) -> MtpDifference:
    """A job: compute the cross-entropy at every depth with Megatron's own loss and with a processor."""
    with laid_out(layout):
        model = build(layout, 0)
        batch = micro_batch(0, layout.packed)
        # Megatron takes a mask and needs valid labels everywhere
        mask_BS = (batch.labels_BS >= 0).float()
        starts_BS = batch.position_ids_BS
        if batch.packed is not None:
            borders = batch.packed.cu_seqlens_q.long()
            starts_BS = torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)])[None]
        targets = Targets(batch.labels_BS, mask_BS).shift_for_mtp(starts_BS, layout.depths)
        if layout.context > 1:
            rows_S = context_rows(layout.context, S)[parallel_state.get_context_parallel_rank()]
            batch, mask_BS = batch.part(rows_S), mask_BS[:, rows_S]
            targets = targets.rows((S * torch.arange(B)[:, None] + rows_S).flatten())
        MTPLossLoggingHelper.tracker.clear()
        inputs = {"input_ids": batch.input_ids_BS, "position_ids": batch.position_ids_BS, "attention_mask": None}
        inputs |= {"packed_seq_params": batch.packed}
        loss_BS = model(**inputs, labels=batch.labels_BS.clamp(min=0), loss_mask=mask_BS)
        (loss_BS * mask_BS).sum().backward()
        expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        theirs = [(loss_BS * mask_BS).sum() / mask_BS.sum(), *MTPLossLoggingHelper.tracker["loss_values"]]
        model.zero_grad()
        hook = MegatronProcessor(model, processors.cross_entropy())
        made = model(**inputs, output_processor=hook, output_processor_context=targets)
        counts = [(targets.at(depth).labels_T >= 0).sum() for depth in range(1 + layout.depths)]
        # calculate_per_token_loss scales the mean of a depth by the number of the main head's tokens
        scales = [1.0] + [counts[0] / count / layout.depths for count in counts[1:]]
        sum(scale * output.loss for scale, output in zip(scales, made, strict=True)).backward()
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        return MtpDifference(
            [(float(a), float(b.loss / count)) for a, b, count in zip(theirs, made, counts, strict=True)],
            {
                name: float((weight.grad - expected[name]).norm() / torch.maximum(expected[name].norm(), 1e-3 * norm))
                for name, weight in model.named_parameters()
            },
        )


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

    class Dropping(Silent):
        """The `_postprocess` of Megatron-LM#4942: it has the arguments, and computes logits."""

        def forward(self, input_ids: Any, output_processor: Any = None, output_processor_context: Any = None) -> None:
            self._postprocess(input_ids, output_processor, output_processor_context)

        def _postprocess(self, input_ids: Any, output_processor: Any, output_processor_context: Any) -> None: ...

    patched = Silent()
    patched.forward = lambda *_: None
    for model in (Silent(), Dropping(), patched, HybridModel.__new__(HybridModel)):
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
        AssertionError, match=r"GPTModel of megatron-core .* with mtp_num_layers: Megatron would minimise"
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
        assert "expected a MegatronProcessor, for all depths" in bare
        assert deferred.startswith("defer_embedding_wgrad_compute=True")
        assert dtensor_weight.startswith("the output layer's weight is a DTensor")
