"""Runs everything that needs a GPU within a time limit in minutes: first what decides most.

    make gpu                                    on a machine with one NVIDIA GPU
    make wheels                                 before, on another machine: the packages, if the first has no network
    python -m benchmarks.gpu --rehearse         on a CPU with tiny sizes, to test that every stage starts and ends

It needs Python 3.11 or later, torch and transformers. Every stage is a separate process with a time limit of its own,
the most important ones first. When the time is over, the running stage is stopped; the results of earlier stages
stay. The whole output of all stages is in gpu-<date>.log; the last lines of each stage are also printed. Result files
are written to benchmarks/results, and after each stage to --out, as one archive. The summary, gpu-<date>.json,
contains the outcome of each stage.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import RESULTS, result_file, write_result
from stillhouse import __version__

ROOT = Path(__file__).parents[1]
LARGE = ["--width", "2048", "--teacher-width", "4096", "--tokens", "8192", "--floor-rows", "1024", "2048", "4096"]
#: processes of tests; each of them may also compile in processes of its own
WORKERS, COMPILERS = 6, 3
#: the lines of a stage's output that are printed, of a stage that has passed and of one that has not
SHOWN, SHOWN_OF_FAILED = 20, 45
#: Qwen3's 0.6B as the student and 8B as the teacher
MODELS = ["--student", "1024", "28", "--teacher", "4096", "36", "--vocabulary", "151936"]
TRAINING = [
    *MODELS,
    "--max-tokens",
    "2048",
    "--micro-batch-tokens",
    "8192",
    "--documents",
    "3",
    "--precision",
    "bf16",
]
TINY_MODELS = ["--student", "128", "2", "--teacher", "128", "2", "--vocabulary", "2100", "--max-tokens", "64"]
TINY_TRAINING = [*TINY_MODELS, "--micro-batch-tokens", "128", "--precision", "fp32"]


@dataclass(frozen=True)
class Stage:
    """A Python command with a time limit. small: arguments that are added for a rehearsal on a CPU."""

    name: str
    minutes: float
    arguments: list[str]
    small: list[str]


def stages(device: str) -> list[Stage]:
    on = ["--device", device]
    bf16 = [*on, "--dtype", "bf16"]
    # the last --dtype is used, because bf16 needs a GPU
    tiny = ["--dtype", "fp32", "--tokens", "64", "--width", "64", "--vocabulary", "2100", "--rounds", "1"]
    tiny_objective = [*tiny, "--teacher-width", "64", "--peer-rounds", "1", "--floor-rounds", "1", "--skip", "memory"]
    tiny_objective += ["first_call", "peers", "--floor-rows", "64", "--square", "256", "--cases", "forward_kl"]
    objective = ["-m", "benchmarks.objective", *bf16, *LARGE]
    training = ["-m", "benchmarks.training", *on, *TRAINING, "--steps", "4", "--turns", "1"]
    return [
        # two packed rows per micro-batch, then what must not wait for the device
        tests("models", 2.0, "tests/gradients/test_varlen_gpu.py", "tests/gradients/test_train_step_gpu.py"),
        tests("objective", 4.0, "tests/gradients/test_objective_gpu.py"),
        Stage(
            "objective, V=151,936",
            2.0,
            [*objective, "--vocabulary", "151936", "--cases", "forward_kl", "jsd", "--skip", "peers"]
            + ["--memory-tokens", "8192", "32768"],
            tiny_objective,
        ),
        Stage(
            "kernels of the objective",
            1.0,
            ["-m", "benchmarks.kernels", *on],
            ["--rows", "8", "--vocabulary", "2100", "--width", "64", "--teacher-width", "64"],
        ),
        Stage("profile of a step", 1.5, ["-m", "benchmarks.profile_step", *on, *TRAINING], TINY_TRAINING),
        Stage("training loop", 2.0, training, [*TINY_TRAINING, "--steps", "1"]),
        Stage(
            "training loop, compiled layers",
            2.5,
            [*training, "--compile", "--residual-dtype", "bfloat16"],
            [*TINY_TRAINING, "--precision", "bf16", "--steps", "1"],
        ),
        Stage(
            "training loop with sdpa",
            1.0,
            [*training, "--attention", "sdpa"],
            [*TINY_TRAINING, "--steps", "1"],
        ),
        Stage(
            "log-probabilities",
            1.0,
            ["-m", "benchmarks.hook", *bf16, "--width", "2048", "--tokens", "8192", "--kinds", "hugging face"],
            [*tiny, "--skip", "memory"],
        ),
        Stage(
            "training loop, deterministic",
            1.5,
            [*training, "--deterministic"],
            [*TINY_TRAINING, "--steps", "1"],
        ),
        tests("offload and resuming", 2.0, "tests/layouts/test_offload.py", "tests/runs/test_resume_gpu.py"),
        tests(
            "images and Megatron-Core",
            2.0,
            "tests/gradients/test_image_models_gpu.py",
            "tests/gradients/test_megatron_gpu.py",
        ),
        Stage(
            "objective, V=32,768, all losses",
            2.5,
            [*objective, "--vocabulary", "32768", "--rounds", "10"],
            tiny_objective,
        ),
        Stage(
            "Megatron-Core beside PyTorch",
            2.0,
            ["-m", "benchmarks.megatron_engine", *on, "--turns", "5"],
            ["--small", "--turns", "1"],
        ),
    ]


def tests(subject: str, minutes: float, *files: str) -> Stage:
    """Tests by several processes, if pytest-xdist is installed, because compiling takes most of the time.

    A rehearsal has one process, and only the tests that need a GPU, which are skipped without one.
    """
    options = ["-q", "-p", "no:cacheprovider", "-m", "gpu or not slow", "--noconftest"]
    options += ["--tb", "short", "-rfE", "--disable-warnings", "--durations", "5"]
    small = ["-m", "gpu"]
    if importlib.util.find_spec("xdist") is not None:
        options += ["-p", "xdist", "-n", str(min(WORKERS, os.cpu_count() or 1))]
        small += ["-n", "0"]
    return Stage(f"tests of the {subject}", minutes, ["-m", "pytest", *options, *files], small)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, help="a folder for an archive of the result files, and the log")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument(
        "--stages", type=int, nargs="+", help="the numbers of the stages to run, from 1; default: all"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    device, began, ends = (
        "cpu" if arguments.rehearse else "cuda",
        time.time(),
        time.monotonic() + 60 * arguments.minutes,
    )
    write_entry_points()
    log = ROOT / ".results" / "gpu-rehearsal.log" if arguments.rehearse else result_file("gpu").with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    summary = []
    for number, stage in enumerate(stages(device), start=1):
        if arguments.stages and number not in arguments.stages:
            continue
        started = time.monotonic()
        limit = ends - started if arguments.rehearse else min(ends - started, 60 * stage.minutes)
        outcome = run_stage(stage, limit, log, rehearse=arguments.rehearse)
        summary.append({"stage": stage.name, "outcome": outcome, "seconds": round(time.monotonic() - started, 1)})
        if not arguments.rehearse:
            write_result(result_file("gpu"), {"theme": "make gpu", "stages": summary}, device)
            copy_results(arguments.out, began)
    print("", *(f"{entry['stage']}: {entry['outcome']} after {entry['seconds']} s" for entry in summary), sep="\n")
    if any(entry["outcome"] not in ("passed", "no time left") for entry in summary):
        sys.exit(1)


def write_entry_points() -> None:
    """Register the add-ons of this checkout, which is not installed, by metadata in the folder of the packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = ROOT / ".gpu" / f"stillhouse-{__version__}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stillhouse\nVersion: {__version__}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [f"[{group}]\n{name} = {value}" for group, points in groups.items() for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def run_stage(stage: Stage, seconds: float, log: Path, *, rehearse: bool) -> str:
    """Run a stage, print the last lines of its output, and return its outcome in words."""
    if seconds < 5:
        return "no time left"
    print(f"\n== {stage.name}", flush=True)
    begins = log.stat().st_size
    outcome = run_process(
        [sys.executable, *stage.arguments, *(stage.small if rehearse else [])], seconds, log, rehearse
    )
    lines = log.read_bytes()[begins:].decode(errors="replace").replace("\r", "\n").splitlines()
    shown = [line[:150] for line in lines if line.strip()][-(SHOWN if outcome == "passed" else SHOWN_OF_FAILED) :]
    print(*shown, f"{stage.name}: {outcome}", sep="\n", flush=True)
    return outcome


def run_process(command: list[str], seconds: float, log: Path, rehearse: bool) -> str:
    """Run a command that appends its output to `log`. At the limit of time, end it and all of its processes."""
    path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests", ROOT / ".gpu") if folder.exists())
    # plugins of pytest that happen to be installed may not work with its version
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"BENCHMARK_RESULTS": ".results"} if rehearse else {}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": str(COMPILERS)} if "pytest" in command else {}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if rehearse else {}  # no processes that import torch
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"stopped at the limit of {seconds:.0f} s"
        finally:
            if process.poll() is None:  # also when this process is ended: the stage would go on with the GPU
                end(process)
    return "passed" if status == 0 else f"failed with exit code {status}"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children. An interrupt lets pytest report what has failed, and shows where others are."""
    for kind, seconds in ((signal.SIGINT, 8.0), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, kind)
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def copy_results(folder: Path | None, began: float) -> None:
    """Copy the result files that this run has written, in an archive, and the log also by itself."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        written = [path for path in sorted(RESULTS.iterdir()) if path.stat().st_mtime >= began]
        with tarfile.open(folder / "results.tar.gz", "w:gz") as archive:
            for path in written:
                archive.add(path, path.name)
        for path in written:
            if path.suffix == ".log":
                shutil.copy(path, folder)


if __name__ == "__main__":
    main()
