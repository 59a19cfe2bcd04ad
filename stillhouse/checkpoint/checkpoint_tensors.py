"""The tensors of a checkpoint: the student's weights, the optimizer's moments and the random generators' states.

    student.<parameter>                   a weight or a buffer
    optimizer.state.<parameter>.<moment>  the optimizer's state, such as a moment of AdamW
    average.<parameter>                   the exponential moving average of a trained weight, if the run has one
    random.<device>.<rank>                the state of a random generator (without a rank in a run of one process)

Under FSDP, tensor or expert parallelism a rank has only a shard of a tensor, as a DTensor.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stillhouse.checkpoint.export_weights import WEIGHT
from stillhouse.engine.optimizer import empty_state, state_tensors
from stillhouse.parallel import Runner
from stillhouse.parallel.gradients import copies, local
from stillhouse.signals import WeightAverage

RANDOM = "random."
_MOMENT = "optimizer.state."
_AVERAGE = "average."


def checkpoint_tensors(
    runner: Runner, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> dict[str, Any]:
    """All tensors of a checkpoint that this rank holds, by their names."""
    return student_weights(runner) | random_states(runner) | averages(runner, average) | _moments(runner, optimizer)


def student_weights(runner: Runner) -> dict[str, Any]:
    """This rank's parameters and buffers of the student. A head tied to the embedding has the embedding's name.

    Frozen parameters of a student with an adapter are left out: they are in the files of the base model.
    """
    weights: dict[str, Any] = {}
    for student in runner.students():
        named = () if student.lora is None else student.named_parameters()
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        for name, value in student.state_dict().items():
            if name not in frozen:
                weights.setdefault(f"{WEIGHT}{runner.shared_name(name)}", value)
    return weights


def averages(runner: Runner, average: WeightAverage | None) -> dict[str, Tensor]:
    """The averages of this rank's trained weights; of two copies of a tied weight, that of the first."""
    found: dict[str, Tensor] = {}
    for name, value in ({} if average is None else average.tensors).items():
        found.setdefault(f"{_AVERAGE}{runner.shared_name(name)}", value)
    return found


def empty_moments(runner: Runner, optimizer: torch.optim.Optimizer, without_moments: list[str]) -> dict[str, Tensor]:
    """Set the optimizer's state of this rank to zeros, into which DCP then reads a checkpoint; returns its tensors.

    without_moments: parameters for which the checkpoint has no moments.
    """
    optimizer.state.clear()
    for name, parameter in _trained_parameters(runner).items():
        if name not in without_moments:
            optimizer.state[parameter] = empty_state(optimizer, parameter)
    return _moments(runner, optimizer)


def _moments(runner: Runner, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # the optimizer's hyper-parameters are not saved: they come from the configuration
    return {
        f"{_MOMENT}{name}.{key}": value
        for name, parameter in _trained_parameters(runner).items()
        for key, value in state_tensors(optimizer.state.get(parameter, {})).items()
    }


def parameters_without_moments(runner: Runner, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters of all ranks that never had a gradient, so that the optimizer has no state for them."""
    own = [name for name, parameter in _trained_parameters(runner).items() if parameter not in optimizer.state]
    return sorted({name for each in runner.ranks.gather(own) for name in each})


def random_states(runner: Runner) -> dict[str, Tensor]:
    """The states of this process's random generators.

    All tensor ranks of a group load the state of the first one: dropout must drop the same elements of the hidden
    states that they all hold.
    """
    ranks = runner.ranks
    own = "" if ranks.size == 1 else f".{ranks.rank - runner.mesh.coordinate('tensor')}"
    device = runner.device
    states = {f"{RANDOM}cpu{own}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{RANDOM}cuda{own}"] = torch.cuda.get_rng_state(device)
    return states


def restore(
    tensors: Mapping[str, Any],
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
) -> None:
    """Restore the random generators, and second copies of a tied weight, of its moments and of its average.

    tensors: by name, as DCP has just read them. DCP has written all others in place already.
    """
    for name, value in ({} if average is None else average.tensors).items():
        first = tensors[f"{_AVERAGE}{runner.shared_name(name)}"]
        if value is not first:
            local(value).copy_(local(first))
    parameters = _trained_parameters(runner)
    for name, parameter in runner.named_parameters():
        if not parameter.requires_grad:
            continue
        first = parameters[runner.shared_name(name)]
        if parameter is not first:
            local(parameter.detach()).copy_(local(first.detach()))
            if first in optimizer.state:
                optimizer.state[parameter] = {key: each.clone() for key, each in optimizer.state[first].items()}
    for name in random_states(runner).keys() & tensors.keys():
        if name.startswith(f"{RANDOM}cpu"):
            torch.set_rng_state(tensors[name])
        else:
            torch.cuda.set_rng_state(tensors[name], runner.device)


def bytes_to_write(tensors: Mapping[str, Any], runner: Runner) -> int:
    """The size of a checkpoint: all tensors, and the student's weights a second time for the folder `student`."""
    weights = {name: each for name, each in tensors.items() if name.startswith(WEIGHT)}
    own = sum(_share_of(each, runner) * each.element_size() for held in (tensors, weights) for each in held.values())
    return round(sum(runner.ranks.gather(own)))


def element_count(tensors: Mapping[str, Any], runner: Runner) -> int:
    """The number of elements in the weights and moments of all ranks. Copies of an element count once."""
    names = {name for name in tensors if not name.startswith(RANDOM)}
    if runner.copies_embedding and runner.pipeline is not None and 0 not in runner.pairs:
        # the last stage's copy of the embedding, which only the first stage saves
        shared = runner.students()[0].embedding_name
        moments = {name for name in names if name.startswith(f"{_MOMENT}{shared}.")}
        names -= {f"{WEIGHT}{shared}", f"{_AVERAGE}{shared}"} | moments
    return round(sum(runner.ranks.gather(sum(_share_of(tensors[name], runner) for name in names))))


def require_fit(
    path: Path, stored: Mapping[str, TensorStorageMetadata], wanted: Mapping[str, Any], whole: bool
) -> None:
    """Raise ValueError if a tensor of the checkpoint does not fit the student, naming the first such tensor.

    DCP itself reports less, ignores tensors that are not wanted, and raises an error that is not an Exception.
    wanted: the tensors that this process will load. whole: this process has the whole student, so a stored tensor
    that is not wanted is an error, too. But a run without an average may leave that of the checkpoint.
    """
    shapes = {name: tuple(each.size) for name, each in stored.items()}
    expected = {name: tuple(value.shape) for name, value in wanted.items()}
    names = shapes.keys() | expected.keys() if whole else expected.keys()
    if not any(name.startswith(_AVERAGE) for name in expected):
        names = {name for name in names if not name.startswith(_AVERAGE)}
    for name in sorted(name for name in names if name.startswith((WEIGHT, _MOMENT, _AVERAGE))):
        there, here = (f"of shape {each[name]}" if name in each else "absent" for each in (shapes, expected))
        if there != here:
            raise ValueError(
                f"{path} does not fit this student: '{name}' is {there} in the checkpoint and {here} in the run; "
                "expected the same student, and the same train.optimizer, that wrote the checkpoint; a projector of "
                "hidden states is of its layers in objective.hidden"
            )


def _trained_parameters(runner: Runner) -> dict[str, nn.Parameter]:
    """This rank's trained parameters, by their names in a checkpoint; of two copies of a tied weight, the first."""
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in runner.named_parameters():
        if parameter.requires_grad:
            parameters.setdefault(runner.shared_name(name), parameter)
    return parameters


def _share_of(tensor: Any, runner: Runner) -> float:
    """The number of a tensor's elements on this rank, divided by the number of ranks that hold the same elements."""
    degrees = runner.layout.degrees
    return local(tensor).numel() / copies(tensor, degrees.processes // degrees.pipeline)
