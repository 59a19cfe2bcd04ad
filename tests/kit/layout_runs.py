"""Runs of one configuration in one or several processes, and the comparison of the weights that they write."""

from dataclasses import dataclass
from pathlib import Path

from kit.ranks import Ranks
from kit.runs import Command
from safetensors.torch import load_file
from torch import Tensor

LIMIT = 180


@dataclass(frozen=True)
class Ended:
    """A run that has ended. code: the first exit code that is not 0. out, err: the texts of all its processes."""

    code: int
    out: str
    err: str


def distill(folder: Path, out: str, processes: int, *overrides: str, succeeds: bool = True) -> Ended:
    """Run the configuration of a folder to its end, which has to be as `succeeds` says."""
    arguments = ("distill", folder / "run.yaml", f"out={folder / out}", *overrides)
    commands = [Command(*arguments)] if processes == 1 else Ranks(processes, *arguments)
    codes = [commands[0].wait(LIMIT)] if isinstance(commands, list) else commands.wait(LIMIT)
    texts = ["".join(texts) for texts in zip(*((command.out, command.err) for command in commands), strict=True)]
    ended = Ended(next(filter(None, codes), 0), *texts)
    assert (ended.code == 0) == succeeds, ended
    return ended


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_same_weights(run: Path, reference: Path, tolerance: float = 1e-4) -> None:
    """Compare each weight. tolerance: the largest difference, relative to the norm of the reference's weight."""
    values, expected = weights(run), weights(reference)
    assert values.keys() == expected.keys()
    for name, weight in expected.items():
        assert (values[name] - weight).norm() <= tolerance * weight.norm(), name
