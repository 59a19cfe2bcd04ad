"""The optimizer of a GPU on a CPU: torch's fused AdamW, which skips a step by a flag on the device."""

from typing import Any

import torch
from kit.parity_cases import Case, Side, batches, mesh_of
from kit.shard_ranks import Rank
from torch import Tensor

from stillhouse.data import StepMicroBatches
from stillhouse.engine.engine import StepOutput
from stillhouse.engine.optimizer import skips_by_flag, state_tensors
from stillhouse.models import NotFiniteError
from stillhouse.models.dtensors import local


def use_fused_adamw(engine: Any) -> None:
    """Replace a `TorchEngine`'s AdamW, before its first step, by fused AdamW with the same groups."""
    engine.optimizer = torch.optim.AdamW([group | {"fused": True} for group in engine.optimizer.param_groups])
    assert skips_by_flag(engine.optimizer)


def state_of(engine: Any) -> dict[str, Tensor]:
    """Return copies of a `TorchEngine`'s weights and optimizer state on this process."""
    state: dict[str, Tensor] = {}
    for name, parameter in engine.student.named_parameters():
        tensors = {"weight": parameter.detach()} | state_tensors(engine.optimizer.state.get(parameter, {}))
        state |= {f"{name} {key}": local(tensor).clone() for key, tensor in tensors.items()}
    return state


def skipped_on_all_ranks(rank: Rank, case: Case) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """A job: make a step, and one whose loss is infinite on rank 1 alone, although its gradient is finite.

    Returns the norm in the error of the second step, and the states before and after this step.
    """
    mesh = mesh_of(case.layout.degrees)
    side = Side.of(case, case.layout, mesh).train(case)
    engine = side.engine
    use_fused_adamw(engine)
    infinite = [("loss", torch.tensor(torch.inf))] if rank.number == 1 else []
    norm, states = 0.0, [state_of(engine)]
    for step, (micro_batches, signals) in enumerate(side.requests([StepMicroBatches(batches(case, 0))] * 2)):
        output = engine.forward_backward(micro_batches, signals.result(), micro_batches.all_ranks.normalizer)
        try:
            engine.update(1e-2, output if step == 0 else StepOutput(named=[*output.named, *infinite]))
        except NotFiniteError as error:
            assert step == 1
            norm = error.norm
        states.append(state_of(engine))
    assert any(not torch.equal(tensor, states[0][name]) for name, tensor in states[1].items() if name in states[0])
    return norm, states[1], states[2]
