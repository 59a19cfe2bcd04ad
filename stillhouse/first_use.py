"""Imports the names of a package at their first use, so that importing the package does not import torch."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_at_first_use(
    package: str, modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` (which imports a name at its first use) and `__dir__` for a package.

    modules: for each name, the module that has it. None means that the package's module `public` has all names.
    """

    def get(name: str) -> Any:
        module = f"{package}.public" if modules is None else modules.get(name)
        if module is None or (name.startswith("__") and name != "__all__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *(modules or get("__all__"))})
