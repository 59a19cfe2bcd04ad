"""Looks for a function of the user in the text of its module, which is not imported. Needs no torch."""

import ast
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from stillhouse.user_code.functions import no_function, no_module

#: what may define names that the text does not have
_DYNAMIC = ("globals", "exec", "setattr", "__getattr__", "__path__", "*")


def require_in_file(path: str, hint: str = "") -> None:
    """Raise ValueError if `package.module:function` is certainly not there. Only its import tells everything else.

    hint: a text that the error adds if there is no such module.
    """
    module, _, function = path.partition(":")
    if module in sys.modules:
        return
    spec = _spec(path, module, hint)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    names = _names(Path(spec.origin))
    if names is not None and function not in names and names.isdisjoint(_DYNAMIC):
        raise no_function(path, module, function)


def _spec(path: str, module: str, hint: str) -> ModuleSpec | None:
    """Where the module is; None if that is not known without an import. Raises ValueError if there is none."""
    first, *rest = module.split(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    spec = importlib.util.find_spec(first)
    parents = [first]
    for part in rest:
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return None
        parent = spec
        parents.append(part)
        spec = PathFinder.find_spec(".".join(parents), list(spec.submodule_search_locations))
        if spec is None and parent.origin is not None and "__path__" in (_names(Path(parent.origin)) or ()):
            return None
    if spec is None:
        raise no_module(path, module, hint)
    return spec


def _names(file: Path) -> set[str] | None:
    """All names that a file defines or uses anywhere; None if it cannot be read as Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
    return names
