"""Runs a benchmark in a process of the fork server. This file imports no benchmark: the variables are set first."""

import os
import runpy
import sys
from pathlib import Path

from torch._inductor import config as inductor


def run_module(module: str, arguments: list[str], folder: Path, log: Path) -> None:
    """Run `python -m module arguments` in a folder, append its output to `log`, and keep its results in .results."""
    os.chdir(folder)
    os.environ["BENCHMARK_RESULTS"] = ".results"
    inductor.compile_threads = 1  # no processes that import torch
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
