"""Weights gathered in bfloat16 under FSDP: the gradients are as exact as autocast's and are summed in float32."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kit import slow
from kit.parity_cases import ONE, Case, Side, alias, batches, mesh_of
from kit.shard_ranks import Rank, on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from stillhouse.data import StepMicroBatches
from stillhouse.models.dtensors import gathered_tensor
from stillhouse.objective import OutputHead
from stillhouse.parallel import Degrees, Layout, Mesh, Runner, StageInputs
from stillhouse.tools.parity import relative_difference

#: the factor of each rank's loss; bfloat16 cannot represent the sum of the factors
LOSS_FACTORS = (1.0, 2.0**-9)


@dataclass(frozen=True)
class Errors:
    """Errors relative to the float32 gradients. of: by parameter. total: of the whole gradient."""

    of: dict[str, float]
    total: float


@dataclass
class LossOutput:
    loss: Tensor


def compare_gathered(rank: Rank, case: Case) -> tuple[Errors, Errors]:
    """A job: return the errors of autocast in one process and under the layout, for this rank's parameters."""
    mesh = mesh_of(case.layout.degrees)
    sharded = gradients(case, case.layout, mesh, bf16=True)
    reference, single = (
        {name: unsharded[alias(name, unsharded)] for name in sharded}
        for unsharded in (gradients(case, Layout(), ONE, bf16=bf16) for bf16 in (False, True))
    )
    return errors(single, reference), errors(sharded, reference)


def gradients(case: Case, layout: Layout, mesh: Mesh, *, bf16: bool) -> dict[str, Tensor]:
    side = Side.of(case, layout, mesh, bf16=bf16)
    runner = side.runner
    set_uneven_norm_weights(runner)
    side.step(*next(side.requests([StepMicroBatches(batches(case, 0))])))
    runner.clip(0.0)
    named = {name: parameter.grad for name, parameter in runner.named_parameters() if parameter.grad is not None}
    assert {gradient.dtype for gradient in named.values()} == {torch.float32}
    return {name: gathered_tensor(gradient) for name, gradient in named.items()}


@torch.no_grad()
def set_uneven_norm_weights(runner: Runner) -> None:
    """Give the norms weights that are not 1, because 1 is the same number in every dtype."""
    for _, parameter in runner.named_parameters():
        if parameter.dim() == 1:
            factors = torch.linspace(0.9, 1.1, len(parameter))
            if isinstance(parameter, DTensor):
                factors = distribute_tensor(factors, parameter.device_mesh, parameter.placements)
            parameter.mul_(factors)


def errors(values: dict[str, Tensor], reference: dict[str, Tensor]) -> Errors:
    norm = float(torch.stack([gradient.norm() for gradient in reference.values()]).norm())
    of = {name: relative_difference(value, reference[name], 1e-3 * norm) for name, value in values.items()}
    away = torch.stack([(value - reference[name]).norm() for name, value in values.items()])
    return Errors(of, float(away.norm()) / norm)


def sum_over_ranks(rank: Rank, case: Case) -> tuple[set[torch.dtype], Tensor]:
    """A job: return the head's dtype in its forward, and its gradient.

    The loss of each rank is the sum of the head's weight times the rank's factor.
    """
    mesh = mesh_of(case.layout.degrees)
    seen: set[torch.dtype] = set()

    def scaled_head_sum(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> LossOutput:
        seen.add(head.weight_VD.dtype)
        return LossOutput(head.weight_VD.sum() * LOSS_FACTORS[rank.number] + 0 * hidden_states.sum())

    side = Side.of(case, case.layout, mesh)
    step = side.shard(StepMicroBatches(batches(case, 0)))
    signals = side.source.request(step).result()
    side.runner.forward_backward(
        [StageInputs(*inputs, scaled_head_sum, autocast=torch.bfloat16) for inputs in zip(step, signals, strict=True)]
    )
    grad = side.engine.student.decoders[0].output_weight.grad
    assert grad is not None
    return seen, gathered_tensor(grad)


def layout(**degrees: int) -> Layout:
    return Layout(Degrees(**degrees), gather_dtype=torch.bfloat16)


#: hidden states in bfloat16 between the layers
RESIDUAL = Layout(residual_dtype=torch.bfloat16, autocast=torch.bfloat16)
QUICK = [Case(layout(fsdp=2)), Case(RESIDUAL), Case(replace(RESIDUAL, degrees=Degrees(pipeline=2)), micro_batches=4)]
SLOW = [
    *(Case(layout(fsdp=2, **degrees)) for degrees in ({"pipeline": 2}, {"tensor": 2}, {"replicate": 2})),
    *(Case(layout(**{axis: 2})) for axis in ("context", "pipeline")),
    Case(layout(tensor=2)),  # nothing is gathered: the products alone are bfloat16
    *(Case(layout(fsdp=2, **degrees), "llama") for degrees in ({}, {"pipeline": 2})),
    *(Case(layout(fsdp=2, **degrees), lora="base") for degrees in ({}, {"pipeline": 2})),
    Case(layout(fsdp=2), checkpointing=True),
]


@pytest.mark.parametrize("case", [*QUICK, *map(slow, SLOW)], ids=lambda case: case.name)
def test_gradients_are_as_near_to_float32s_as_autocasts(case: Case) -> None:
    for rank, (single, sharded) in enumerate(on_ranks(compare_gathered, case.layout.degrees.processes, case)):
        assert 1e-3 < single.total < 0.1
        assert sharded.total <= 1.5 * single.total + 1e-3, rank
        if case.layout.residual_dtype is not None:
            assert sharded.total > 1.05 * single.total, "the hidden states were not rounded"
        # a wider tolerance for single parameters, because chance matters more in the 16 numbers of a norm
        bad = {name: error for name, error in sharded.of.items() if not error <= 2 * single.of[name] + 2e-3}
        assert not bad, (rank, bad)


@pytest.mark.parametrize(("family", "micro_batches"), [("qwen3", 1), ("qwen3", 2), ("llama", 2)])
def test_gradients_are_summed_in_float32(family: str, micro_batches: int) -> None:
    for dtypes, gradient_VD in on_ranks(sum_over_ranks, 2, Case(layout(fsdp=2), family, micro_batches)):
        # a tied weight is gathered together with the embedding, in float32
        assert dtypes == {torch.bfloat16 if family == "qwen3" else torch.float32}
        expected = micro_batches * sum(LOSS_FACTORS)
        assert float(torch.tensor(expected).bfloat16()) != expected
        assert torch.equal(gradient_VD, torch.full_like(gradient_VD, expected))
