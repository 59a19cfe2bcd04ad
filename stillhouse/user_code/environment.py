"""The registered environments, which reply to the turns of samples, and the turns that an object of a sample gets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from stillhouse.registry import load, load_all, registered
from stillhouse.user_code.functions import UserFunction, checked_reward, load_function

if TYPE_CHECKING:
    from stillhouse.config.rollout_section import PromptConfig
    from stillhouse.config.rule import Rule


GROUP = "stillhouse.environments"


class Environment(ABC):
    """Replies to the turns of the samples of one source of prompts.

    The entries of the group `stillhouse.environments` are such classes. Workers load their modules, so these import
    neither torch nor `stillhouse.config` at the top.

    key: the key of the configuration, `rollout.<name of the entry>`, which has a path of a function or a list of
        paths.
    field: the type of the key and its pydantic `Field`. It is None for Stillhouse's own keys, which their section
        defines.
    path: the paths of the user's functions, separated by spaces.
    schemas: the schemas of tools for the chat template, or None without tools.
    format_key: for errors, the full key that sets the form of replies. turns: for errors, the turns that the chat
        template ends.
    """

    key: ClassVar[str]
    field: ClassVar[tuple[Any, Any] | None] = None
    turns: ClassVar[str] = "turns"
    path: str
    format_key: str
    schemas: list[dict[str, Any]] | None = None

    @abstractmethod
    def __init__(self, rollout: "PromptConfig", full_key: Callable[[str], str]):
        """full_key: returns the full key for a key of the section."""

    @property
    @abstractmethod
    def functions(self) -> Sequence[UserFunction]:
        """The imported functions of the user. Raises ConfigError for a function that cannot be used."""

    @classmethod
    def rules(cls) -> "Iterator[Rule]":
        """The combinations of keys that this environment does not allow."""
        yield from ()

    @classmethod
    @abstractmethod
    def answer(cls, path: str, *, is_limited: bool) -> Callable[..., Any]:
        """Return a function that makes the calls in this process: call(prompt, completion, record, source, episode).

        is_limited: whether the process has a limit of memory. An error because of this limit is then raised.

        Raises ValueError if the functions cannot be imported.
        """

    def markers(self, tokenizer: Any, processor: Any) -> dict[int, str]:
        """The tokens with which the chat template ends turns before a reply, or {} if no template writes replies.
        Raises ValueError for a template that cannot write them.
        """
        return {}

    @abstractmethod
    def replies(self, calls: Any, tokenizer: Any, processor: Any, warn: Callable[[str], None]) -> Any:
        """The `rollout.turns.TurnReplies`. calls: the calls of the functions. warn: prints a line, in any thread."""


def environments() -> dict[str, type[Environment]]:
    """The registered environments by the names of their keys in the section rollout."""
    return load_all(GROUP)


def environment_of(
    rollout: "PromptConfig", full_key: Callable[[str], str] = "rollout.{}".format
) -> Environment | None:
    """The environment of a section's samples, or None if the samples have one turn. Raises ConfigError."""
    kinds = (kind for name, kind in environments().items() if getattr(rollout, name))
    return next((kind(rollout, full_key) for kind in kinds), None)


@dataclass(frozen=True)
class Episode:
    """The turns so far of the sample `number`.

    turns: the texts of the model's turns in their order, or their calls of tools. If it is empty and no reward is
        wanted, the sample has ended, and its object is no longer needed.
    replies: the replies to all turns, or to all turns but the last.
    wants_reward: whether the call asks for the object's reward. The last turn may then have no reply.
    """

    number: int
    turns: tuple[Any, ...] = ()
    replies: tuple[Any, ...] = ()
    wants_reward: bool = False

    @property
    def has_ended(self) -> bool:
        return not self.turns and not self.wants_reward


def episode_of(arguments: Sequence[Any]) -> Episode | None:
    """The episode of a call that needs a sample's object, or None. arguments: the arguments of the call."""
    return next((argument for argument in arguments[4:] if isinstance(argument, Episode)), None)


def answer_of(key: str, path: str, *, is_limited: bool = False) -> Callable[..., Any]:
    """Return a function that calls, in this process, the function or environment that a key names.

    is_limited: see `Environment.answer`.

    Raises ValueError if it cannot be imported.
    """
    section, _, name = key.partition(".")
    if section == "rollout" and name in registered(GROUP):  # so a worker imports no other add-on
        return load(GROUP, name).answer(path, is_limited=is_limited)
    return partial(checked_reward, load_function(key, path))
