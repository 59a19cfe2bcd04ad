"""Messages between a run and its workers, over a socket. An error is raised if a message is not complete within a
time limit.

A message consists of its length in 8 bytes and its content. The other process can stop at any time, so sending and
receiving each have a time limit.
"""

import math
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

_LENGTH = struct.Struct("!Q")
_MOST_AT_ONCE = 2**20
#: the interval at which a waiting process checks whether the other process still exists
SECONDS_BETWEEN_LOOKS = 0.5

Result = TypeVar("Result")
#: a function that returns whether the other process still exists. If it raises an error, this ends the wait
Exists = Callable[[], bool]


class Messages:
    """One end of a connection, for one thread at a time. end: the socket, which the caller must close.

    Sending and receiving raise TimeoutError if a message is not complete at the time `until` (`time.monotonic`),
    EOFError if the other process has closed the connection or no longer exists, and OSError for other problems. After
    any of these errors, the connection cannot be used.
    """

    def __init__(self, end: socket.socket):
        self.socket = end

    def send(self, content: bytes, until: float = math.inf, exists: Exists = lambda: True) -> None:
        left = memoryview(_LENGTH.pack(len(content)) + content)
        while left:
            left = left[self._when_possible(partial(self.socket.send, left), until, exists) :]

    def receive(self, until: float = math.inf, exists: Exists = lambda: True) -> bytes:
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, until, exists))
        return self._receive(length, until, exists)

    def _receive(self, count: int, until: float, exists: Exists) -> bytes:
        content = bytearray()  # not allocated at once, because a broken process can send any number as the length
        while missing := count - len(content):
            step = partial(self.socket.recv, min(missing, _MOST_AT_ONCE))
            part = self._when_possible(step, until, exists)
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    def _when_possible(self, step: Callable[[], Result], until: float, exists: Exists) -> Result:
        while True:
            # checked before the attempt, so that the answer is read if the process writes it and then ends
            is_last = not exists()
            seconds = until - time.monotonic()
            # bytes are read even after the limit, because they may have come in time while this process was suspended
            self.socket.settimeout(None if seconds == math.inf else min(max(seconds, 0.001), SECONDS_BETWEEN_LOOKS))
            try:
                return step()
            except TimeoutError:
                if is_last:
                    raise EOFError from None
                if seconds <= 0:
                    raise
