"""Runs one case with a source tree, in processes of their own, and returns what the run has computed and needed.

Everything is read from what the command line writes: metrics.jsonl, the exported model and the output of the command.
What torch knows comes from `process.py`, which runs in place of `python -m stillhouse`.
"""

import hashlib
import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore

from benchmarks.unchanged.cases import Case
from benchmarks.unchanged.process import Job, Probes, run_job

#: the longest time of one command
LIMIT_SECONDS = 600
#: how long the other ranks have to end when one has failed
GRACE_SECONDS = 15.0
#: how long a server has to end after SIGTERM
STOP_SECONDS = 60.0
POLL_SECONDS = 0.05
#: metrics that depend on the clock or on the machine
UNSTABLE = ("speed/", "memory/", "seconds", "time")
#: what the fork server imports: this package's own process, and what is large in Stillhouse's runs
PRELOAD = [
    "benchmarks.unchanged.process",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "peft",
    "pydantic",
    "ruamel.yaml",
]

#: held while processes are started or asked for their exit codes, which multiprocessing does not do in two threads
LOCK = threading.Lock()


@dataclass(frozen=True)
class Tree:
    """A source tree, a folder for what its processes write beside their runs, and the threads of each process."""

    root: Path
    work: Path
    threads: int = 1

    def start(self, folder: Path, *arguments: str, processes: int = 1, name: str = "log", **probes: Any) -> "Command":
        """Start `stillhouse <arguments>` in `folder`. name: of its log. probes: see Probes."""
        return Command(self, folder, arguments, processes, name, probes)

    def run(self, folder: Path, *arguments: str, processes: int = 1, **probes: Any) -> str:
        """Run a command in `folder` to its end and return what its first rank has printed. Raises RunError."""
        return self.start(folder, *arguments, processes=processes, name=arguments[0], **probes).wait()

    @contextmanager
    def serve(self, folder: Path, model: str) -> Iterator[str]:
        """Serve a model of `folder` on a free port; the value is the address."""
        command = self.start(folder, "serve", model, "--port", "0", "--device", "cpu", name="serve")
        try:
            yield command.wait_for(r"serving on (http://\S+)")
        finally:
            command.stop()


class RunError(Exception):
    """A command has failed; the message has its exit code and its error."""


class Command:
    """A command of the command line in one or more processes, which are its ranks.

    Each rank prints to `<folder>/<name>-<n>-<rank>.txt`. With the probe `report`, which is then a folder, each
    writes `<rank>.json` there.
    """

    def __init__(
        self, tree: Tree, folder: Path, arguments: Sequence[str], processes: int, name: str, probes: dict[str, Any]
    ):
        number = len(list(folder.glob(f"{name}-*-0.txt")))
        self.logs = [folder / f"{name}-{number}-{rank}.txt" for rank in range(processes)]
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False) if processes > 1 else None
        self.processes = []
        for rank, log in enumerate(self.logs):
            log.touch()
            environment = {"STILLHOUSE_CACHE": str(tree.work / "downloads")}
            if self.store is not None:
                environment |= rank_environment(rank, processes, self.store.port)
            of_rank = probes | ({"report": probes["report"] / f"{rank}.json"} if "report" in probes else {})
            job = Job(tree.root, folder, tuple(arguments), log, environment, tree.threads, Probes(**of_rank))
            with LOCK:
                self.processes.append(fork_server().Process(target=run_job, args=(job,)))
                self.processes[-1].start()

    def exit_codes(self) -> list[int | None]:
        with LOCK:
            return [process.exitcode for process in self.processes]

    def wait(self) -> str:
        """Wait for the end of all ranks and return what the first one has printed. Raises RunError."""
        end = time.monotonic() + LIMIT_SECONDS
        while None in (codes := self.exit_codes()) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            if any(codes):
                end = min(end, time.monotonic() + GRACE_SECONDS)
        self.kill()
        if any(codes := self.exit_codes()):
            raise RunError(f"exit codes {codes}: {self.error()}")
        return self.logs[0].read_text(encoding="utf-8")

    def wait_for(self, pattern: str) -> str:
        """Wait until the first rank has printed the pattern, and return its group."""
        end = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < end and None in self.exit_codes():
            if match := re.search(pattern, self.logs[0].read_text(encoding="utf-8")):
                return match[1]
            time.sleep(POLL_SECONDS)
        raise RunError(f"there is no {pattern} in the output: {self.error()}")

    def stop(self) -> None:
        """Send SIGTERM to all ranks and wait for their end."""
        for process in self.processes:
            process.terminate()
        end = time.monotonic() + STOP_SECONDS
        while None in self.exit_codes() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        for process, code in zip(self.processes, self.exit_codes(), strict=True):
            if code is None:
                process.kill()
        while None in self.exit_codes():
            time.sleep(POLL_SECONDS)

    def error(self) -> str:
        """Return the line of the command's error, or its last line."""
        lines = [line.strip() for log in self.logs for line in log.read_text(encoding="utf-8").splitlines()]
        errors = [line for line in lines if re.search(r"(?i)error\b.*: ", line)]
        return (errors or [line for line in lines if line] or ["no output"])[-1][:500]


HOST = "127.0.0.1"


def rank_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun gives a rank; `port` is that of a store in this process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def fork_server() -> ForkServerContext:
    """Return the context of the fork server. What its libraries read while they are imported is set before."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


# a case


def measure(case: Case, tree: Tree, folder: Path) -> dict[str, Any]:
    """Run a case in its folder, which has its inputs, and return its record."""
    started = time.monotonic()
    record: dict[str, Any] = {"processes": case.processes}
    try:
        record |= measure_command(case, tree, folder)
    except RunError as error:
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
    counted = case.processes > 1 and not case.compiled
    probes = {"report": reports, "collectives": counted}
    tree.run(folder, "distill", "run.yaml", *overrides, processes=case.processes, **probes)
    ranks = [json.loads((reports / f"{rank}.json").read_text()) for rank in range(case.processes)]
    return {
        "metrics": read_metrics(folder / "out"),
        **summary_of(load_tensors(folder / "out" / "model")),
        "compilations": [rank["compilations"] for rank in ranks],
        "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "collectives": summed_collectives([rank["collectives"] for rank in ranks]) if counted else None,
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
