"""Turns the errors that libraries raise for a damaged file into a ValueError that names the file.

transformers, tokenizers, datasets and ruamel hardly check what they read: a number where text is expected causes an
AttributeError deep inside them. So each of their calls on files from outside, but none of our own code, goes into a
`reading` block.
"""

from types import TracebackType

from stillhouse.display import first_line

#: what Python raises if a value does not have the type, form or size that the code expects
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
)
#: libraries whose errors derive directly from Exception; panics of Rust code even derive from BaseException
_LIBRARIES = ("datasets", "huggingface_hub", "jinja2", "pyarrow", "pyo3_runtime", "re", "safetensors")


class reading:
    """Within the block, turn a library's error into ValueError("{what}: {the error's first line}").

    passes: our own error types, which are not changed.
    """

    def __init__(self, what: str, *, passes: type[Exception] | tuple[()] = ()):
        self.what = what
        self.passes = passes

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and not isinstance(error, self.passes) and _about_files(error):
            raise ValueError(f"{self.what}: {first_line(error)}") from error


def _about_files(error: BaseException) -> bool:
    if type(error).__name__ == "OutOfMemoryError":  # of torch, for a GPU; by name, so as not to import torch
        return False
    # tokenizers raises instances of Exception itself
    return (
        isinstance(error, _PYTHONS)
        or type(error) is Exception
        or any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(error).__mro__)
    )
