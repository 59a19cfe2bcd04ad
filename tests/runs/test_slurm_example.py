"""The launch script for a SLURM job with servers, with programs in the place of SLURM, vLLM and torchrun.

Nodes are addresses of the loopback interface. The servers are real processes that answer requests for their health.
"""

import os
import runpy
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kit import slow
from kit.pages import parse
from kit.runs import ROOT, wait_for

NODES = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
#: the programs of a job, and the files of kit/slurm that stand for them
PROGRAMS = {name: name for name in ("scontrol", "srun", "sleep", "torchrun")} | {"vllm": "server", "served": "server"}
TEACHER, STUDENT = "Qwen/Qwen3-32B", "Qwen/Qwen3-8B"
#: options that make a vLLM one that scores, or one that writes
TEACHES, WRITES = ("--runner", "pooling"), ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")


class Job:
    """The script as sbatch would start it."""

    def __init__(self, folder: Path, *arguments: str, nodes: list[str] = NODES, **environment: str):
        for name, file in PROGRAMS.items():
            text = (ROOT / "tests" / "kit" / "slurm" / file).read_text()
            (folder / name).write_text(text.replace("#!python\n", f"#!{sys.executable}\n"))
            (folder / name).chmod(stat.S_IRWXU)
        self.log = folder
        self.port = free_ports(NODES, 8)
        settings = {"SLURM_JOB_NODELIST": " ".join(nodes), "SLURM_JOB_ID": "7", "LOG": str(folder)}
        settings |= {"PATH": f"{folder}:{os.environ['PATH']}", "PORT": str(self.port)} | environment
        self.process = subprocess.Popen(
            ["bash", ROOT / "examples" / "slurm_on_policy.sh", *arguments],
            env=os.environ | settings,
            stderr=(folder / "err").open("w"),
        )

    def started(self, node: str, number: int) -> list[str]:
        """The devices, the mode and the arguments of a server."""
        return (self.log / f"{node}:{self.port + number}.started").read_text().split()

    def answers(self, node: str, number: int) -> bool:
        with socket.socket() as client:
            return client.connect_ex((node, self.port + number)) == 0

    def end(self, code: int) -> str:
        assert self.process.wait(60) == code, (self.log / "err").read_text()
        return (self.log / "err").read_text()


def free_ports(nodes: list[str], count: int) -> int:
    """The first of `count` ports that are free on all nodes."""
    for first in range(21000, 60000, count):
        if all(is_free(node, port) for node in nodes for port in range(first, first + count)):
            return first
    raise AssertionError("no free ports")


def is_free(node: str, port: int) -> bool:
    with socket.socket() as listener:
        return listener.connect_ex((node, port)) != 0


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "student: {model: s}\nteacher: {model: t}\ndata: {train: prompts.jsonl, max_tokens: 4096}\nout: runs/a\n"
        "rollout: {prompts_per_step: 8}\n"
    )
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of the programs. After the test, what they have started is ended."""
    log = tmp_path / "bin"
    log.mkdir()
    yield log
    groups = (log / "groups").read_text().split() if (log / "groups").exists() else []
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(int(group), signal.SIGKILL)


@pytest.mark.parametrize("engine", ["vllm", slow("stillhouse")])
def test_the_servers_share_the_gpus_and_the_run_gets_their_addresses(
    folder: Path, run_yaml: Path, engine: str
) -> None:
    job = Job(folder, str(run_yaml), "train.steps=3", TEACHER_ENGINE=engine, WRITER_ENGINE=engine)
    job.end(0)
    teachers = [job.started(NODES[0], number) for number in range(4)]
    writers = [job.started(NODES[1], number) for number in range(8)]
    assert [teacher[0] for teacher in teachers] == ["0,1", "2,3", "4,5", "6,7"]
    assert [writer[0] for writer in writers] == list("01234567")
    assert {teacher[1] for teacher in teachers} == {"0"}
    for servers, model, processes, works in ((teachers, TEACHER, 2, TEACHES), (writers, STUDENT, 1, WRITES)):
        for number, (_, _, *arguments) in enumerate(servers):
            if engine == "vllm":
                assert arguments[:2] == ["serve", model]
                assert set(works) < {*arguments}
                assert arguments[-6:] == [
                    *("--tensor-parallel-size", str(processes), "--host", "0.0.0.0"),
                    *("--port", str(job.port + number)),
                ]
            else:
                launch = parse(["torchrun", *arguments])
                assert (launch.command, launch.processes, launch.options["teacher"]) == ("serve", processes, model)
                assert launch.options["generate"] == (model == STUDENT)
                assert (launch.options["host"], launch.options["port"]) == ("0.0.0.0", job.port + number)
    for node in NODES[2:]:
        launch = parse(["torchrun", *(folder / f"torchrun.{node}").read_text().splitlines()])
        assert (launch.command, launch.nodes, launch.processes) == ("distill", 2, 8)
        config = launch.config()
        assert config.train.steps == 3
        assert config.teacher is not None
        assert config.teacher.urls == [f"http://{NODES[0]}:{job.port + number}" for number in range(4)]
        assert config.rollout is not None
        assert config.rollout.urls == [f"http://{NODES[1]}:{job.port + number}" for number in range(8)]
        assert config.rollout.engine == engine
        # `stillhouse serve` sends the tokenizer and the head itself
        assert (config.student.model, config.teacher.model) == (STUDENT, TEACHER if engine == "vllm" else None)
    wait_for(lambda: not job.answers(NODES[0], 0) and not job.answers(NODES[1], 7), 10)


def test_a_signal_ends_the_trainer_before_the_servers(folder: Path, run_yaml: Path) -> None:
    """SLURM signals the script alone; its exit code is the trainer's."""
    job = Job(folder, str(run_yaml), TRAINS="1", NODE_GPUS="2")
    wait_for((folder / f"torchrun.{NODES[2]}").exists)
    assert job.answers(NODES[0], 0)
    job.process.send_signal(signal.SIGTERM)
    job.end(143)
    assert (folder / "checkpoint").exists()
    wait_for(lambda: not job.answers(NODES[0], 0) and not job.answers(NODES[1], 0), 10)


def test_a_server_that_dies_is_started_again(folder: Path, run_yaml: Path) -> None:
    port = free_ports(NODES, 8)
    job = Job(folder, str(run_yaml), NODE_GPUS="2", DIES=f"{NODES[1]}:{port}", PORT=str(port))
    job.end(0)
    assert (folder / "died").exists()


def test_sizes_that_do_not_fit_are_refused(folder: Path, run_yaml: Path) -> None:
    err = Job(folder, str(run_yaml), NODE_GPUS="2", TEACHER_GPUS="4").end(2)
    assert err == "a server has at most the 2 GPUs of a node (TEACHER_GPUS, WRITER_GPUS, NODE_GPUS)\n"
    err = Job(folder, str(run_yaml), nodes=NODES[:2]).end(2)
    assert err == "2 nodes: expected more than the 2 of the servers (TEACHER_NODES, WRITER_NODES)\n"
    err = Job(folder, str(run_yaml), WRITER_ENGINE="stillhouse", WRITER_GPUS="2").end(2)
    assert err == "stillhouse serve --generate has the whole model in one process: expected WRITER_GPUS=1\n"
    err = Job(folder, str(run_yaml), TEACHER_ENGINE="sglang").end(2)
    assert err == "TEACHER_ENGINE=sglang: expected vllm or stillhouse\n"


def test_a_server_that_never_answers_ends_the_job(folder: Path, run_yaml: Path) -> None:
    job = Job(folder, str(run_yaml), NODE_GPUS="2", LOAD_SECONDS="1", HANGS="1")
    assert "does not answer after" in job.end(1)


def test_the_sizes_are_those_of_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes in the script and in docs/scaling.md are what the benchmark prints."""
    runpy.run_module("benchmarks.scaling", run_name="__main__")
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert "teacher's server: 65.5 GB" in printed
    assert "65.5 GB" in page
    assert "16.4 GB, 147,456 bytes per token" in printed
    assert "16.4 GB and 147 kB per token" in page
    assert "on one GPU: 377,187" in printed
    assert all("377,000" in text for text in (page, (ROOT / "examples" / "slurm_on_policy.sh").read_text()))
    assert "fsdp 8: 37.4 GB\ntrainer, fsdp 16: 29.1 GB" in printed
    assert "37 GB with fsdp 8, 29 GB with fsdp 16" in page
    assert "teacher and trainer: 6.55e+10 6.55e+10" in printed
