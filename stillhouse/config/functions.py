"""How a configuration names a Python function of the user's own, and what is meant by a path that names a file."""

import re
from pathlib import PurePath

from stillhouse.config.errors import ConfigError

_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FILE = re.compile(r"(?P<file>[^:]+)\.py(::?(?P<name>[A-Za-z_]\w*))?")


def require_function(key: str, path: str, example: str) -> None:
    """Raise ConfigError unless `path` has the form package.module:function."""
    if not _FORM.fullmatch(path):
        raise ConfigError(
            key, f"got {path!r}, expected package.module:function, such as {example}{function_hint(path)}"
        )


def function_hint(path: str) -> str:
    """How the function is written that `path` names with a file (my.py:f) or a dot (my.f); "" for any other path."""
    if match := _FILE.fullmatch(path):
        file, name = PurePath(match["file"]), match["name"] or "function"
        if all(part.isidentifier() for part in file.parts):
            return f"; write {'.'.join(file.parts)}:{name}"
        if file.name.isidentifier():
            return f"; write {file.name}:{name}, and set PYTHONPATH={file.parent}"
        return ""
    module, dot, name = path.rpartition(".")
    return f"; did you mean {module}:{name}?" if dot and _FORM.fullmatch(f"{module}:{name}") else ""
