"""The calls of a pool of workers that wait for a worker."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import cycle
from typing import Any

from stillhouse.user_code.episodes import Episode, episode_of
from stillhouse.user_code.functions import Turn

_OfCompletion = tuple[str, str, Mapping[str, Any], str]
Arguments = _OfCompletion | tuple[*_OfCompletion, Episode] | tuple[*_OfCompletion, Sequence[Turn]]


class Call:
    """A call of the function number `at`."""

    def __init__(self, at: int, arguments: Any, future: Future[Any]):
        self.at, self.future = at, future
        self.arguments: Arguments = arguments

    @property
    def episode(self) -> Episode | None:
        """The turns of the sample whose object the call needs."""
        return episode_of(self.arguments)


class CallQueue:
    """Calls that wait. A call with an episode waits for one worker, all others for any worker."""

    def __init__(self, workers: int):
        self._changed, self._is_closed = threading.Condition(), False
        self._any_worker: deque[Call] = deque()
        self._by_worker: list[deque[Call]] = [deque() for _ in range(workers)]
        # by the number of a sample; its remainder would not do, because all samples of a source may have the same
        self._worker_of: dict[int, int] = {}
        self._next_worker = cycle(range(workers))

    def put(self, call: Call) -> None:
        with self._changed:
            waiting = self._any_worker if call.episode is None else self._by_worker[self._worker(call.episode)]
            waiting.append(call)
            self._changed.notify_all()

    def _worker(self, episode: Episode) -> int:
        worker = self._worker_of.pop(episode.number, None)
        worker = next(self._next_worker) if worker is None else worker
        if not episode.has_ended:
            self._worker_of[episode.number] = worker
        return worker

    def get(self, worker: int) -> Call | None:
        """Wait for a call for this worker; None if the queue is closed."""
        with self._changed:
            while not self._is_closed:
                for waiting in (self._by_worker[worker], self._any_worker):
                    if waiting:
                        return waiting.popleft()
                self._changed.wait()
        return None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
