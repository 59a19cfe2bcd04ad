"""Jobs for ranks: the last node of the combined schedule's plan, with a flat and with a structured result."""

from typing import Any

import torch
import torch.distributed as dist
from kit.megatron_jobs import Case, micro_batches, normalizer, top_k
from kit.megatron_models import (
    B,
    MicroBatch,
    S,
    build,
    laid_out,
)
from kit.shard_ranks import Rank
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from stillhouse.engine.loss import StepLoss
from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.models.processor_targets import DistillTargets
from stillhouse.objective import TEACHER


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
