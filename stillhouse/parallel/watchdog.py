"""Ends a job in which a rank hangs, and names that rank.

A collective waits for all of its ranks: one that hangs (a stopped process, a dead machine, a file system that does
not answer) keeps all others waiting, in silence. So each rank has two threads beside its main thread. One publishes
in the job's store, a few times in `seconds`, that the rank is alive and which phase of the run its main thread is in,
and reads the same of all others. The second one looks at what was read, and ends the process where

  - a rank has given no sign of life for `seconds`, or the store itself does not answer;
  - the own main thread makes no progress for `seconds` in a phase that is timed (`enter`, `progress`).

It never waits for the store itself, since that may be held by the rank that hangs. All ranks go through the same
phases in the same order, so that the number of a rank's phase says how far it is.
"""

import atexit
import json
import os
import socket
import threading
import time
from dataclasses import dataclass

from torch.distributed import Store

from stillhouse.ending import end_process, error_line

#: how many times in `seconds` a rank gives a sign of life, and the most seconds between two of them
BEATS, MOST_SECONDS_BETWEEN = 10, 15.0
#: for which other ranks wait with an error that the first one prints, too
SECONDS_FOR_FIRST = 10.0
FAILED = 1

_watchdog: "Watchdog | None" = None


def start(store: Store, rank: int, ranks: int, seconds: float) -> None:
    """Watch the ranks of a job that meets at `store` until `stop`."""
    global _watchdog
    stop()
    own_connection = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it (2.13)
    _watchdog = Watchdog(own_connection, rank, ranks, seconds)
    atexit.register(stop)  # a thread that is inside the store while the interpreter ends would crash it


def stop() -> None:
    """Watch no longer. All ranks call this after a barrier, so that none is missed."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = None


def enter(phase: str, *, timed: bool = True) -> None:
    """The main thread begins something that all ranks do at this point; `timed` where it may only last so long."""
    if _watchdog is not None:
        _watchdog.enter(phase, timed)


def progress() -> None:
    """The main thread begins another micro-batch of its phase, so that its time starts anew."""
    if _watchdog is not None:
        _watchdog.own.since = time.monotonic()
        _watchdog.own.begun += 1


@dataclass
class Peer:
    """What is known of a rank. since: when it was last heard of, or this rank made progress, on this process's clock.

    number: of phases so far; begun: micro-batches of the present one.
    """

    since: float
    beat: int = -1
    number: int = 0
    begun: int = 0
    phase: str = ""
    process: str = ""
    timed: bool = False


class Watchdog:
    """store: a connection of its own, since the main thread's is blocked while that thread waits for an answer."""

    def __init__(self, store: Store, rank: int, ranks: int, seconds: float):
        self.store, self.rank, self.ranks, self.seconds = store, rank, ranks, seconds
        now = time.monotonic()
        self.own = Peer(now, phase="the start", process=f"{socket.gethostname()}, process {os.getpid()}")
        self._peers = {each: Peer(now) for each in range(ranks) if each != rank}
        self._store_answered = now
        self._interval = min(seconds / BEATS, MOST_SECONDS_BETWEEN)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._exchange, self._watch)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(self._interval)  # in vain where the store does not answer

    def enter(self, phase: str, timed: bool) -> None:
        number, process = self.own.number + 1, self.own.process
        self.own = Peer(time.monotonic(), number=number, phase=phase, process=process, timed=timed)

    def _exchange(self) -> None:
        """Publish and read signs of life until the end, or until the store is gone, which `_watch` notices."""
        beat, present = 0, set[int]()
        while True:
            own = self.own
            try:
                self.store.set(_key(self.rank), json.dumps([beat, own.number, own.begun, own.phase, own.process]))
                # reading a key waits until it is there
                present |= {rank for rank in self._peers if rank not in present and self.store.check([_key(rank)])}
                ranks = sorted(present)
                texts = self.store.multi_get([_key(rank) for rank in ranks]) if ranks else []
            except RuntimeError:  # torch's DistNetworkError, DistStoreError
                return
            self._store_answered = time.monotonic()
            for rank, text in zip(ranks, texts, strict=True):
                if (heard := Peer(time.monotonic(), *json.loads(text))).beat != self._peers[rank].beat:
                    self._peers[rank] = heard
            beat += 1
            if self._stopped.wait(self._interval):
                return

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            if now - before > 3 * self._interval:  # this process was stopped, too: its clocks say nothing of others
                self._begin_anew(now)
            before = now
            fault = self._fault(now)
            if fault is not None and not self._stopped.is_set():
                self._end(*fault)

    def _begin_anew(self, now: float) -> None:
        self._store_answered = self.own.since = now
        for peer in self._peers.values():
            peer.since = now

    def _fault(self, now: float) -> tuple[str, set[int]] | None:
        """What is wrong with the job, in a sentence, and the ranks that cannot say so; None where nothing is."""
        if now - self._store_answered > self.seconds:
            return _no_store(self._limit)
        silent = [rank for rank, peer in self._peers.items() if now - peer.since > self.seconds]
        if silent:
            return " and ".join(self._silence(rank) for rank in silent), set(silent)
        own = self.own
        # later than for signs of life, so that a process that has stopped is named as such
        if not own.timed or now - own.since <= self.seconds + 3 * self._interval:
            return None
        behind = [rank for rank, peer in self._peers.items() if peer.number < own.number]
        if behind:
            others = " and ".join(f"{self._name(rank)} is still at {self._peers[rank].phase}" for rank in behind)
            return f"{others}, while this rank has waited at {own.phase} for {self._limit}", set()
        begun = {self.rank: own.begun} | {rank: peer.begun for rank, peer in self._peers.items()}
        fewest = [str(rank) for rank, count in sorted(begun.items()) if count == min(begun.values())]
        where = "" if len(fewest) == self.ranks else f"; rank {', '.join(fewest)} has begun the fewest micro-batches"
        message = f"{own.phase} has made no progress for {self._limit}, though all ranks give signs of life"
        return message + where, set()

    def _end(self, message: str, silent: set[int]) -> None:
        """The first rank prints the message at once, and torchrun then ends the others before they do."""
        if self.rank != min(rank for rank in range(self.ranks) if rank not in silent):
            self._stopped.wait(SECONDS_FOR_FIRST)
        end_process(FAILED, error_line(f"{message}; a run goes on from its last checkpoint"))

    def _silence(self, rank: int) -> str:
        if not self._peers[rank].process:
            return f"rank {rank} has not joined the others within {self._limit}"
        return (
            f"{self._name(rank)} has given no sign of life for {self._limit}, last seen at {self._peers[rank].phase}"
        )

    @property
    def _limit(self) -> str:
        return f"{self.seconds:g} s (train.timeout)"

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._peers[rank].process})"


def _key(rank: int) -> str:
    return f"sign of life of rank {rank}"


def _no_store(limit: str) -> tuple[str, set[int]]:
    """What `_fault` gives where the store does not answer."""
    held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holder, silent = ("torchrun", set()) if held_by_torchrun else ("rank 0", {0})
    where = os.environ["MASTER_ADDR"]
    return f"{holder} on {where}, which holds the job's store, has not answered for {limit}", silent
