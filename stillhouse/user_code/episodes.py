"""Environments and tools with state: for each sample, an object with the sample's turns so far.

An object exists only in the process of its calls. Each call has all turns of its sample. If the object is missing,
because its process has ended, a new object gets the earlier turns again. So an environment that depends only on its
arguments gives the replies of an undisturbed run.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from stillhouse.user_code.functions import (
    UserFunction,
    UserFunctionError,
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
    turns: the texts of the model's turns in their order, or their calls of tools. Empty: the sample has ended, and
        needs no object any more.
    replies: the replies to all turns but the last.
    """

    number: int
    turns: tuple[Any, ...] = ()
    replies: tuple[Any, ...] = ()


class EpisodeObject(Protocol):
    """The object of a sample. about: a text for error messages, which names the completion."""

    def step(self, turn: Any, about: str) -> Any:
        """The reply to the next turn."""
        ...

    def close(self, about: str) -> None:
        """The sample has ended."""
        ...


#: makes the object of a sample, as start(prompt, record, about). The record is a copy for this call
Start = Callable[[str, Mapping[str, Any], str], EpisodeObject]


def caller_of(function: UserFunction) -> Callable[..., Any]:
    """Return a call of this reward or environment in this process, which checks the result.

    It is called as call(prompt, completion, record, source), for a class with an `Episode` as a fifth argument.
    """
    if inspect.isclass(function.function):
        return Episodes(str(function), lambda *arguments: _Environment(function, *arguments))

    def call(prompt: str, completion: str, record: Mapping[str, Any], source: str) -> float | str | None:
        return checked_call(function, prompt, completion, record, source)

    return call


class Episodes:
    """The objects of samples in this process.

    name: the key and the user's class, for error messages.
    have_state: whether the objects depend on earlier turns. If not, each turn has a new object, and an object that is
        lost does not get the earlier turns again: they may hang again, or have other replies at another time.
    """

    def __init__(self, name: str, start: Start, *, have_state: bool = True):
        self._name, self._start, self._have_state = name, start, have_state
        #: by the number of the sample: the object, and the number of turns that it has got
        self._objects: dict[int, tuple[EpisodeObject, int]] = {}

    def __call__(self, prompt: str, completion: str, record: Mapping[str, Any], source: str, episode: Episode) -> Any:
        """The reply to the last turn of an episode.

        Raises UserFunctionError if a method fails, or if an earlier turn gets another reply than before.
        """
        about, turns = about_completion(completion, source), episode.turns
        if not self._have_state:
            return self._start(prompt, copied_record(record, source), about).step(turns[-1], about) if turns else None
        kept, got = self._objects.pop(episode.number, (None, 0))
        if not turns:
            if kept is not None:
                kept.close(about)
            return None
        if kept is None or got != len(turns) - 1:
            kept, got = self._start(prompt, copied_record(record, source), about), 0
        for turn, before in zip(turns[got:-1], episode.replies[got:], strict=True):
            reply = kept.step(turn, about)
            if reply != before:
                raise UserFunctionError(
                    f"{self._name} replies {shown(reply)} to a turn after it was started again, and {shown(before)} "
                    f"before{about}: expected an environment that depends only on its arguments"
                )
        self._objects[episode.number] = kept, len(turns)
        return kept.step(turns[-1], about)


class _Environment:
    """An object of a user's class, with the methods reset and step, and perhaps close."""

    def __init__(self, environment: UserFunction, prompt: str, record: Mapping[str, Any], about: str):
        self._environment = environment
        self._object = started(environment, prompt, record, about)

    def step(self, turn: str, about: str) -> str | None:
        return checked_text(
            self._environment, method_of(self._environment, self._object, "step")(turn, about=about), about
        )

    def close(self, about: str) -> None:
        closed(self._environment, self._object, about)


def started(of: UserFunction, prompt: str, record: Mapping[str, Any], about: str) -> Any:
    """Make an object of a user's class, and reset it. Raises UserFunctionError if one of them fails."""
    made = of(about=about)
    value = method_of(of, made, "reset")(prompt, record, about=about)
    if value is not None:
        raise UserFunctionError(
            f"{of}.reset gives {shown(value)}{about}: expected None, because the data have the prompt"
        )
    return made


def closed(of: UserFunction, made: Any, about: str) -> None:
    """Call the method close of a user's object, if it has one."""
    if hasattr(made, "close"):
        method_of(of, made, "close")(about=about)


def method_of(of: UserFunction, made: Any, name: str) -> UserFunction:
    """A method of an object of a user's class."""
    return replace(of, path=f"{of.path}.{name}", function=getattr(made, name))
