"""Messages between a run and its workers, over a socket: each is complete within a time limit, or there is an error.

A message is its length in 8 bytes and then its content. The other process may stop anywhere, so the time limit holds
for sending as it does for receiving.
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
#: how often a process that waits looks whether the other one still exists
SECONDS_BETWEEN_LOOKS = 0.5

Result = TypeVar("Result")
#: whether the other process still exists; may raise an error to give up
Exists = Callable[[], bool]


class Messages:
    """One end of a connection, for one thread at a time. socket: the caller closes it.

    Sending and receiving raise TimeoutError if a message is not complete at the time `until` (`time.monotonic`),
    EOFError if the other process has closed the connection or does not exist any more, and OSError for other problems
    of the connection, which cannot be used after any of them.
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
        content = bytearray()  # grows, because the length may be that of a process which writes nonsense
        while missing := count - len(content):
            step = partial(self.socket.recv, min(missing, _MOST_AT_ONCE))
            part = self._when_possible(step, until, exists)
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    def _when_possible(self, step: Callable[[], Result], until: float, exists: Exists) -> Result:
        while True:
            # before the attempt: a process may write its last answer and end
            is_last = not exists()
            seconds = until - time.monotonic()
            # after the limit, what is there already is still taken, because this process may have been stopped itself
            self.socket.settimeout(None if seconds == math.inf else min(max(seconds, 0.001), SECONDS_BETWEEN_LOOKS))
            try:
                return step()
            except TimeoutError:
                if is_last:
                    raise EOFError from None
                if seconds <= 0:
                    raise
