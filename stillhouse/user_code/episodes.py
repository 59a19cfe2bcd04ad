"""Environments with state: for each sample, an object of the class that the configuration names.

An object exists only in the process of its calls. Each call has all turns of its sample. If the object is missing,
because its process has ended, a new object gets the earlier turns again. So an environment that depends only on its
arguments gives the replies of an undisturbed run.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stillhouse.user_code.functions import (
    UserFunction,
    about_completion,
    checked_call,
    checked_text,
    copied_record,
    shown,
)


@dataclass(frozen=True)
class Episode:
    """The turns of a sample so far.

    number: the number of the sample.
    turns: the texts of the model's turns, in their order. Empty: the sample has ended, and needs no object any more.
    replies: the environment's replies to all turns but the last.
    """

    number: int
    turns: tuple[str, ...] = ()
    replies: tuple[str, ...] = ()


def caller_of(function: UserFunction) -> Callable[..., Any]:
    """Return a call of this reward or environment in this process, which checks the result.

    It is called as call(prompt, completion, record, source), for a class with an `Episode` as a fifth argument.
    """
    if inspect.isclass(function.function):
        return Episodes(function)

    def call(prompt: str, completion: str, record: Mapping[str, Any], source: str) -> float | str | None:
        return checked_call(function, prompt, completion, record, source)

    return call


class Episodes:
    """The objects of samples in this process. environment: the user's class."""

    def __init__(self, environment: UserFunction):
        self._environment = environment
        #: by the number of the sample: the object, and the number of turns that it has got
        self._objects: dict[int, tuple[Any, int]] = {}

    def __call__(
        self, prompt: str, completion: str, record: Mapping[str, Any], source: str, episode: Episode
    ) -> str | None:
        """The environment's reply to the last turn of an episode; None at the end.

        Raises ValueError if a method fails, or if it replies to an earlier turn in another way than before.
        """
        about, turns = about_completion(completion, source), episode.turns
        kept, got = self._objects.pop(episode.number, (None, 0))
        if not turns:
            if kept is not None:
                self._call(kept, "close", about)
            return None
        if kept is None or got != len(turns) - 1:
            kept, got = self._new(prompt, record, source, about), 0
        for turn, before in zip(turns[got:-1], episode.replies[got:], strict=True):
            reply = self._step(kept, turn, about)
            if reply != before:
                raise ValueError(
                    f"{self._environment} replies {shown(reply)} to a turn after it was started again, and "
                    f"{shown(before)} before{about}: expected an environment that depends only on its arguments"
                )
        self._objects[episode.number] = kept, len(turns)
        return self._step(kept, turns[-1], about)

    def _new(self, prompt: str, record: Mapping[str, Any], source: str, about: str) -> Any:
        made = self._environment(about=about)
        value = self._call(made, "reset", about, prompt, copied_record(record, source))
        if value is not None:
            raise ValueError(
                f"{self._environment}.reset gives {shown(value)}{about}: expected None, because the data have the "
                "prompt"
            )
        return made

    def _step(self, kept: Any, turn: str, about: str) -> str | None:
        return checked_text(self._environment, self._call(kept, "step", about, turn), about)

    def _call(self, kept: Any, method: str, about: str, *arguments: Any) -> Any:
        function: Any = getattr(kept, method, None)
        if function is None and method == "close":  # it is optional
            return None
        path = f"{self._environment.path}.{method}"
        return replace(self._environment, path=path, function=function)(*arguments, about=about)
