"""Ends a job in which a rank hangs, and names that rank.

If a rank hangs (a stopped process, a dead machine, a file system that does not answer), all other ranks wait in a
collective without any message. So one thread of each rank publishes heartbeats, with the phase of the rank's main
thread, in the job's store. It also reads the heartbeats of all other ranks. A second thread checks these heartbeats.
It ends the process if

  - a rank has sent no heartbeat for `seconds`, or the store has not answered for `seconds`;
  - this process's main thread has made no progress for `seconds` in a timed phase (`enter`, `progress`).

The second thread never accesses the store, because the store may be on the rank that hangs. All ranks have the same
phases in the same order, so the number of a rank's phase shows how far this rank has come.
"""

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Store

from stillhouse.process import end_process, error_line

#: the number of a rank's heartbeats within `seconds`, and the longest interval between two heartbeats in seconds
BEATS, MAX_SECONDS_BETWEEN = 10, 15.0
#: one rank prints an error at once. All other ranks wait for this number of seconds before they print the error
SECONDS_FOR_FIRST = 10.0
FAILED = 1

_watchdog: "Watchdog | None" = None


def watch_ranks(store: Store, rank: int, ranks: int, seconds: float) -> None:
    """Watch the ranks of a job until `stop`. store: the job's store"""
    global _watchdog
    stop()
    _watchdog = Watchdog(store, rank, ranks, seconds)
    atexit.register(stop)  # a thread that uses the store while the interpreter ends would crash the process


def stop() -> None:
    """Stop watching. All ranks must call this after a barrier, so that no rank reports another rank as hung."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = None


def enter(phase: str, *, timed: bool = True) -> None:
    """Record that the main thread begins a phase. All ranks must enter the same phases in the same order.

    timed: whether the job ends if the main thread makes no progress for `seconds` in this phase.
    """
    if _watchdog is not None:
        number, process = _watchdog.state.number + 1, _watchdog.state.process
        _watchdog.state = Peer(time.monotonic(), number=number, phase=phase, process=process, timed=timed)


def progress() -> None:
    """Record that the main thread begins another micro-batch; this restarts the time limit of the phase."""
    if _watchdog is not None:
        _watchdog.state.since = time.monotonic()
        _watchdog.state.begun += 1


@contextmanager
def nested(phase: str, *, timed: bool = True) -> Iterator[None]:
    """Enter another phase for the block, and return to the current phase after it. timed: see `enter`."""
    before = None if _watchdog is None else _watchdog.state
    enter(phase, timed=timed)
    try:
        yield
    finally:
        if before is not None:
            enter(before.phase, timed=before.timed)


@dataclass
class Peer:
    """The latest information that this process has about a rank.

    since: the time of the rank's last heartbeat, by this process's clock. For this process itself, it is the time of
        the last progress.
    beat: the number of the last heartbeat.
    number: the number of phases that the rank has entered.
    begun: the number of micro-batches that the rank has begun in the current phase.
    """

    since: float
    beat: int = -1
    number: int = 0
    begun: int = 0
    phase: str = ""
    process: str = ""
    timed: bool = False


class Watchdog:
    """The two threads that watch a job."""

    def __init__(self, store: Store, rank: int, ranks: int, seconds: float):
        self.rank, self.ranks, self.seconds = rank, ranks, seconds
        # a separate connection, because the main thread blocks its connection to the store during a request
        self.store: Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it (2.13)
        self._store_answered = now = time.monotonic()
        self.state = Peer(now, phase="the start", process=f"{socket.gethostname()}, process {os.getpid()}")
        self._limit = f"{seconds:g} s (train.timeout)"
        self._peers = {peer: Peer(now) for peer in range(ranks) if peer != rank}
        self._interval = min(seconds / BEATS, MAX_SECONDS_BETWEEN)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._exchange, self._watch)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(self._interval)  # this times out if the store does not answer

    def _exchange(self) -> None:
        """Publish and read heartbeats until `stop`, or until the store is lost (`_watch` detects this)."""
        beat, present = 0, set[int]()
        while True:
            state = self.state
            try:
                heartbeat = [beat, state.number, state.begun, state.phase, state.process]
                self.store.set(_key(self.rank), json.dumps(heartbeat))
                # reading a key blocks until the key exists
                present |= {rank for rank in self._peers if rank not in present and self.store.check([_key(rank)])}
                ranks = sorted(present)
                texts = self.store.multi_get([_key(rank) for rank in ranks]) if ranks else []
            except RuntimeError:  # torch's DistNetworkError, DistStoreError
                return
            self._store_answered = time.monotonic()
            for rank, text in zip(ranks, texts, strict=True):
                if (received := Peer(time.monotonic(), *json.loads(text))).beat != self._peers[rank].beat:
                    self._peers[rank] = received
            beat += 1
            if self._stopped.wait(self._interval):
                return

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            # a long interval means that this process was suspended, so all recorded times are too old
            if now - before > 3 * self._interval:
                self._store_answered = now
                for peer in (self.state, *self._peers.values()):
                    peer.since = now
            before = now
            fault = self._fault(now)
            if fault is None or self._stopped.is_set():
                continue
            message, silent = fault
            # the lowest rank that is not silent prints at once. torchrun usually ends all others before they print
            if self.rank != min(rank for rank in range(self.ranks) if rank not in silent):
                self._stopped.wait(SECONDS_FOR_FIRST)
            end_process(
                FAILED, error_line(f"{message}; when started again, the run continues from its last checkpoint")
            )

    def _fault(self, now: float) -> tuple[str, set[int]] | None:
        """Return an error message and the ranks that cannot print it; None if there is no fault."""
        if now - self._store_answered > self.seconds:
            held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            holder = ("torchrun" if held_by_torchrun else "rank 0") + f" on {os.environ['MASTER_ADDR']}"
            message = f"{holder}, which holds the job's store, has not answered for {self._limit}"
            return message, set() if held_by_torchrun else {0}
        if silent := [rank for rank, peer in self._peers.items() if now - peer.since > self.seconds]:
            lines = [
                f"{self._name(rank)} has sent no heartbeat for {self._limit}, last seen at {self._peers[rank].phase}"
                if self._peers[rank].process
                else f"rank {rank} has not connected to the other ranks within {self._limit}"
                for rank in silent
            ]
            return " and ".join(lines), set(silent)
        state = self.state
        # this limit is longer than that for heartbeats, so a suspended rank's missing heartbeats are reported first
        if not state.timed or now - state.since <= self.seconds + 3 * self._interval:
            return None
        if behind := [rank for rank, peer in self._peers.items() if peer.number < state.number]:
            others = " and ".join(f"{self._name(rank)} is still at {self._peers[rank].phase}" for rank in behind)
            return f"{others}, while this rank has waited at {state.phase} for {self._limit}", set()
        begun = {self.rank: state.begun} | {rank: peer.begun for rank, peer in self._peers.items()}
        fewest = [str(rank) for rank, count in sorted(begun.items()) if count == min(begun.values())]
        where = "" if len(fewest) == self.ranks else f"; rank {', '.join(fewest)} has begun the fewest micro-batches"
        message = f"{state.phase} has made no progress for {self._limit}, although all ranks send heartbeats"
        return message + where, set()

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._peers[rank].process})"


def _key(rank: int) -> str:
    return f"heartbeat of rank {rank}"
