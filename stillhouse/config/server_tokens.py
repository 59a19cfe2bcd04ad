"""The bearer tokens of servers. A configuration names the environment variable that has a token, never the token."""

import os
import re
from typing import Annotated

from pydantic import AfterValidator, Field

#: the variable of `stillhouse serve`, and of a run's servers that have no variable of their own
TOKEN_VARIABLE = "STILLHOUSE_TOKEN"
_VARIABLE, _TOKEN = re.compile("[A-Z_][A-Z0-9_]*"), re.compile(r"[\x21-\x7e]+")


def _checked_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):  # the value may be the token itself: no message may show it
        raise ValueError("expected the name of an environment variable in capitals, such as TEACHER_TOKEN; no token")
    return name


#: the name of an environment variable
VariableName = Annotated[str, AfterValidator(_checked_variable)]
#: by the address of a server, the name of the variable with its token
RewardTokens = dict[Annotated[str, Field(min_length=1)], VariableName]


def server_token(key: str, variable: str | None) -> str | None:
    """The token in this variable. None: that in `TOKEN_VARIABLE`, if it is set. key: of the variable, for messages.

    Raises ValueError, which does not show the value, if a variable that the configuration names is not set, or if its
    value cannot be a token.
    """
    name = variable or TOKEN_VARIABLE
    token = os.environ.get(name, "")
    if not token and variable is None:
        return None
    if not _TOKEN.fullmatch(token):
        wrong = "has spaces, line breaks or other characters that no token has" if token else "is not set"
        raise ValueError(f"{key}: the environment variable {name} {wrong}")
    return token
