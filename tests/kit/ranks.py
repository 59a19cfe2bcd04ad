"""The ranks of one `stillhouse` command without torchrun. A fork server starts these processes in about a second.

    ranks = Ranks(2, "distill", folder / "run.yaml", "parallel.fsdp=2")
    ranks.send(signal.SIGSTOP, 1)
    codes = ranks.wait()
    ranks[0].err

The ranks connect to a store of this test process, as ranks of torchrun connect to the store of torchrun's agent. With
`store_in_rank_0` the store is in rank 0, as with TORCH_DISABLE_SHARE_RDZV_TCP_STORE.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kit.runs import Command
from torch.distributed import TCPStore

HOST = "127.0.0.1"
#: starts two ranks of what follows
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Ranks:
    """`count` processes of one command.

    hook: a function that causes a fault. Every process calls it first; with hook_rank, only this rank does.
    environment: variables in addition to those that torchrun sets.
    by_rank: for each rank, arguments in addition to the common ones.
    """

    def __init__(
        self,
        count: int,
        *arguments: Any,
        hook: Callable[..., None] | None = None,
        hook_arguments: tuple[Any, ...] = (),
        hook_rank: int | None = None,
        store_in_rank_0: bool = False,
        environment: dict[str, str] | None = None,
        by_rank: Sequence[Sequence[str]] | None = None,
    ):
        self._store = None if store_in_rank_0 else TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(free_port() if self._store is None else self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self._store is not None),
            **(environment or {}),
        }
        self.commands = [
            Command(
                *arguments,
                *(() if by_rank is None else by_rank[rank]),
                hook=hook if hook_rank in (None, rank) else None,
                hook_arguments=hook_arguments,
                environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(count)
        ]

    def __getitem__(self, rank: int) -> Command:
        return self.commands[rank]

    def __iter__(self) -> Iterator[Command]:
        return iter(self.commands)

    def send(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all. A rank that has ended is skipped."""
        for command in self.commands if rank is None else [self.commands[rank]]:
            if command.process.exitcode is None:
                command.send(number)

    def wait(self, seconds: float = 120, grace: float = 20) -> list[int]:
        """Return the exit code of each rank; a negative one is the signal that ended it.

        If a rank has failed, the others get SIGTERM after `grace` seconds and SIGKILL later; torchrun does the same.
        Raises AssertionError if no rank has failed and some still run after `seconds`.
        """
        end = time.monotonic() + seconds
        failed_at: float | None = None
        while any(command.process.exitcode is None for command in self.commands):
            now = time.monotonic()
            if failed_at is None and any(command.process.exitcode for command in self.commands):
                failed_at = now
            if failed_at is not None and now > failed_at + grace:
                self.send(signal.SIGKILL if now > failed_at + 2 * grace else signal.SIGTERM)
                time.sleep(grace / 10)
            if failed_at is None and now > end:
                self.send(signal.SIGKILL)
                raise AssertionError(f"still running after {seconds} s:\n{self.texts}")
            time.sleep(0.01)
        return [command.process.exitcode for command in self.commands]  # type: ignore[misc]

    @property
    def texts(self) -> str:
        """All output of all ranks, for the messages of failed tests."""
        return "".join(f"rank {rank}:\n{command.out}{command.err}" for rank, command in enumerate(self.commands))

    @property
    def err(self) -> str:
        return "".join(command.err for command in self.commands)


def run_ranks(count: int, *arguments: Any, **options: Any) -> Ranks:
    """Run a command to its end on all ranks, and assert that it succeeds. options: of `Ranks`."""
    ranks = Ranks(count, *arguments, **options)
    assert ranks.wait(240) == [0] * count, ranks.texts
    return ranks


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def under_torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a `stillhouse` command to its end, as two ranks of torchrun."""
    command = [*TORCHRUN, "-m", "stillhouse", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
