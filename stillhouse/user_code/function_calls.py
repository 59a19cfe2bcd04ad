"""The calls of a run's functions: in this process, one after the other, or in worker processes, many at once."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from stillhouse.user_code.tools import answer_of
from stillhouse.user_code.worker_pool import WorkerPool


class FunctionCalls:
    """Calls the user's functions by their configuration keys and paths.

    functions: pairs of key and path; the paths of tools are one text with spaces (see `answer_of`).
    workers: the number of processes that call the functions; 0: this process, in the thread that requests a call.
    seconds, memory_gib: the limits of a call in a worker.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, str]],
        workers: int = 0,
        seconds: float = 60.0,
        memory_gib: float | None = None,
    ):
        self._lock, self._times = threading.Lock(), dict[str, tuple[int, float]]()
        self._pool: WorkerPool | None = None
        if workers and functions:
            self._pool = WorkerPool(
                functions, workers, seconds=seconds, memory_gib=memory_gib, add_seconds=self._add_seconds
            )
        self._here = {} if self._pool is not None else {name: answer_of(*name) for name in functions}

    @property
    def are_elsewhere(self) -> bool:
        """Whether a request returns at once, so that any thread may make it."""
        return self._pool is not None

    def request(self, key: str, path: str, *arguments: Any) -> Future[Any]:
        """Start a call, and return the future of its result. arguments: (prompt, completion, record, source); for a
        class also an `Episode`, and for a reward that takes them the turns.

        A call that fails raises UserFunctionError: in this process at once, in a worker by the future. If the workers
        are closed, the future is never done.
        """
        if self._pool is not None:
            return self._pool.request(key, path, arguments)
        started = time.monotonic()
        future: Future[Any] = Future()
        future.set_result(self._here[key, path](*arguments))
        self._add_seconds(key, time.monotonic() - started)
        return future

    def _add_seconds(self, key: str, seconds: float) -> None:
        with self._lock:
            count, total = self._times.get(key, (0, 0.0))
            self._times[key] = count + 1, total + seconds

    def take_times(self) -> dict[str, tuple[int, float]]:
        """Return the number and the seconds of the calls since the last call of this method, by their keys."""
        with self._lock:
            times, self._times = self._times, {}
        return times

    def close(self) -> None:
        """End the workers; calls under way may never end."""
        if self._pool is not None:
            self._pool.close()
