"""Reads records, tokenizes them, and packs the tokens into micro-batches. Labels are shifted only here.

The names are imported at their first use, so that a wrong path is named before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stillhouse.data.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'stillhouse.data' has no attribute {name!r}")
    value = getattr(import_module("stillhouse.data.public"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
