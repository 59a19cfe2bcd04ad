"""Runs everything that needs a GPU within a time limit in minutes: first the tests, then the benchmarks.

    make gpu                                    on a machine with one NVIDIA GPU
    make wheels                                 before, on another machine: the packages, if the first has no network
    python -m benchmarks.gpu --rehearse         on a CPU with tiny sizes, to test that every stage starts and ends

It needs Python 3.11 or later, torch and transformers. Every stage is a separate process, the most important ones
first. When the time is over, the running stage is stopped; the results of earlier stages stay. Result files are
written to benchmarks/results, and copied to --out after each stage. The summary, gpu-<date>.json, contains the
outcome of each stage.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import RESULTS, result_file, write_result

ROOT = Path(__file__).parents[1]
LARGE = ["--width", "2048", "--teacher-width", "4096"]


@dataclass(frozen=True)
class Stage:
    """A Python command. small: arguments that are added for a rehearsal on a CPU."""

    name: str
    arguments: list[str]
    small: list[str]


def stages(device: str) -> list[Stage]:
    on = ["--device", device]
    bf16 = [*on, "--dtype", "bf16"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu or not slow"]
    # the last --dtype is used, because bf16 needs a GPU
    tiny = ["--dtype", "fp32", "--tokens", "64", "--width", "64", "--vocabulary", "2048", "--rounds", "1"]
    tiny_objective = [*tiny, "--teacher-width", "64", "--peer-rounds", "1", "--floor-rounds", "1", "--skip", "memory"]
    tiny_objective += ["first_call", "--floor-rows", "64"]
    return [
        Stage("tests of the objective", [*tests, "tests/gradients/test_objective_gpu.py"], []),
        Stage("tests of offload", [*tests, "tests/layouts/test_offload.py"], []),
        Stage(
            "objective, V=151,936",
            ["-m", "benchmarks.objective", *bf16, *LARGE, "--tokens", "8192", "--vocabulary", "151936"],
            tiny_objective,
        ),
        Stage(
            "objective, V=32,768",
            ["-m", "benchmarks.objective", *bf16, *LARGE, "--tokens", "8192", "--vocabulary", "32768"],
            tiny_objective,
        ),
        Stage(
            "log-probabilities",
            ["-m", "benchmarks.hook", *bf16, "--width", "2048", "--tokens", "8192", "--kinds", "hugging face"],
            tiny,
        ),
        Stage(
            "training loop",
            ["-m", "benchmarks.training", *on, "--precision", "bf16", "--student", "1024", "16"]
            + ["--teacher", "2048", "24", "--vocabulary", "151936", "--max-tokens", "4096"]
            + ["--micro-batch-tokens", "8192", "--turns", "3"],
            ["--student", "64", "2", "--teacher", "64", "2", "--vocabulary", "2048", "--max-tokens", "64"]
            + ["--micro-batch-tokens", "128", "--turns", "1"],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, help="a folder to which result files are copied")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    device, ends = "cpu" if arguments.rehearse else "cuda", time.monotonic() + 60 * arguments.minutes
    summary = []
    for stage in stages(device):
        started = time.monotonic()
        outcome = run_stage(stage, ends - started, rehearse=arguments.rehearse)
        summary.append({"stage": stage.name, "outcome": outcome, "seconds": round(time.monotonic() - started, 1)})
        print(f"{stage.name}: {outcome} after {summary[-1]['seconds']} s", flush=True)
        if not arguments.rehearse:
            write_result(result_file("gpu"), {"theme": "make gpu", "stages": summary}, device)
            copy_results(arguments.out)
    if any(entry["outcome"] not in ("passed", "no time left") for entry in summary):
        sys.exit(1)


def run_stage(stage: Stage, seconds: float, *, rehearse: bool) -> str:
    """Run a stage and return its outcome in words."""
    if seconds < 5:
        return "no time left"
    command = [sys.executable, *stage.arguments, *(stage.small if rehearse else [])]
    path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests", ROOT / ".gpu") if folder.exists())
    environment = os.environ | {"PYTHONPATH": path} | ({"BENCHMARK_RESULTS": ".results"} if rehearse else {})
    try:
        ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "stopped at the limit of time"
    return "passed" if ended.returncode == 0 else f"failed with exit code {ended.returncode}"


def copy_results(folder: Path | None) -> None:
    """Copy today's result files."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in RESULTS.glob(f"*{result_file('').stem}.json"):
            shutil.copy(path, folder)


if __name__ == "__main__":
    main()
