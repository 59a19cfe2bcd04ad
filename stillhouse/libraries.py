"""What libraries raise over a damaged file, as a ValueError that names the file.

transformers, tokenizers, datasets and ruamel check little of what they read: a number where text is expected ends as
an AttributeError deep inside of them. So one of their calls on files from outside, and nothing of ours, goes into
`reading`.
"""

from types import TracebackType

from stillhouse.display import first_line

#: what Python raises where a value is not of the type, the form or the size that code takes it for
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
#: libraries whose errors derive from Exception itself; panics of Rust code even from BaseException
_LIBRARIES = ("datasets", "huggingface_hub", "jinja2", "pyarrow", "pyo3_runtime", "re", "safetensors")


class reading:
    """Raise ValueError(`what`: the error's first line) for an error of a library's call on files from outside.

    passes: errors that go on as they are, since they are ours.
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
    if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU, which is not to be imported for this
        return False
    # tokenizers raises Exception itself
    return (
        isinstance(error, _PYTHONS)
        or type(error) is Exception
        or any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(error).__mro__)
    )
