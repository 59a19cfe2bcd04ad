"""The user's own functions: rewards of completions, and environments that answer them."""

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

#: (prompt, completion, record) → reward. prompt: the text that the model continued; completion: its text, without
#: special tokens; record: the whole record of the data
Reward: TypeAlias = Callable[[str, str, Mapping[str, Any]], float]
#: (prompt, completion, record) → the text that follows the completion, or None at the end
Environment: TypeAlias = Callable[[str, str, Mapping[str, Any]], str | None]


def load_function(path: str) -> Callable[..., Any]:
    """The function that `package.module:function` names. Modules in the working directory are found, too.

    Raises ValueError if there is no such module or function. An error in the module's own code is not caught.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and lacks another one
        raise ValueError(
            f"got {path!r}, but there is no module {error.name!r}: expected one that is installed, or in the working "
            "directory"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"got {path!r}, but {module_name} has no function {name!r}")
    return function


def checked_reward(reward: Reward, prompt: str, completion: str, record: Mapping[str, Any]) -> float:
    """The reward of a completion. Raises ValueError unless it is a finite number."""
    value = reward(prompt, completion, record)
    if not isinstance(value, int | float) or not math.isfinite(value):
        name = getattr(reward, "__qualname__", "the reward")
        raise ValueError(f"{name} gives {value!r} for the completion {completion[:80]!r}: expected a finite number")
    return float(value)


def checked_reply(environment: Environment, prompt: str, completion: str, record: Mapping[str, Any]) -> str | None:
    """What follows a completion. Raises ValueError unless it is a text or None."""
    reply = environment(prompt, completion, record)
    if reply is not None and not isinstance(reply, str):
        name = getattr(environment, "__qualname__", "the environment")
        raise ValueError(f"{name} gives {type(reply).__name__}: expected a text, or None at the end")
    return reply
