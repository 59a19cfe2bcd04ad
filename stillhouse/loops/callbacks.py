"""User-defined evaluations: Python functions whose names are in eval.callbacks.

def accuracy(context: EvaluationContext) -> dict[str, float]:
    answers = context.generate(["2 + 2 ="])
    return {"sums": float(answers[0].strip() == "4")}
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.rollout.user_functions import user_function
from stillhouse.user_code.functions import CALLBACKS, UserFunctionError, finite_number, shown

_NAME = re.compile(r"[\w.\-/]+")


@dataclass(frozen=True)
class EvaluationContext:
    """The argument of a callback.

    step: the number of optimizer steps so far.
    folder: the run's folder, in which a callback may write files of its own.
    generate: completes texts greedily with the current student, up to eval.task_tokens tokens each; returns the
        completions without special tokens, in the order of the texts.
    """

    step: int
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    generate: Callable[[Sequence[str]], list[str]]


def callback_metrics(
    paths: Sequence[str], context: EvaluationContext, others: Mapping[str, float]
) -> dict[str, float]:
    """Call the user's functions in this process and return their metrics, named `eval/<name>`.

    paths: the names of the functions, as in eval.callbacks.
    others: the other metrics of this evaluation, whose names a callback must not use.

    Raises UserFunctionError if a callback raises an error or returns anything but a dict of names and finite numbers,
    and OverdueError if a callback does not return after a signal.
    """
    metrics: dict[str, float] = {}
    for path in paths:
        function = user_function(CALLBACKS, path)
        metrics |= checked_metrics(function, function(context), {*others, *metrics})
    return metrics


def checked_metrics(function: object, returned: Any, others: set[str]) -> dict[str, float]:
    """Return a callback's metrics under their keys. Raises UserFunctionError (see `callback_metrics`)."""
    if not isinstance(returned, Mapping):
        raise UserFunctionError(f"{function} gives {shown(returned)}: expected a dict of names and numbers")
    metrics: dict[str, float] = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserFunctionError(
                f"{function} gives the name {shown(name)}: expected letters, digits and any of _.-/"
            )
        number = None if isinstance(value, bool | np.bool_) else finite_number(value)
        if number is None:
            raise UserFunctionError(f"{function} gives {shown(value)} for {name!r}: expected a finite number")
        if f"eval/{name}" in others:
            raise UserFunctionError(f"{function} gives {name!r}, but this evaluation has an eval/{name} already")
        metrics[f"eval/{name}"] = number
    return metrics
