"""Waits for servers that may not answer for minutes, and looks meanwhile whether the run is to end."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

SECONDS_BETWEEN_LOOKS = 0.5


def waited_for(work: Callable[[], T], alive: Callable[[], None]) -> T:
    """The result of `work`, which runs in another thread. Until it is done, `alive` is called again and again; what
    that raises ends the waiting. The thread then goes on until what it waits for is closed.
    """
    threads = ThreadPoolExecutor(1)
    try:
        future = threads.submit(work)
        while not wait([future], SECONDS_BETWEEN_LOOKS).done:
            alive()
        return future.result()
    finally:
        threads.shutdown(wait=False)
