"""Messages to the first rank while the main threads of all ranks compute, beside the collectives.

They go through the job's store, on a connection of their own. A message that is not received in time is lost, so they
may only tell earlier what a later collective tells anyway.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store, _get_default_store

_SECONDS_BETWEEN_LOOKS = 0.02


class Inbox(Protocol):
    """Takes messages."""

    def put(self, content: Any) -> None: ...


class EarlyMessages:
    """Sends and receives messages of this job; values must be representable in JSON."""

    def __init__(self) -> None:
        # the main thread blocks the group's own connection while it waits for an answer
        self._store: Store = _get_default_store().clone()  # type: ignore[attr-defined]  # torch's stubs lack it (2.13)

    def send(self, box: str, value: Any) -> None:
        """Send a message to the first rank. box: a name that the ranks have agreed on."""
        number = self._store.add(_count(box), 1)
        self._store.set(_key(box, number), json.dumps(value))

    @contextmanager
    def received(self, box: str, count: int, inbox: Inbox) -> Iterator[None]:
        """On the first rank: until the block ends, put the messages that arrive into an inbox, in another thread.

        The block must end with a collective that all ranks enter after their messages, unless it raises an error.

        count: the number of messages; later ones are lost. box: may be used once. Errors of type ValueError of the
        inbox are ignored.
        """
        stopped, left = threading.Event(), list(range(1, count + 1))

        def receive_all() -> None:
            try:
                while left:
                    while not self._store.check([_key(box, left[0])]):
                        if stopped.wait(_SECONDS_BETWEEN_LOOKS):
                            return
                    value = json.loads(self._store.get(_key(box, left[0])))
                    self._store.delete_key(_key(box, left.pop(0)))
                    with suppress(ValueError):
                        inbox.put(value)
            except RuntimeError:  # torch's DistNetworkError, DistStoreError; the next collective fails, too
                return

        thread = threading.Thread(target=receive_all, name="early messages", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
        for key in [*(_key(box, number) for number in left), _count(box)]:
            self._store.delete_key(key)


def _count(box: str) -> str:
    return f"{box}/count"


def _key(box: str, number: int) -> str:
    return f"{box}/{number}"
