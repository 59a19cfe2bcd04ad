"""A reward that waits, as that of a judge does. It imports no torch, so that worker processes start quickly."""

import time
from collections.abc import Mapping
from typing import Any

SECONDS = 0.05


def odd_words(prompt: str, completion: str, record: Mapping[str, Any]) -> float:
    """The share of words that end with an odd digit, after `SECONDS`."""
    time.sleep(SECONDS)
    return share_of_odd(completion)


def share_of_odd(completion: str) -> float:
    words = completion.split()
    return sum(word[-1] in "13579" for word in words) / max(1, len(words))
