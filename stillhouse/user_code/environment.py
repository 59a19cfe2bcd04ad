"""What replies to the turns of samples: the registered environments, and what an object of a sample gets."""

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
    """What replies to the turns of the samples of one source of prompts. The entries of the group
    `stillhouse.environments` are such classes. Their modules import neither torch nor `stillhouse.config` at
    their top, because workers load them, too.

    key: of the configuration, `rollout.<name of the entry>`: a path of a function, or a list of them. field: its type
        and its pydantic `Field`; None for the keys of this project, which are in its section.
    path: the paths of the user's functions, separated by spaces.
    schemas: of tools, for the chat template; None: there are none.
    format_key: the full key of the replies' form, for errors. turns: those that the chat template ends, in words.
    """

    key: ClassVar[str]
    field: ClassVar[tuple[Any, Any] | None] = None
    turns: ClassVar[str] = "turns"
    path: str
    format_key: str
    schemas: list[dict[str, Any]] | None = None

    @abstractmethod
    def __init__(self, rollout: "PromptConfig", full_key: Callable[[str], str]):
        """full_key: returns the full key of a key of the section."""

    @property
    @abstractmethod
    def functions(self) -> Sequence[UserFunction]:
        """The user's functions, imported. Raises ConfigError for those that cannot be used."""

    @classmethod
    def rules(cls) -> "Iterator[Rule]":
        """The combinations of keys that this environment does not allow."""
        yield from ()

    @classmethod
    @abstractmethod
    def answer(cls, path: str, *, is_limited: bool) -> Callable[..., Any]:
        """Return the calls of functions in this process: call(prompt, completion, record, source, episode).

        is_limited: whether the process has a limit of memory. An error because of it is then raised. Raises
        ValueError if the functions cannot be imported.
        """

    def markers(self, tokenizer: Any, processor: Any) -> dict[int, str]:
        """The tokens with which the chat template ends turns before a reply; {} if no template writes replies. Raises
        ValueError for a template that cannot write them.
        """
        return {}

    @abstractmethod
    def replies(self, calls: Any, tokenizer: Any, processor: Any, warn: Callable[[str], None]) -> Any:
        """The `rollout.turns.TurnReplies`. calls: of the functions. warn: prints a line, in any thread."""


def environments() -> dict[str, type[Environment]]:
    """The registered environments by the names of their keys in the section rollout."""
    return load_all(GROUP)


def environment_of(
    rollout: "PromptConfig", full_key: Callable[[str], str] = "rollout.{}".format
) -> Environment | None:
    """What replies to the turns of a section's samples; None if they have one turn. Raises ConfigError."""
    kinds = (kind for name, kind in environments().items() if getattr(rollout, name))
    return next((kind(rollout, full_key) for kind in kinds), None)


@dataclass(frozen=True)
class Episode:
    """The turns of the sample `number` so far.

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


def episode_of(arguments: Sequence[Any]) -> Episode | None:
    """The turns of the sample whose object a call needs. arguments: of the call."""
    return next((argument for argument in arguments[4:] if isinstance(argument, Episode)), None)


def answer_of(key: str, path: str, *, is_limited: bool = False) -> Callable[..., Any]:
    """Return the calls in this process of the function, or of the environment, that a key names.

    Raises ValueError if it cannot be imported. is_limited: see `Environment.answer`.
    """
    section, _, name = key.partition(".")
    if section == "rollout" and name in registered(GROUP):  # in a worker, no other add-on is imported
        return load(GROUP, name).answer(path, is_limited=is_limited)
    return partial(checked_reward, load_function(key, path))
