"""Replaces functions of a run during a dry run.

A dry run (`stillhouse plan`) has no GPU and no other processes, and its tensors have no values. So the decorator
`replaceable` marks each function that needs one of these three, and `dry_run` replaces marked functions in a block.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_answers: dict[Callable[..., Any], Callable[..., Any]] = {}


def replaceable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a wrapper of the function, which `dry_run` can replace. `inspect.unwrap` returns the function itself."""

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        result: Result = _answers.get(call, function)(*arguments, **options)
        return result

    return call


@contextmanager
def dry_run(answers: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Within the block, call `answers[function]` in place of each replaceable function in `answers`."""
    before = dict(_answers)
    _answers.update(answers)
    try:
        yield
    finally:
        _answers.clear()
        _answers.update(before)
