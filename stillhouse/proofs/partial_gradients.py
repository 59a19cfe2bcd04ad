"""Finds the parameters whose gradients have to be summed over the tensor ranks, by backward passes of a probe.

Each tensor rank has a full copy of every parameter that the family's plan does not name. If the parameter is applied
to the replicated hidden states, its gradient is the same on all ranks. If it is applied between sharded matrices (a
norm of each head, or the parameter of an activation), a rank's gradient has only the contribution of its own heads or
columns. These gradients have to be summed.

A model is refused if its plan does not name a matrix between the hidden states and the sharded matrices. The hidden
states then get a partial gradient, which differs between ranks. The gradients of all earlier parameters would mix
partial and full gradients, and no sum could correct them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stillhouse.models import Decoder, OutputProcessor, ProofError, evaluating
from stillhouse.models.dtensors import local
from stillhouse.models.families import plan_name
from stillhouse.models.layer_hooks import hidden_of, hooked
from stillhouse.models.lm_head import input_embedding
from stillhouse.models.model_checks import describe
from stillhouse.objective import CrossEntropy, ObjectiveOutput, OutputHead, linear_objective
from stillhouse.parallel.gradients import reduce_partial_grads
from stillhouse.parallel.runner import Runner
from stillhouse.parallel.teacher_student_pair import StageInputs

#: a relative difference between the ranks' gradients below `_EQUAL` is rounding, above `_PARTIAL` a partial gradient
_EQUAL, _PARTIAL = 1e-2, 5e-2
#: number of backward passes, each with other labels, because gradients of one pass can be nearly equal by chance
_ROUNDS = 3
#: prefix of the names of hidden states, before the name of the module that returns them
_HIDDEN = "hidden states behind "


def partial_gradients(runner: Runner, inputs_of: Callable[[OutputProcessor], StageInputs]) -> list[nn.Parameter]:
    """Return the parameters of this process whose gradients have to be summed over the tensor ranks.

    Parameters with the same name in several layers are compared together. The sum is correct on two conditions: the
    hidden states have complete gradients, and the parameter's module runs once per forward pass. (A module that runs
    twice could be applied both to hidden states and between sharded matrices.) Raises ProofError for gradients that
    differ between ranks and cannot be summed. Clears all gradients. A collective of all processes.
    """
    runs, squares = Counter[nn.Module](), defaultdict[str, float](float)
    hidden: dict[str, Tensor] = {}
    with evaluating(*runner.decoders), ExitStack() as stack:
        for student in runner.decoders:
            stack.enter_context(_counted(student, runs))
            stack.enter_context(_hidden_gradients(student, hidden))
        stages = runner.layout.degrees.pipeline
        count = 1 if stages == 1 else 2 * stages  # every schedule can run this number of micro-batches
        for number in range(_ROUNDS):
            runner.zero_grad()
            runner.forward_backward([inputs_of(cross_entropies(number))] * count)
            _add(squares, _squares(runner, hidden))
            hidden.clear()
    total = defaultdict[str, float](float)
    for rank_squares in runner.ranks.gather(squares):
        _add(total, rank_squares)
    differing = {name: math.sqrt(total[f"{name} difference"] / total[name]) for name in list(total) if total[name]}
    parts = [(name, copy) for name, copy in _copies(runner) if differing.get(plan_name(name), 0.0) > _EQUAL]
    problems = (
        _problem(runner, name, parameter, differing[plan_name(name)], runs, count * _ROUNDS)
        for name, parameter in parts
    )
    problem = _mixed_problem(differing) or next(filter(None, problems), "")
    runner.zero_grad()
    if problem:
        raise ProofError(f"{describe(runner.decoders[0].pretrained)} under tensor parallelism: {problem}")
    return [parameter for _, parameter in parts]


def cross_entropies(number: int) -> OutputProcessor:
    """Return an output processor that sums the cross-entropies of all depths. number: determines the labels"""

    def process(*, hidden_states: Any, head: OutputHead, context: Any, depth: int = 0) -> ObjectiveOutput:
        hidden_by_depth = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        place_T = torch.arange(hidden_by_depth[0].shape[:-1].numel(), device=hidden_by_depth[0].device)
        terms = [CrossEntropy((place_T * (number + 1)) % 7)]
        losses = [linear_objective(hidden_BSD.flatten(0, -2), head, terms).loss for hidden_BSD in hidden_by_depth]
        return ObjectiveOutput(torch.stack(losses).sum(), {}, {})

    return process


def _copies(runner: Runner) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that have a gradient and are replicated over the tensor ranks."""
    for name, parameter in runner.named_parameters():
        # expert ranks include the tensor ranks
        is_sharded = any(
            axis in ("tensor", "expert") and not placement.is_replicate() for axis, placement in _axes(parameter)
        )
        if parameter.grad is not None and not is_sharded:
            yield name, parameter


def _axes(parameter: nn.Parameter) -> Iterable[tuple[str, Any]]:
    """Return the axes of a parameter's mesh by name, each with its placement."""
    if not isinstance(parameter, DTensor):
        return ()
    return zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)


def _squares(runner: Runner, hidden: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the sum of squares of this process's gradients, by generic name. With the suffix " difference", the sum
    of squares of their differences from the mean over the tensor ranks. A collective of the tensor ranks.
    """
    reduce_partial_grads(parameter for _, parameter in runner.named_parameters())
    copies = [(plan_name(name), local(parameter.grad)) for name, parameter in _copies(runner)]
    copies += [(f"{_HIDDEN}{name}", gradient) for name, gradient in hidden.items()]
    if not copies:
        return {}
    values = torch.cat([gradient.flatten().to(runner.device, torch.float32) for _, gradient in copies])
    mean = values.clone()
    group = runner.mesh.weights.get_group("tensor")
    dist.all_reduce(mean, group=group)
    mean /= group.size()
    sizes = [gradient.numel() for _, gradient in copies]
    squares = defaultdict[str, float](float)
    for suffix, terms in (("", values), (" difference", values - mean)):
        sums = torch.stack([part.square().sum() for part in terms.split(sizes)]).tolist()
        for (name, _), value in zip(copies, sums, strict=True):
            squares[name + suffix] += value
    return squares


def _add(total: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        total[name] += value


def _problem(
    runner: Runner,
    name: str,
    parameter: nn.Parameter,
    difference: float,
    runs: Counter[nn.Module],
    count: int,
) -> str:
    """Return why a parameter's different gradients cannot be summed; empty if they can be summed.

    runs: how often each module has run in `count` forward passes.
    """
    if difference < _PARTIAL:
        return f"the gradients of '{name}' differ by {difference:.1%} between ranks, which should be equal"
    if any(axis == "tensor" for axis, _ in _axes(parameter)):
        return f"its ranks have different gradients of '{name}', which its plan replicates: expected tensor=1"
    owner = name.rpartition(".")[0]
    owners = [module for part in runner.decoders for path, module in part.named_modules() if path == owner]
    times = sum(runs[module] for module in owners)
    if times != count:
        return (
            f"its ranks have different gradients of '{name}', whose module runs {times / count:g} times in a forward "
            "pass, so that they cannot be summed: expected tensor=1"
        )
    return ""


def _mixed_problem(differing: Mapping[str, float]) -> str:
    """Describe hidden states with partial gradients; empty if there are none."""
    for name, difference in differing.items():
        if name.startswith(_HIDDEN) and difference > _EQUAL:
            return (
                f"the gradients of the {name} differ by {difference:.1%} between ranks: a matrix that its plan does "
                "not name is used between the sharded ones: expected tensor=1"
            )
    return ""


def _hidden_gradients(student: Decoder, into: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Return a context that sums the gradients of the outputs of embedding and layers in `into`, by module."""

    def add(name: str, gradient: Tensor) -> None:
        value = local(gradient).detach().float()
        into[name] = into[name] + value if name in into else value

    def watch(name: str, output: Any) -> None:
        hidden_BSD = hidden_of(output)
        if hidden_BSD.requires_grad:
            hidden_BSD.register_hook(partial(add, name))

    names = {module: name for name, module in student.named_modules()}
    embedding = input_embedding(student.pretrained)
    watched = [*([] if embedding is None else [embedding]), *student.layers()]
    hooks = [
        module.register_forward_hook(lambda module, _, output: watch(f"'{names[module]}'", output))
        for module in watched
    ]
    return hooked(*hooks)


def _counted(module: nn.Module, runs: Counter[nn.Module]) -> AbstractContextManager[None]:
    """Return a context that counts in `runs` how often each submodule runs."""
    return hooked(*(part.register_forward_pre_hook(lambda part, _: runs.update([part])) for part in module.modules()))
