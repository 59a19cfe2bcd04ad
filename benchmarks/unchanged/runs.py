"""Runs one case with a source tree, in processes of their own, and returns what the run has computed and needed.

Everything is read from what the command line writes: metrics.jsonl, the exported model and the output of the command.
What torch knows comes from `process.py`, which runs in place of `python -m stillhouse`.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.unchanged.cases import Case

PROCESS = Path(__file__).with_name("process.py")
#: the longest time of one command
LIMIT_SECONDS = 600
#: metrics that depend on the clock or on the machine
UNSTABLE = ("speed/", "memory/", "seconds", "time")


@dataclass(frozen=True)
class Tree:
    """A source tree and a folder for what its processes write beside their runs."""

    root: Path
    work: Path

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "STILLHOUSE_CACHE": str(self.work / "downloads"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *arguments: str, processes: int = 1, options: Sequence[str] = ()) -> list[str]:
        """Return the command line of `stillhouse <arguments>`. options: those of process.py."""
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        return [*launcher, str(PROCESS), "--tree", str(self.root), *options, "--", *arguments]

    def run(self, folder: Path, *arguments: str, processes: int = 1, options: Sequence[str] = ()) -> str:
        """Run a command in `folder` to its end and return its output. Raises RunError if it fails."""
        command = self.command(*arguments, processes=processes, options=options)
        finished = subprocess.run(
            command,
            cwd=folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_SECONDS,
        )
        if finished.returncode:
            raise RunError(finished.returncode, error_of(finished.stderr))
        return finished.stdout

    @contextmanager
    def serve(self, folder: Path, model: str) -> Iterator[str]:
        """Serve a model of `folder` on a free port; the value is the address."""
        command = self.command("serve", model, "--port", "0", "--device", "cpu")
        log = folder / "serve.txt"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=self.environment(), stdout=output, stderr=subprocess.STDOUT
            )
        try:
            yield wait_for_address(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class RunError(Exception):
    def __init__(self, code: int, error: str):
        super().__init__(f"exit code {code}: {error}")


def error_of(output: str) -> str:
    """Return the line of a command's error, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error: " in line.lower()]
    return (errors or lines or ["no output"])[-1][:500]


def wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if match := re.search(r"serving on (http://\S+)", log.read_text(encoding="utf-8")):
            return match[1]
        time.sleep(0.05)
    raise RunError(process.poll() or 0, f"the server does not answer: {error_of(log.read_text(encoding='utf-8'))}")


# a case


def measure(case: Case, tree: Tree, folder: Path) -> dict[str, Any]:
    """Run a case in a new folder and return its record."""
    started = time.monotonic()
    case.write(folder)
    record: dict[str, Any] = {"processes": case.processes}
    try:
        record |= measure_command(case, tree, folder)
    except (RunError, subprocess.TimeoutExpired) as error:
        record["error"] = str(error).replace(str(folder), ".")
    return record | {"seconds": round(time.monotonic() - started, 1)}


def measure_command(case: Case, tree: Tree, folder: Path) -> dict[str, Any]:
    if case.command == "parity":
        output = tree.run(folder, "parity", "run.yaml", processes=case.processes)
        return {"parity": parity_rows(output)}
    record: dict[str, Any] = {}
    overrides: list[str] = []
    if case.cache is not None:
        tree.run(folder, "cache", "run.yaml", "--out", "cache", *case.cache)
        record["cache"] = digest_of(folder / "cache" / "shards")
        overrides = FROM_CACHE
    if case.served:
        with tree.serve(folder, "teacher") as address:
            return record | distill(case, tree, folder, [f"teacher.url={address}", "teacher.model=null"])
    return record | distill(case, tree, folder, overrides)


FROM_CACHE = ["teacher.cache=cache", "teacher.model=null"]


def distill(case: Case, tree: Tree, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run `stillhouse distill`. Of a compiled case, the second of two runs is measured.

    The first one fills torch's cache of kernels on disk, because a run that compiles needs more memory.
    """
    if case.compiled:
        tree.run(folder, "distill", "run.yaml", "out=first", *overrides, processes=case.processes)
    reports = folder / "reports"
    reports.mkdir()
    options = ["--report", str(reports)]
    if case.processes > 1 and not case.compiled:
        options.append("--collectives")
    tree.run(folder, "distill", "run.yaml", *overrides, processes=case.processes, options=options)
    ranks = [json.loads((reports / f"{rank}.json").read_text()) for rank in range(case.processes)]
    return {
        "metrics": read_metrics(folder / "out"),
        **summary_of(load_tensors(folder / "out" / "model")),
        "compilations": [rank["compilations"] for rank in ranks],
        "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "collectives": summed_collectives([rank["collectives"] for rank in ranks]) if len(options) > 2 else None,
    }


def read_metrics(out: Path) -> dict[str, list[Any]]:
    """Return every metric as a list of its values, in the order of the steps."""
    columns: dict[str, list[Any]] = {}
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for key, value in json.loads(line).items():
            if not key.startswith(UNSTABLE):
                columns.setdefault(key, []).append(value)
    return dict(sorted(columns.items()))


def summed_collectives(ranks: Sequence[Sequence[Mapping[str, list[int]]]]) -> dict[str, Any]:
    """Return the collectives of rank 0 and those of all ranks, for each step but the first.

    The first one has the start of the run, too.
    """
    steps = [[dict(step) for step in rank[1:]] for rank in ranks]
    every = []
    for at in range(len(steps[0])):
        total: dict[str, list[int]] = {}
        for rank in steps:
            for kind, (count, size) in rank[at].items():
                before = total.get(kind, [0, 0])
                total[kind] = [before[0] + count, before[1] + size]
        every.append(dict(sorted(total.items())))
    return {"rank_0": [dict(sorted(step.items())) for step in steps[0]], "all_ranks": every}


def parity_rows(output: str) -> dict[str, str]:
    """Return each layout's verdict: same, DIFFERENT, or why it is not possible."""
    lines = output.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("layout ") and line.endswith("verdict"))
    rows = (re.split(r"\s{2,}", line.strip()) for line in lines[start + 1 :] if "  " in line)
    return {row[0]: row[-1] for row in rows}


# tensors


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the safetensors files in a folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def digest_of(folder: Path) -> str:
    return summary_of(load_tensors(folder))["weights_sha256"]


def summary_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a hash of all tensors, and for each its norm and its product with a fixed random tensor of norm 1."""
    digest, sizes = hashlib.sha256(), {}
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        random = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        product = (tensor.double() * random).sum() / random.norm()
        sizes[name] = [float(tensor.double().norm()), float(product)]
    return {"weights_sha256": digest.hexdigest(), "weights": sizes}
