"""Weights gathered in bfloat16 under FSDP: the gradients are as exact as autocast's and are summed in float32."""

from dataclasses import replace

import pytest
import torch
from kit import slow
from kit.gathering import LOSS_FACTORS, Errors, compare_gathered, sum_over_ranks
from kit.parity_cases import Case
from kit.shard_ranks import Failure, pool_of_meshes

from stillhouse.parallel import Degrees, Layout

LIMIT = 120.0


def layout(**degrees: int) -> Layout:
    return Layout(Degrees(**degrees), gather_dtype=torch.bfloat16)


#: hidden states in bfloat16 between the layers
RESIDUAL = Layout(residual_dtype=torch.bfloat16, autocast=torch.bfloat16)
CASES = [
    Case(layout(fsdp=2)),
    Case(RESIDUAL),
    Case(replace(RESIDUAL, degrees=Degrees(pipeline=2)), micro_batches=4),
    *(
        slow(case)
        for case in (
            Case(layout(fsdp=2), "llama"),
            Case(layout(fsdp=2, pipeline=2)),
            Case(layout(fsdp=2, tensor=2)),
            Case(layout(fsdp=2, pipeline=2), "llama"),
            Case(layout(replicate=2, fsdp=2)),
            Case(layout(context=2)),
            Case(layout(tensor=2)),  # nothing is gathered: the products alone are bfloat16
            Case(layout(pipeline=2)),
            Case(layout(fsdp=2), checkpointing=True),
            Case(layout(fsdp=2), lora="base"),
            Case(layout(fsdp=2, pipeline=2), lora="base"),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_as_near_to_float32s_as_autocasts(case: Case) -> None:
    (answer,) = pool_of_meshes(case.layout.degrees.processes).run(compare_gathered, [case], limit=LIMIT)
    assert not isinstance(answer, Failure), answer.text
    errors: list[tuple[Errors, Errors]] = [of_rank for of_rank in answer if of_rank is not None]
    assert len(errors) == case.layout.degrees.processes
    for rank, (single, sharded) in enumerate(errors):
        assert 1e-3 < single.total < 0.1
        assert sharded.total <= 1.5 * single.total + 1e-3, rank
        if case.layout.residual_dtype is not None:
            assert sharded.total > 1.05 * single.total, "the hidden states were not rounded"
        # a wider tolerance for single parameters, because chance matters more in the 16 numbers of a norm
        bad = {name: error for name, error in sharded.of.items() if not error <= 2 * single.of[name] + 2e-3}
        assert not bad, (rank, bad)


@pytest.mark.parametrize(("family", "micro_batches"), [("qwen3", 1), ("qwen3", 2), ("llama", 2)])
def test_gradients_are_summed_in_float32(family: str, micro_batches: int) -> None:
    (answer,) = pool_of_meshes(2).run(sum_over_ranks, [Case(layout(fsdp=2), family, micro_batches)], limit=LIMIT)
    assert not isinstance(answer, Failure), answer.text
    for dtypes, gradient_VD in (of_rank for of_rank in answer if of_rank is not None):
        # a tied weight is gathered together with the embedding, in float32
        assert dtypes == {torch.bfloat16 if family == "qwen3" else torch.float32}
        expected = micro_batches * sum(LOSS_FACTORS)
        assert float(torch.tensor(expected).bfloat16()) != expected
        assert torch.equal(gradient_VD, torch.full_like(gradient_VD, expected))
