"""Finds the worker processes in which a run calls the user's functions."""

from pathlib import Path

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
