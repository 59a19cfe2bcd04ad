"""The kinds of servers for signals, completions and rewards, and the servers' bearer tokens. Needs no torch.

The kinds of servers register in the group `stillhouse.servers`. The name of an entry is also the value of
`teacher.api` and `rollout.engine`. A configuration names the environment variable with a token, never the token.
"""

import os
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from stillhouse.config.errors import ConfigError
from stillhouse.config.section import Registered
from stillhouse.registry import load_all

GROUP = "stillhouse.servers"


class ServerError(OSError):
    """No server has answered before the timeout, or the answers are damaged repeatedly."""


@dataclass(frozen=True)
class ServerKind:
    """A kind of server that generates completions or gives rewards.

    name: the name of the entry point. title: the name of the kind in messages.
    reads_images: whether the server accepts the pixels that the run's own processor makes.
    rounds_as_here: whether the server's float32 log-probabilities differ from this process's only by rounding.
    reward_schemes: the schemes of addresses in rollout.reward that belong to servers of this kind.
    """

    name: str
    title: str
    reads_images: bool = False
    rounds_as_here: bool = False
    reward_schemes: tuple[str, ...] = ()

    def require_server(self, url: str, token: str | None, seconds: float) -> None:
        """Raise ValueError unless a server of this kind answers at `url`, or is still loading. Needs no torch.

        token: the server's bearer token. seconds: the time limit.
        """

    def require_reward_server(self, url: str, token: str | None, seconds: float) -> None:
        """Like `require_server`, for a server that gives rewards."""

    def open_engine(self, urls: list[str], sampling: Any, *, is_tied: bool, **options: Any) -> Any:
        """Connect to servers that generate completions; return a `RemoteEngine`. options: see `ServedEngine`.

        is_tied: whether the student's head is tied to its embedding, and the servers get full models, not adapters.
        """
        raise ConfigError("rollout.engine", f"got {self.name}: {self.title} generates no completions")

    def open_reward(self, url: str, name: str, timeout: float, warn: Any, token: str | None) -> Any:
        """Connect to a server that gives rewards; return a `RewardCalls` with a method `close`.

        name: the reward's name in messages. timeout: seconds without an answer after which a call raises ServerError.
        warn: a function that prints a line. token: the server's bearer token.
        """
        raise NotImplementedError


def server_kinds() -> dict[str, Any]:
    """The registered kinds by name. Each kind is a `ServerKind`; some have more properties for other add-ons."""
    return load_all(GROUP)


def signal_kinds(api: str) -> list[Any]:
    """The kinds that give a teacher's signals and that its key `api` allows. The kind with the most signals is the
    first one, because a gateway may answer the routes of several kinds.
    """
    kinds = [kind for kind in server_kinds().values() if getattr(kind, "signals", ())]
    return sorted((kind for kind in kinds if api in ("auto", kind.name)), key=lambda kind: -len(kind.signals))


def reward_kinds() -> dict[str, ServerKind]:
    """The kinds that give rewards, by the schemes of their addresses."""
    return {scheme: kind for kind in server_kinds().values() for scheme in kind.reward_schemes}


ApiName = Annotated[str, Registered(GROUP, ("auto",))]
#: the generator of completions: the student in the job, or servers
EngineName = Annotated[str, Registered(GROUP, ("transformers",))]

#: the default environment variable of the token, for `stillhouse serve` and for a run's servers
TOKEN_VARIABLE = "STILLHOUSE_TOKEN"
_VARIABLE, _TOKEN = re.compile("[A-Z_][A-Z0-9_]*"), re.compile(r"[\x21-\x7e]+")


def _checked_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):  # the value may be the token itself, so no message may show it
        raise ValueError("expected an environment variable in capitals, such as TEACHER_TOKEN, not the token")
    return name


#: the name of an environment variable
VariableName = Annotated[str, AfterValidator(_checked_variable)]
#: for each address of a server, the name of the variable with its token
RewardTokens = dict[Annotated[str, Field(min_length=1)], VariableName]


def server_token(key: str, variable: str | None) -> str | None:
    """Return the token in an environment variable; by default in `TOKEN_VARIABLE`, or None if that is not set.

    key: the configuration's key for the variable, for messages.

    Raises ValueError if a variable that the configuration names is not set, or if its value cannot be a token. The
    message does not show the value.
    """
    name = variable or TOKEN_VARIABLE
    token = os.environ.get(name, "")
    if not token and variable is None:
        return None
    if not _TOKEN.fullmatch(token):
        wrong = "has spaces, line breaks or other characters that a token cannot have" if token else "is not set"
        raise ValueError(f"{key}: the environment variable {name} {wrong}")
    return token
