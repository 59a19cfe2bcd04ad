"""The interface of registered environments, which reply to the turns of samples, and the `Episode` that they get."""

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

    The entries of the group `stillhouse.environments` are subclasses of this class. Workers import the modules of the
    subclasses, so these modules must import neither torch nor `stillhouse.config` at the top.

    key: the key of the configuration, `rollout.<name of the entry>`. Its value is the path of a function or a list of
        paths.
    field: the type of the key and its pydantic `Field`, or None for Stillhouse's own keys, which the section rollout
        defines.
    turns: the name of the turns that get a reply, for errors.
    path: the paths of the user's functions, separated by spaces.
    format_key: the full key that sets the form of replies, for errors.
    schemas: the schemas of tools for the chat template, or None without tools.
    """

    key: ClassVar[str]
    field: ClassVar[tuple[Any, Any] | None] = None
    turns: ClassVar[str] = "turns"
    path: str
    format_key: str
    schemas: list[dict[str, Any]] | None = None

    @abstractmethod
    def __init__(self, rollout: "PromptConfig", full_key: Callable[[str], str]):
        """Read the settings of one source of prompts.

        rollout: the section rollout of the source.
        full_key: returns the full key for a key of the section.
        """

    @property
    @abstractmethod
    def functions(self) -> Sequence[UserFunction]:
        """The imported functions of the user. Raises ConfigError for a function that cannot be used."""

    @classmethod
    def rules(cls) -> "Iterator[Rule]":
        """The rules for combinations of keys that this environment adds."""
        yield from ()

    @classmethod
    @abstractmethod
    def answer(cls, path: str, *, is_limited: bool) -> Callable[..., Any]:
        """Return a function that makes the calls in this process: call(prompt, completion, record, source, episode).

        is_limited: whether the process has a limit of memory. A MemoryError in a call must then be raised.

        Raises ValueError if the functions cannot be imported.
        """

    def markers(self, tokenizer: Any, processor: Any) -> dict[int, str]:
        """The tokens (id and text) with which the chat template ends a turn that gets a reply, or {} if the template
        does not write the replies. Raises ValueError for a template that cannot write them.
        """
        return {}

    @abstractmethod
    def replies(self, calls: Any, tokenizer: Any, processor: Any, warn: Callable[[str], None]) -> Any:
        """Return the `rollout.turns.TurnReplies` of this environment.

        calls: the calls of the user's functions.
        processor: the processor of media, or None.
        warn: prints a warning, in any thread.
        """


def environments() -> dict[str, type[Environment]]:
    """The registered environments by the names of their keys in the section rollout."""
    return load_all(GROUP)


def environment_of(
    rollout: "PromptConfig", full_key: Callable[[str], str] = "rollout.{}".format
) -> Environment | None:
    """The environment that the section rollout sets, or None if samples have only one turn. Raises ConfigError if it
    cannot be used.
    """
    kinds = (kind for name, kind in environments().items() if getattr(rollout, name))
    return next((kind(rollout, full_key) for kind in kinds), None)


@dataclass(frozen=True)
class Episode:
    """The turns of a sample so far.

    number: the number of the sample in the run.
    turns: the texts of the model's turns in their order, or the calls of tools in these turns. If `turns` is empty
        and no reward is wanted, the sample has ended, and its object is no longer needed.
    replies: the replies to all turns, or to all turns but the last.
    wants_reward: whether the call asks for the object's reward. In such a call, the last turn can be without a reply.
    """

    number: int
    turns: tuple[Any, ...] = ()
    replies: tuple[Any, ...] = ()
    wants_reward: bool = False

    @property
    def has_ended(self) -> bool:
        return not self.turns and not self.wants_reward


def episode_of(arguments: Sequence[Any]) -> Episode | None:
    """The `Episode` among the arguments of a call, or None if the call needs no object of a sample."""
    return next((argument for argument in arguments[4:] if isinstance(argument, Episode)), None)


def answer_of(key: str, path: str, *, is_limited: bool = False) -> Callable[..., Any]:
    """Return a function that calls a reward or an environment of the user in this process.

    key: the configuration key.
    path: the path of the user's function, or the paths of tools, separated by spaces.
    is_limited: see `Environment.answer`.

    Raises ValueError if the user's function cannot be imported.
    """
    section, _, name = key.partition(".")
    if section == "rollout" and name in registered(GROUP):  # `load` imports no other add-on into a worker
        return load(GROUP, name).answer(path, is_limited=is_limited)
    return partial(checked_reward, load_function(key, path))
