"""Code blocks of pages, and command lines, read by the parsers of torchrun and of `stillhouse` themselves."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from torch.distributed.run import get_args_parser

from stillhouse.cli import cli
from stillhouse.cli.arguments import is_override
from stillhouse.config import RunConfig, load_config


@dataclass(frozen=True)
class Launch:
    """A `stillhouse` command. nodes, processes: those of torchrun; 1 without it. options: of the command, by name."""

    command: str
    options: dict[str, Any]
    nodes: int = 1
    processes: int = 1

    def config(self, file: Path | None = None) -> RunConfig:
        """The configuration of a run. file: what stands in for the file that the line names."""
        (named,) = (argument for argument in self.options["arguments"] if not is_override(argument))
        overrides = [argument for argument in self.options["arguments"] if is_override(argument)]
        return load_config(file or Path(named), overrides)


def parse(words: Sequence[str]) -> Launch:
    """Raises click.UsageError or SystemExit for a line that the command would refuse."""
    program, *words = words
    nodes = processes = 1
    if program == "torchrun":
        torchrun = get_args_parser().parse_args(words)
        assert torchrun.module
        nodes, processes = int(torchrun.nnodes.partition(":")[0]), int(torchrun.nproc_per_node)
        program, words = torchrun.training_script, torchrun.training_script_args
    assert program == "stillhouse"
    command, *arguments = words
    found = cli.get_command(click.Context(cli), command)
    assert found is not None, command
    context = found.make_context(command, list(arguments))
    return Launch(command, context.params, nodes, processes)


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)
