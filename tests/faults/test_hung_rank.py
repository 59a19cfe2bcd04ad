"""If a rank hangs, the job ends after `train.timeout` with an error that names the rank.

If a rank dies, the job ends at once. Both errors are one line.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from kit import slow
from kit.ranks import Ranks, run_ranks
from kit.runs import assert_same_run, last_step, run, wait_for, write_run
from kit.signal_hooks import EVERY_RANK, at_step, signal_at
from torch.distributed.run import get_args_parser

from stillhouse.parallel import Degrees, Mesh, watchdog
from stillhouse.parallel.processes import connect_processes
from stillhouse.run import data
from stillhouse.run import run as run_module

AXES = ("fsdp", "tensor", "pipeline", "pipeline", "context")
SECONDS, LIMIT = 3, 180
LOST = "lost contact with another rank, which has ended or hangs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data and a run.yaml of 12 steps."""
    folder = tmp_path_factory.mktemp("hung")
    write_run(folder, **{"train.steps": 12, "checkpoint.every": 2, "train.timeout": SECONDS})
    return folder


def sleep_at(step: int, seconds: float) -> None:
    """Let the main thread of this rank sleep after it has written the line of a step."""
    at_step(step, lambda: time.sleep(seconds), logs=EVERY_RANK)


def stop_one_rank(folder: Path, out: Path, layout: str, rank: int, **options: Any) -> Ranks:
    """Run two ranks and stop one after step 5. When the other one has ended, kill the stopped one."""
    arguments = ["distill", folder / "run.yaml", f"parallel.{layout}", f"out={out}"]
    options |= {"hook": signal_at, "hook_arguments": (5, signal.SIGSTOP, EVERY_RANK), "hook_rank": rank}
    ranks = Ranks(2, *arguments, **options)
    assert ranks[1 - rank].wait(LIMIT) == 1, ranks.texts
    ranks.send(signal.SIGKILL, rank)
    ranks.wait()
    return ranks


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_a_stopped_rank_is_named(folder: Path, rank: int) -> None:
    """The same command then resumes and ends like an undisturbed run: after rank 0 was stopped, this is compared."""
    undisturbed, out = folder / "undisturbed", folder / f"stopped {rank}"
    arguments = ["distill", folder / "run.yaml", "parallel.fsdp=2"]
    ranks = stop_one_rank(folder, out, "fsdp=2", rank)
    which = "error: " if rank == 1 else "error on rank 1: "
    assert ranks[1 - rank].err.startswith(f"{which}rank {rank} (")
    assert f", process {ranks[rank].process.pid}) has sent no heartbeat for {SECONDS} s" in ranks[1 - rank].err
    assert ranks[1 - rank].err.count("\n") == 1
    if rank == 1:
        return
    for folder_of_run in (undisturbed, out):
        ranks = run_ranks(2, *arguments, f"out={folder_of_run}")
    assert "resuming from" in ranks[0].out
    assert_same_run(out, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "rank", "in_rank_0"), [("fsdp=2", 0, True), ("pipeline=2", 1, True), ("context=2", 0, False)]
)
def test_other_layouts_and_a_store_in_rank_0(folder: Path, layout: str, rank: int, in_rank_0: bool) -> None:
    """If rank 0 holds the store, the store does not answer, or the last heartbeat in it becomes too old."""
    ranks = stop_one_rank(folder, folder / f"{layout} {rank}", layout, rank, store_in_rank_0=in_rank_0)
    store = r"on 127\.0\.0\.1, which holds the job's store, has not answered|" * (rank == 0 and in_rank_0)
    silent = rf"({store}\(.*\) has sent no heartbeat) for {SECONDS} s \(train.timeout\)"
    assert re.match(f"error( on rank 1)?: rank {rank} {silent}", ranks[1 - rank].err)
    assert ranks[1 - rank].err.endswith("; when started again, the run continues from its last checkpoint\n")
    assert ranks[1 - rank].err.count("\n") == 1


@pytest.mark.slow
def test_a_rank_that_is_only_slow_is_not_ended(folder: Path) -> None:
    """A pause shorter than the limit is accepted, and so is a long stop of all ranks, as of a suspended job."""
    out = folder / "slow"
    arguments = ["distill", folder / "run.yaml", "parallel.fsdp=2", f"out={out}"]
    ranks = Ranks(2, *arguments, hook=sleep_at, hook_arguments=(5, SECONDS / 2))
    wait_for(lambda: last_step(out) == 5)
    ranks.send(signal.SIGSTOP)
    time.sleep(2 * SECONDS)
    ranks.send(signal.SIGCONT)
    assert ranks.wait() == [0, 0], ranks.texts
    assert ranks.err == ""


def fail_in_prepare(seconds: float) -> None:
    """Let this rank fail while it loads its data, or take `seconds` for it."""
    original = data.load_documents

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        if seconds < SECONDS:
            raise ValueError("no such file here")
        return original(*arguments, **options)

    data.load_documents = wrapped


def hang_before_meeting() -> None:
    """Let this rank hang before it connects to its launcher's store."""
    run_module.candidates = lambda *_: time.sleep(LIMIT)


#: faults of rank 1, and the error on rank 0
HANGS: dict[str, tuple[Callable[..., None], tuple[float, ...], str]] = {
    "before it joins": (
        hang_before_meeting,
        (),
        rf"error: rank 1 has not connected to the other ranks within {SECONDS} s \(train.timeout\)",
    ),
    # the rank sends heartbeats, but the others have waited for it longer than the limit
    "reading its data": (
        fail_in_prepare,
        (LIMIT,),
        r"error: rank 1 \(.*is still at reading the data, while this rank has waited at comparing data and models",
    ),
    # the rank stays one step behind the other one
    "in a step": (sleep_at, (5, LIMIT), r"error: .*(step.* has made no progress|is still at step 5)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", HANGS)
def test_a_main_thread_that_hangs_is_found_too(folder: Path, where: str) -> None:
    hook, arguments, error = HANGS[where]
    command = ["distill", folder / "run.yaml", "parallel.fsdp=2", "data.eval=0", f"out={folder / where}"]
    ranks = Ranks(2, *command, hook=hook, hook_arguments=arguments, hook_rank=1)
    assert ranks[0].wait(LIMIT) == 1, ranks.texts
    ranks.send(signal.SIGKILL)
    assert re.match(error, ranks[0].err), ranks.texts
    assert ranks[0].err.count("\n") == 1


@pytest.mark.parametrize("failing", [0, slow(1)])
def test_a_rank_that_fails_while_the_others_wait_for_it(folder: Path, failing: int) -> None:
    """The failing rank's error is printed, and the others end quickly when the launcher asks them to."""
    arguments = ["distill", folder / "run.yaml", "parallel.fsdp=2", "train.timeout=60", f"out={folder / 'fails'}"]
    ranks = Ranks(2, *arguments, hook=fail_in_prepare, hook_arguments=(0,), hook_rank=failing)
    codes = ranks.wait(grace=1)
    assert codes[failing] == 1
    assert codes[1 - failing] in (1, 143)  # lost contact with the failing rank, or ended by the launcher
    assert "no such file here" in ranks[failing].err
    assert "Traceback" not in ranks.err


@pytest.mark.parametrize(
    ("layout", "rank"),
    [("fsdp=2", 1), *(slow(f"{axis}=2", rank) for axis, rank in zip(AXES, (0, 0, 0, 1, 1), strict=True))],
)
def test_a_killed_rank_is_one_line_on_the_others(folder: Path, layout: str, rank: int) -> None:
    out = folder / f"killed {layout} {rank}"
    ranks = Ranks(2, "distill", folder / "run.yaml", f"parallel.{layout}", f"out={out}", "train.steps=100000")
    wait_for(lambda: last_step(out) >= 3)
    ranks.send(signal.SIGKILL, rank)
    assert ranks[1 - rank].wait(LIMIT) == 1
    (line,) = ranks[1 - rank].err.splitlines()
    assert line.startswith(f"error: {LOST}" if rank == 1 else ("error on rank 1: "))
    assert LOST in line or "rank 0 (" in line
    assert "continues from" in line


def test_one_process_has_no_watchdog(folder: Path) -> None:
    run("distill", folder / "run.yaml", f"out={folder / 'one'}", "train.timeout=0.001", "train.steps=2")


@pytest.mark.slow
def test_torchrun_ends_the_job(folder: Path) -> None:
    """torchrun kills the stopped process 30 s after the other one has ended, or as soon as it is told to."""
    rank, out = 1, folder / "torchrun"
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if "--shutdown-timeout" in get_args_parser().format_usage():  # not in older versions
        launcher += ["--shutdown-timeout", "2"]
    launcher += ["-m", "stillhouse"]
    arguments = ["distill", folder / "run.yaml", f"out={out}", "parallel.fsdp=2", "train.steps=100000"]
    arguments.append("train.timeout=10")  # a shorter limit could end while the ranks still import
    with subprocess.Popen(
        [sys.executable, "-m", *launcher, *arguments],
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
    ) as job:
        wait_for(lambda: last_step(out) >= 3, LIMIT)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[rank]), signal.SIGSTOP)
        _, err = job.communicate(timeout=LIMIT)
    assert job.returncode == 1
    assert f"rank {rank} (" in err
    assert f"process {children[rank]}) has sent no heartbeat for 10 s" in err
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def group_timeouts(rank: int, port: int, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    device = torch.device("cpu")
    connect_processes(device, 20000.0)
    mesh = Mesh(Degrees(fsdp=2), device)
    groups = [dist.group.WORLD, mesh.ranks.group, *mesh.weights.get_all_groups(), *mesh.tokens.get_all_groups()]
    results.put({group._get_backend(device).options._timeout.total_seconds() for group in groups})
    dist.barrier()
    watchdog.stop()
    dist.destroy_process_group()


def test_no_collective_gives_up_before_the_watchdog() -> None:
    """torch's groups do not inherit the time limit of the default group; NCCL's default is 10 minutes."""
    import torch.multiprocessing as multiprocessing
    from kit.ranks import free_port

    context = multiprocessing.get_context("forkserver")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=group_timeouts, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=LIMIT) for _ in processes] == [{40000.0}, {40000.0}]
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == 0
