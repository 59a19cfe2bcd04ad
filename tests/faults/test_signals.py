"""Signals that end a run: it stops after a step with a checkpoint, and the resumed run is bitwise the same.

The signals are real. A process sends them to itself at a point that the test chooses, or the test sends them.
"""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.fork_server import fork_server
from kit.ranks import Ranks, run_ranks
from kit.runs import Command, assert_same_run, last_step, run, wait_for, write_run
from kit.signal_hooks import (
    hang_at_step,
    ignoring_signal_at,
    interrupt_main_thread,
    signal_at,
    signal_when,
)

from stillhouse import load_config
from stillhouse.run.run import distill

NAMES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 138}
LIMIT = 180
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models that have dropout, data, run.yaml, and `whole`, an undisturbed run of 12 steps."""
    folder = tmp_path_factory.mktemp("signals")
    write_run(folder, family="gpt2", **{"train.steps": 12, "checkpoint.every": 4, "eval.every": 3})
    run("distill", folder / "run.yaml", f"out={folder / 'whole'}")
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A similar folder without a run. Its models are of a family that every layout supports."""
    folder = tmp_path_factory.mktemp("layouts")
    write_run(folder, **{"train.steps": 12, "checkpoint.every": 4, "eval.every": 3})
    return folder


def start(*arguments: str | Path, launcher: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
    """The command in a new interpreter, with the imports that a fork of the server has behind it already."""
    command = [sys.executable, "-m", *launcher, "stillhouse", *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, **options)


def assert_continues(folder: Path, out: Path) -> str:
    """The run in `out` continues, and becomes the undisturbed one. Returns its output."""
    ended = run("distill", folder / "run.yaml", f"out={out}")
    assert_same_run(out, folder / "whole")
    return ended.out


def assert_stopped(command: Command, name: str, step: int, out: Path) -> None:
    """Assert that the run reported the stop in one line and has a checkpoint of the step, but no model."""
    checkpoint = out / "checkpoints" / f"step-{step:08d}"
    stopped = f"stopped by {name} after step {step}; checkpoint {checkpoint};"
    *before, last = command.err.splitlines()
    assert last.startswith(stopped)
    assert last.endswith("continues from it")
    assert before in (
        [],
        [f"{name}: finishing this step and a checkpoint of it; a second signal ends the run at once"],
    )
    assert (checkpoint / "state.json").is_file()
    assert not (out / "model").exists()


@pytest.mark.parametrize("name", [name if name == "SIGTERM" else slow(name) for name in NAMES])
def test_a_signal_between_two_checkpoints(whole: Path, name: str) -> None:
    """Step 6 has an evaluation but no checkpoint; step 7 has neither."""
    step = 7 if name == "SIGTERM" else 6
    out, number = whole / name, signal.Signals[name]
    arguments = ["distill", str(whole / "run.yaml"), f"out={out}"]
    command = Command(*arguments, hook=signal_at, hook_arguments=(step, number))
    assert command.wait() == NAMES[name]
    assert_stopped(command, name, step, out)
    assert f"; `stillhouse {' '.join(arguments)}` continues from it" in command.err
    assert f"resuming from {out}/checkpoints/step-{step:08d}\n" in assert_continues(whole, out)


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        *(slow("fsdp=2", rank) for rank in (0, 1, None)),
        slow("pipeline=2", 0),
    ],
)
def test_all_ranks_stop_at_one_step(request: pytest.FixtureRequest, layout: str, rank: int | None) -> None:
    """One rank gets a signal, as if only its machine were shut down, or all ranks get it (None).

    Rank 0 gets it after step 6; the others at any moment, so that they may notice it in different steps. Under fsdp
    the models have dropout.
    """
    folder: Path = request.getfixturevalue("whole" if layout == "fsdp=2" else "plain")
    arguments = ["distill", folder / "run.yaml", *(f"parallel.{key}" for key in layout.split())]
    undisturbed, out = folder / f"{layout} undisturbed", folder / f"{layout} {rank}"
    if not undisturbed.exists():
        run_ranks(2, *arguments, f"out={undisturbed}")
    hook = {"hook": signal_at, "hook_arguments": (6, signal.SIGTERM), "hook_rank": 0} if rank == 0 else {}
    ranks = Ranks(2, *arguments, f"out={out}", **hook)
    if rank != 0:
        wait_for(lambda: last_step(out) >= 2)
        ranks.send(signal.SIGTERM, rank)
    assert ranks.wait() == [143, 143], ranks.texts
    assert ranks[1].err == "" or rank != 0
    assert "Traceback" not in ranks.err
    (checkpoint,) = sorted((out / "checkpoints").iterdir())[-1:]
    assert_stopped(ranks[0], "SIGTERM", int(checkpoint.name[5:]), out)
    assert rank != 0 or checkpoint.name == "step-00000006"
    ranks = run_ranks(2, *arguments, f"out={out}")
    assert f"resuming from {checkpoint}\n" in ranks[0].out
    assert_same_run(out, undisturbed)


BEFORE_TRAINING = {
    "preparing": ("stillhouse.run.data", "load_documents"),
    "loading": ("stillhouse.run.models", "load_model"),
    "first evaluation": ("stillhouse.loops.training", "held_out_metrics"),
}


@pytest.mark.parametrize(
    ("where", "name"),
    [("loading", "SIGTERM"), *(slow(where, "SIGINT") for where in ("preparing", "first evaluation"))],
)
def test_a_signal_before_the_first_step_ends_the_run_at_once(whole: Path, where: str, name: str) -> None:
    out = whole / f"{where} {name}"
    arguments = ["distill", str(whole / "run.yaml"), f"out={out}"]
    command = Command(*arguments, hook=signal_when, hook_arguments=(*BEFORE_TRAINING[where], signal.Signals[name]))
    assert command.wait() == NAMES[name]
    word = "interrupted" if name == "SIGINT" else f"stopped by {name}"
    assert command.err.count("\n") == 1
    assert command.err.startswith(f"{word}; `stillhouse distill ")
    assert "continues from the run's last checkpoint, or from the start if there is none yet" in command.err
    assert "minimise" in command.out  # lines that were printed before the signal are not lost
    assert_continues(whole, out)


@pytest.mark.parametrize("command", ["check", "demo"])
def test_other_commands_end_at_once(whole: Path, tmp_path: Path, command: str) -> None:
    arguments = {"check": [whole / "run.yaml", f"out={whole / 'unused'}"], "demo": ["--out", tmp_path]}
    started = Command(command, *arguments[command], hook=interrupt_main_thread)
    assert started.wait() == 130
    assert started.err.startswith(f"interrupted; `stillhouse {command}")
    assert started.err.endswith("starts again\n")
    assert started.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("library", ["pydantic_core", "libtorch_cpu.so"])
def test_ctrl_c_while_it_imports(whole: Path, library: str) -> None:
    """A command imports libraries for some seconds."""
    process = start("distill", whole / "run.yaml", f"out={whole / 'imports'}", stderr=subprocess.PIPE)
    wait_for(lambda: library in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert err.startswith("interrupted; `stillhouse distill")
    assert err.count("\n") == 1


def test_a_signal_in_an_evaluation_or_a_save_waits_for_its_end(whole: Path) -> None:
    for name, call, step in (("held_out_metrics", 1, 3), ("save_checkpoint", 0, 4)):
        out = whole / f"in {name}"
        arguments = ("stillhouse.loops.training", name, signal.SIGINT, call)
        command = Command("distill", whole / "run.yaml", f"out={out}", hook=signal_when, hook_arguments=arguments)
        assert command.wait() == 130
        assert_stopped(command, "SIGINT", step, out)
        assert_continues(whole, out)


def test_a_signal_at_the_end_of_a_run_does_not_stop_it(whole: Path) -> None:
    """The signal comes in the last step, or while the final model is written; the run still completes."""
    hooks: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (signal_at, (12, signal.SIGTERM)),
        (signal_when, ("stillhouse.run.run", "_write_model", signal.SIGTERM)),
    ]
    for number, (hook, arguments) in enumerate(hooks):
        out = whole / f"end {number}"
        command = Command("distill", whole / "run.yaml", f"out={out}", hook=hook, hook_arguments=arguments)
        assert command.wait() == 0, command.err
        assert command.err.startswith("SIGTERM: finishing ")
        assert_same_run(out, whole / "whole")


def test_the_second_signal_ends_it_at_once(whole: Path) -> None:
    out = whole / "hangs"
    command = Command("distill", whole / "run.yaml", f"out={out}", hook=hang_at_step, hook_arguments=(5,))
    wait_for(lambda: last_step(out) == 5)
    command.send(signal.SIGTERM)
    wait_for(lambda: "SIGTERM: finishing" in command.err)
    assert command.process.exitcode is None
    command.send(signal.SIGINT)
    assert command.wait() == 130
    assert "interrupted; `stillhouse distill" in command.err
    assert_continues(whole, out)


@pytest.mark.slow
def test_a_signal_that_torchrun_repeats_counts_once(whole: Path) -> None:
    """SLURM signals all processes of a job step; one of them, torchrun, passes its signal on to the ranks."""
    out = whole / "repeated"
    arguments = ["distill", whole / "run.yaml", f"out={out}", "parallel.fsdp=2"]
    ranks = Ranks(2, *arguments, hook=hang_at_step, hook_arguments=(5,))
    wait_for(lambda: last_step(out) == 5)
    for _ in range(3):
        ranks.send(signal.SIGTERM)
        time.sleep(0.05)
    time.sleep(0.2)
    assert [rank.process.exitcode for rank in ranks] == [None, None]
    time.sleep(1)
    ranks.send(signal.SIGTERM)
    assert ranks.wait() == [143, 143]


@pytest.mark.slow
def test_a_signal_that_was_ignored_stays_ignored(whole: Path) -> None:
    """`nohup` ignores SIGHUP, so the run continues after its terminal is closed."""
    out = whole / "nohup"

    hook = {"hook": ignoring_signal_at, "hook_arguments": (5, signal.SIGHUP)}
    command = Command("distill", whole / "run.yaml", f"out={out}", **hook)
    assert command.wait() == 0, command.err
    assert command.err == ""


@pytest.mark.slow
def test_a_terminal_that_goes_away(whole: Path) -> None:
    """When SIGHUP comes, nothing can be written to the terminal any more. The checkpoint is still written."""
    out = whole / "terminal"
    master, terminal = pty.openpty()
    arguments = ("distill", whole / "run.yaml", f"out={out}", "train.steps=100000")
    command = Command(*arguments, hook=in_terminal, hook_arguments=(os.ttyname(terminal),))
    reader = threading.Thread(target=read_all, args=(master,), daemon=True)
    reader.start()
    wait_for(lambda: last_step(out) >= 3)
    os.close(terminal)
    os.close(master)
    assert command.wait(LIMIT) == 129
    newest = sorted((out / "checkpoints").iterdir())[-1]
    assert int(newest.name[5:]) == last_step(out) >= 3


def in_terminal(name: str) -> None:
    """Let the terminal be the one that controls this process, and its input and output."""
    os.setsid()
    terminal = os.open(name, os.O_RDWR)  # the first one that a session opens controls it
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    os.close(terminal)


def read_all(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:
        pass


def write_to(pipe: Path) -> None:
    """Write the output of this process to a pipe. Waits for its reader."""
    descriptor = os.open(pipe, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 0.5])
def test_ctrl_c_also_ends_the_reader_of_the_output(whole: Path, seconds: float) -> None:
    """The reader, such as `tee`, may end before the run receives the signal."""
    out, pipe = whole / f"tee {seconds}", whole / f"pipe {seconds}"
    os.mkfifo(pipe)
    arguments = ("distill", whole / "run.yaml", f"out={out}", "eval.every=1")
    command = Command(*arguments, hook=write_to, hook_arguments=(pipe,))
    with pipe.open():
        wait_for(lambda: last_step(out) >= 1)
    time.sleep(seconds)
    command.send(signal.SIGINT)
    assert command.wait(LIMIT) == 130
    newest = sorted((out / "checkpoints").iterdir())[-1]
    assert int(newest.name[5:]) == last_step(out)


@pytest.mark.slow
def test_the_library_leaves_signals_alone(whole: Path) -> None:
    """A script that calls the library keeps its own signal handlers."""
    process = fork_server().Process(target=call_library, args=(whole / "run.yaml", whole / "library"), daemon=True)
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 0
    assert_same_run(whole / "library", whole / "whole")


def call_library(run_yaml: Path, out: Path) -> None:
    torch.set_num_threads(1)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    distill(load_config(run_yaml, overrides=[f"out={out}"]))
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.slow
def test_torchrun_passes_its_signal_on(whole: Path) -> None:
    out = whole / "torchrun"
    launcher = "torch.distributed.run --standalone --nproc-per-node 2 --signals-to-handle SIGUSR1 -m"
    run_yaml = [whole / "run.yaml", f"out={out}", "parallel.fsdp=2", "train.steps=100000"]
    with start("distill", *run_yaml, launcher=launcher.split(), stderr=subprocess.PIPE) as job:
        wait_for(lambda: last_step(out) >= 3, LIMIT)
        job.send_signal(signal.SIGUSR1)
        _, err = job.communicate(timeout=LIMIT)
    assert f"stopped by SIGUSR1 after step {last_step(out)}; checkpoint {out}/checkpoints/step-" in err
    assert "forcefully" not in err
    assert err.count("Traceback") == 1  # torchrun prints one after a signal


def fork_when_data_are_read() -> None:
    """The fork is still alive when the command ends, as the process of a chat template after an error."""
    from stillhouse.run import data

    read = data.load_documents

    def with_fork(*arguments: Any, **options: Any) -> Any:
        if not os.fork():
            time.sleep(60)
            os._exit(0)
        return read(*arguments, **options)

    data.load_documents = with_fork


def test_a_fork_that_is_still_alive_does_not_keep_the_command(whole: Path) -> None:
    """It has the descriptors of the thread that reads signals, which would wait for a signal from it for ever."""
    command = Command("check", whole / "run.yaml", hook=fork_when_data_are_read)
    assert command.wait(40) == 0, command.err
