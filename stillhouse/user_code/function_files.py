"""Looks for a function of the user in the source of its module, which is compiled, but not run. Needs no torch."""

import ast
import importlib.util
import os
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from stillhouse.user_code.functions import in_words, no_function, no_module

#: a module that uses one of these names can have functions whose names are not in its source
_DYNAMIC = ("globals", "exec", "setattr", "__getattr__", "__path__", "*")


def require_in_file(path: str, hint: str = "") -> None:
    """Raise ValueError if `package.module:function` certainly does not exist, or if its module is not valid Python.

    Other mistakes are found only when the module is imported.

    hint: a text that the error adds if there is no such module.
    """
    module, _, function = path.partition(":")
    if module in sys.modules:
        return
    first, *rest = module.split(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    spec = importlib.util.find_spec(first)
    parents = [first]
    for part in rest:
        if spec is None:
            break
        if spec.submodule_search_locations is None:  # not a package, but its import can create submodules
            return
        names = _names(path, spec)
        parents.append(part)
        spec = PathFinder.find_spec(".".join(parents), list(spec.submodule_search_locations))
        if spec is None and "__path__" in names:
            return
    if spec is None:
        raise no_module(path, module, hint)
    names = _names(path, spec)
    if function not in names and names.isdisjoint(_DYNAMIC):
        raise no_function(path, module, function)


def _names(path: str, spec: ModuleSpec) -> set[str]:
    """All names that a module defines or uses anywhere, or `_DYNAMIC` if its source cannot be examined.

    path: the function's path, for the error.

    Raises ValueError if the module is not valid Python.
    """
    if spec.origin is None:  # a folder without __init__.py
        return set()
    if not spec.origin.endswith(".py"):
        return set(_DYNAMIC)
    try:
        with warnings.catch_warnings(action="ignore"):  # the later import prints the warnings
            source = Path(spec.origin).read_bytes()
            compile(source, spec.origin, "exec", dont_inherit=True)  # with the same flags as an import
            tree = ast.parse(source)
    except RecursionError:
        return set(_DYNAMIC)
    except (OSError, SyntaxError, ValueError) as error:
        module = path.partition(":")[0]
        raise ValueError(f"got {path!r}, but importing {module} raises {in_words(error)}") from error
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
