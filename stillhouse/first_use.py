"""Names of a package that are imported at their first use, so that importing the package does not import torch."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_at_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are those of its module `public`."""

    def get(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.public"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *get("__all__")})
