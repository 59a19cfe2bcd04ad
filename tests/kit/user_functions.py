"""Rewards, environments and callbacks that end the process, hang, raise, change their record or return nonsense."""

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stillhouse import preemption

#: the variable of a run's processes with the path of a file that says how a reward or environment is to misbehave
FAULT = "STILLHOUSE_CHAOS_FAULT"


def length(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """A reward, which changes its record."""
    misbehave()
    record["seen"] = record.get("seen", 0) + 1
    return float(len(completion) * record["seen"])


def echo(prompt: str, completion: str, record: dict[str, Any]) -> str | None:
    """An environment that answers twice, and changes its record."""
    misbehave()
    record["turns"] = record.get("turns", 0) + 1
    return None if completion.count("!") >= 2 else record["turns"] * " no!"


def misbehave() -> None:
    """Do once what the file says."""
    path = Path(os.environ[FAULT])
    if not path.exists():
        return
    kind = path.read_text()
    path.unlink()
    if kind == "exit":
        sys.exit(0)
    while kind == "hang":
        try:
            time.sleep(150)
        except Exception:  # noqa: BLE001  as the code of users does
            continue
    raise KeyError(kind)


_MARK = "stillhouse.user_code.worker"


def workers_of(pid: int) -> list[int]:
    """The workers of the run with this process id."""
    return [worker for worker, parent in _workers().items() if parent == pid]


def are_gone(workers: list[int]) -> bool:
    return not set(workers) & set(_workers())


def _workers() -> dict[int, int]:
    """For each worker of any run that has not ended, the process id of its run."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if _MARK in (folder / "cmdline").read_text():  # empty for a process that has ended
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return parents


def named(function: Any) -> str:
    return f"{__name__}:{function.__name__}"


def control_c(*_: Any) -> float:
    raise KeyboardInterrupt


def raises_in_callback(context: Any) -> dict[str, float]:
    raise RuntimeError(f"at step {context.step}")


def half(*_: Any) -> str:
    return " a\ud800"


def counts(prompt: str, completion: str, record: dict[str, Any], turns: Any = ()) -> float:
    """A reward that changes its record and its turns. It depends on its arguments alone if these are always the same.
    Replies of an environment count twice.
    """
    record["seen"] = [*record.get("seen", []), completion]
    record.pop("completion", None)
    replies = [turn.pop("text") for turn in turns if turn["role"] == "environment"]
    return float(len(completion) * len(record["seen"]) + sum(map(len, replies)))


def remembers(prompt: str, completion: str, record: dict[str, Any]) -> str | None:
    """An environment that changes its record."""
    record["turns"] = record.get("turns", 0) + 1
    return None if completion.count("!") >= 2 else record["turns"] * " no!"


class Remembers:
    """An environment with state: its replies depend on the turns before."""

    def reset(self, prompt: str, record: dict[str, Any]) -> None:
        self.turns, self.length = 0, len(prompt)

    def step(self, turn: str) -> str | None:
        self.turns, self.length = self.turns + 1, self.length + len(turn)
        return None if self.turns == 3 else f" {self.length}!"

    def reward(self) -> float:
        return float(self.turns * self.length)


_released = threading.Event()


def leaves_a_thread(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """As after `future.result(timeout)` of a checker that hangs."""
    if not any(thread.name == "checker" for thread in threading.enumerate()):
        threading.Thread(target=_released.wait, name="checker", daemon=False).start()
    return float(len(completion))


_marked: list[Path] = []


def mark(path: str) -> None:
    """A hook of a run's processes: a function that hangs marks this file. It hangs once `path`.warm exists.

    After a signal, it has one second to return. A line names it after 0.3 seconds.
    """
    _marked.append(Path(path))
    preemption.SECONDS_UNTIL_NAMED, preemption.SECONDS_BETWEEN_LOOKS = 0.3, 0.1
    preemption.SECONDS_TO_RETURN = 1.0


def _hangs() -> bool:
    is_warm = Path(f"{_marked[0]}.warm").exists()
    if is_warm:
        _marked[0].touch()
    return is_warm


def _hanging(hang: Callable[[], Any]) -> Callable[..., float]:
    @functools.wraps(hang)
    def reward(prompt: str, completion: str, record: dict[str, Any]) -> float:
        return float(hang() if _hangs() else len(completion))

    return reward


@_hanging
def sleeps() -> None:
    time.sleep(1000)


@_hanging
def computes() -> None:
    while True:
        try:
            time.monotonic()
        except Exception:  # noqa: BLE001
            continue


@_hanging
def matches() -> None:
    """A regular expression that never ends lets no other thread run."""
    re.match(r"(a+)+$", 60 * "a" + "b")


@_hanging
def gives_up() -> float:
    try:
        return time.sleep(1000) or 0.0
    except:  # noqa: E722
        return 0.0


@_hanging
def fails_then() -> None:
    try:
        time.sleep(1000)
    except BaseException as error:
        raise ValueError("the answer cannot be checked") from error


@_hanging
def refuses_to_end() -> None:
    while True:
        try:
            time.sleep(1000)
        except BaseException:  # noqa: BLE001  so do some libraries
            continue


def evaluates_for_ever(context: Any) -> dict[str, float]:
    if context.step >= 2 and _hangs():
        time.sleep(1000)
    return {"one": 1.0}
