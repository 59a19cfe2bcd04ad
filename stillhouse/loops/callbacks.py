"""The user's own evaluations: Python functions that eval.callbacks names.

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

from stillhouse.data.render.templates import CompletionTemplate
from stillhouse.generation import GenerationRequest
from stillhouse.generation.hooks import finite_number, shown
from stillhouse.generation.in_process import InProcessEngine
from stillhouse.parallel import Ranks
from stillhouse.preemption import OverdueError
from stillhouse.run.user_functions import CALLBACKS, function_of
from stillhouse.signals import SignalsLostError

_NAME = re.compile(r"[\w.\-/]+")


@dataclass(frozen=True)
class EvaluationContext:
    """What a callback gets. step: optimizer steps so far. folder: of the run, where a callback may write files of its
    own. generate: completes texts greedily with the present student, up to eval.task_tokens tokens each; returns the
    completions without special tokens, in the order of the texts."""

    step: int
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    generate: Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class Callbacks:
    """The functions of eval.callbacks, which rank 0 calls.

    paths: that name the functions
    folder: of the run
    engine: greedy, with the student's present weights
    """

    paths: Sequence[str]
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    engine: InProcessEngine
    ranks: Ranks

    def evaluate(self, step: int, known: Mapping[str, float]) -> dict[str, float]:
        """The callbacks' metrics, named `eval/<name>`; the same on all ranks. A collective of all processes.

        known: metrics of this evaluation, whose names a callback must not use. Raises ValueError on all ranks if a
        callback raises an error or returns something else than names with finite numbers, and SignalsLostError if it
        does not return after a signal.
        """
        try:
            return self.ranks.on_first(lambda: self._metrics(step, known), ValueError, OverdueError)
        except OverdueError as error:
            raise SignalsLostError(str(error)) from error

    def _metrics(self, step: int, known: Mapping[str, float]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        context = EvaluationContext(step, self.folder, self.tokenizer, self._generate)
        for path in self.paths:
            function = function_of(CALLBACKS, path)
            metrics |= checked_metrics(function, function(context), {*known, *metrics})
        return metrics

    def _generate(self, texts: Sequence[str]) -> list[str]:
        tokenizer = self.tokenizer
        prompts = CompletionTemplate(tokenizer, "completion").encode_prompts(list(texts))
        requests = [
            GenerationRequest(number, np.asarray(ids, np.int32), number) for number, ids in enumerate(prompts)
        ]
        completions = self.engine.generate_on_this_rank(requests)  # the other ranks wait for this one's metrics
        return [tokenizer.decode(completion.ids_N.tolist(), skip_special_tokens=True) for completion in completions]


def checked_metrics(function: object, returned: Any, known: set[str]) -> dict[str, float]:
    """What a callback has returned, under the keys of metrics. Raises ValueError; see `Callbacks`."""
    if not isinstance(returned, Mapping):
        raise ValueError(f"{function} gives {shown(returned)}: expected a dict of names and numbers")
    metrics: dict[str, float] = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{function} gives the name {shown(name)}: expected letters, digits and any of _.-/")
        number = None if isinstance(value, bool | np.bool_) else finite_number(value)
        if number is None:
            raise ValueError(f"{function} gives {shown(value)} for {name!r}: expected a finite number")
        if f"eval/{name}" in known:
            raise ValueError(f"{function} gives {name!r}, but this evaluation has an eval/{name} already")
        metrics[f"eval/{name}"] = number
    return metrics
