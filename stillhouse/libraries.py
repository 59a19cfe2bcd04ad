"""Facts about other libraries: which features need a later version, and which errors a damaged file causes.

transformers, tokenizers, datasets and ruamel hardly validate files: a number in place of a string causes an
AttributeError deep inside them. So each call of these libraries that reads external files is in a `reading` block.
Such a block contains no code of our own, because `reading` would also convert the errors of our bugs.
"""

import os
import re
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import version
from types import TracebackType
from typing import Any, NamedTuple

from packaging.version import Version
from pydantic import ValidationError

from stillhouse.display import first_line


class Needs(NamedTuple):
    """The first version of a library that supports a feature. why: what earlier versions cannot do."""

    library: str
    version: str
    why: str


#: features that need later versions than pyproject.toml requires; docs/versions.md has the same table
FEATURES = {
    "expert parallelism": Needs("transformers", "5.22", "earlier versions cannot send tokens to the experts"),
    "multi-token prediction": Needs("transformers", "5.20", "earlier versions cannot run one MTP layer by itself"),
}

#: Python's exceptions for values of an unexpected type, form or size
_PYTHONS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    RuntimeError,
    MemoryError,
    OSError,
    SyntaxError,
    EOFError,
)
#: the modules of errors that derive directly from Exception or, for panics of Rust code, from BaseException
_LIBRARIES = (
    *("PIL", "datasets", "huggingface_hub", "jinja2", "pyarrow", "pyo3_runtime", "re", "safetensors", "sqlite3"),
    *("httpx", "httpx2", "struct", "tokenize", "zlib"),  # numpy reads the header of an array with tokenize
)


class reading(AbstractContextManager[object]):
    """Convert a library's error in the block to ValueError("{what}: {the error's first line}").

    passes: types of errors that are not converted.
    library: the name of an additional library. All errors that it defines are also converted.
    """

    def __init__(self, what: str, *, passes: type[Exception] | tuple[()] = (), library: str = ""):
        self.what, self.passes, self.libraries = what, passes, {*_LIBRARIES, library}

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        # torch's OutOfMemoryError is recognized by its name, because this module must not import torch
        if error is None or isinstance(error, self.passes) or type(error).__name__ == "OutOfMemoryError":
            return
        is_library = any(kind.__module__.partition(".")[0] in self.libraries for kind in type(error).__mro__)
        # tokenizers raises plain Exceptions
        if is_library or isinstance(error, _PYTHONS) or type(error) is Exception:
            raise ValueError(f"{self.what}: {first_line(error)}") from error


def first_problem(error: ValidationError) -> str:
    """Return the first problem in pydantic's error as "{dotted key of the value}: {problem}"."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))


class writing(AbstractContextManager[object]):
    """Convert disk errors of tokenizers in the block to OSError. The Rust core of tokenizers raises them as plain
    Exceptions, with the error number only in the message.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = folder

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        number = re.search(r"\(os error (\d+)\)", str(error)) if type(error) is Exception else None
        if number is not None:
            raise OSError(int(number[1]), os.strerror(int(number[1])), os.fspath(self.folder)) from error


def imported(name: str, what: str) -> Any:
    """Import and return an optional library. Raises ValueError with a message that begins with `what` on failure."""
    with reading(f"{what}: {name} is installed, but cannot be imported"):
        return import_module(name)


def is_at_least(library: str, oldest: str) -> bool:
    """Return whether the installed version is `oldest` or later; 5.20rc1 counts as 5.20."""
    return Version(version(library)).release >= Version(oldest).release


def is_supported(feature: str) -> bool:
    """Return whether the installed libraries support a feature. feature: a key of `FEATURES`."""
    return is_at_least(FEATURES[feature].library, FEATURES[feature].version)


def require_feature(feature: str) -> None:
    """Raise ValueError if an installed library is too old for a feature. feature: a key of `FEATURES`."""
    if not is_supported(feature):
        library, oldest, why = FEATURES[feature]
        raise ValueError(
            f"{feature} needs {library} {oldest} or later, and {version(library)} is installed: {why}; "
            f"pip install --upgrade {library}"
        )
