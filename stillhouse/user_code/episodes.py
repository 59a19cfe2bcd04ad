"""Environments and tools with state: for each sample, an object with the sample's turns so far.

An object exists only in the process of its calls. Each call has all turns of its sample. If the object is missing,
because its process has ended, a new object gets the earlier turns again. So an environment that depends only on its
arguments gives the replies of an undisturbed run.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol, Self

from stillhouse.user_code.functions import (
    ENVIRONMENT,
    REWARD_METHOD,
    UserFunction,
    UserFunctionError,
    about_completion,
    checked_number,
    checked_reply,
    checked_reward,
    checked_text,
    copied_record,
    shown,
)


@dataclass(frozen=True)
class Episode:
    """The turns of a sample so far.

    number: the number of the sample.
    turns: the texts of the model's turns in their order, or their calls of tools. If it is empty and no reward is
        wanted, the sample has ended, and needs no object any more.
    replies: the replies to all turns, or to all but the last.
    wants_reward: ask for the object's reward. It then has no reply to a turn without one, which is the last one.
    """

    number: int
    turns: tuple[Any, ...] = ()
    replies: tuple[Any, ...] = ()
    wants_reward: bool = False

    @property
    def has_ended(self) -> bool:
        return not self.turns and not self.wants_reward

    @property
    def calls(self) -> int:
        """The number of calls that an object needs which is started again."""
        return max(1, len(self.turns)) + self.wants_reward

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """values: those of `vars`, sent as JSON."""
        return cls(**dict(values) | {name: tuple(values[name]) for name in ("turns", "replies")})


def episode_of(arguments: Sequence[Any]) -> Episode | None:
    """The turns of the sample whose object a call needs. arguments: of the call."""
    return next((argument for argument in arguments[4:] if isinstance(argument, Episode)), None)


class EpisodeObject(Protocol):
    """The object of a sample. about: a text for error messages, which names the completion."""

    def step(self, turn: Any, about: str) -> Any:
        """The reply to the next turn."""
        ...

    def reward(self, about: str) -> float:
        """The reward of the sample, which ends with the turns so far."""
        ...

    def close(self, about: str) -> None:
        """The sample has ended."""
        ...


#: in place of the reply to a turn that has none so far
_NO_REPLY = object()
#: makes the object of a sample, as start(prompt, record, about). The record is a copy for this call
Start = Callable[[str, Mapping[str, Any], str], EpisodeObject]


def caller_of(function: UserFunction) -> Callable[..., Any]:
    """Return a call of this reward or environment in this process, which checks the result.

    It is called as call(prompt, completion, record, source), for a class with an `Episode` as a fifth argument, and
    for a reward that takes them with the turns.
    """
    if inspect.isclass(function.function):
        return Episodes(str(function), lambda *arguments: _Environment(function, *arguments))

    return partial(checked_reply if function.key == ENVIRONMENT else checked_reward, function)


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
        """The reply to the last turn of an episode, or the reward of the sample.

        Raises UserFunctionError if a method fails, or if an earlier turn gets another reply than before.
        """
        about, turns = about_completion(completion, source), episode.turns
        if not self._have_state:
            return self._start(prompt, copied_record(record, source), about).step(turns[-1], about) if turns else None
        kept, got = self._objects.pop(episode.number, (None, 0))
        if episode.has_ended:
            if kept is not None:
                kept.close(about)
            return None
        most = len(turns) if episode.wants_reward else len(turns) - 1
        if kept is None or not len(episode.replies) <= got <= most:
            kept, got = self._start(prompt, copied_record(record, source), about), 0
        reply = None
        for turn, before in zip_longest(turns[got:], episode.replies[got:], fillvalue=_NO_REPLY):
            reply = kept.step(turn, about)
            if before is not _NO_REPLY and reply != before:
                raise UserFunctionError(
                    f"{self._name} replies {shown(reply)} to a turn after it was started again, and {shown(before)} "
                    f"before{about}: expected an environment that depends only on its arguments"
                )
        self._objects[episode.number] = kept, len(turns)
        return kept.reward(about) if episode.wants_reward else reply


class _Environment:
    """An object of a user's class, with the methods reset and step, and perhaps close."""

    def __init__(self, environment: UserFunction, prompt: str, record: Mapping[str, Any], about: str):
        self._environment = environment
        self._object = started(environment, prompt, record, about)

    def step(self, turn: str, about: str) -> str | None:
        return checked_text(
            self._environment, method_of(self._environment, self._object, "step")(turn, about=about), about
        )

    def reward(self, about: str) -> float:
        return reward_of(self._environment, self._object, about)

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


def reward_of(of: UserFunction, made: Any, about: str) -> float:
    """The reward that a user's object gives. Raises UserFunctionError unless it is a finite number."""
    method = method_of(of, made, REWARD_METHOD)
    return checked_number(method, method(about=about), about)


def closed(of: UserFunction, made: Any, about: str) -> None:
    """Call the method close of a user's object, if it has one."""
    if hasattr(made, "close"):
        method_of(of, made, "close")(about=about)


def method_of(of: UserFunction, made: Any, name: str) -> UserFunction:
    """A method of an object of a user's class."""
    return replace(of, path=f"{of.path}.{name}", function=getattr(made, name))
