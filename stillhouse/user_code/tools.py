"""Tools that a model calls (`rollout.tools`): functions, and the methods of classes with state per sample.

An error of a tool becomes the text of its reply, because the model has chosen the arguments.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

from stillhouse.user_code.episodes import EpisodeObject, Episodes, caller_of, closed, method_of, reward_of, started
from stillhouse.user_code.functions import (
    REWARD_METHOD,
    TOOLS,
    UserFunction,
    gives_reward,
    in_words,
    load_class,
    load_function,
    require_synchronous,
)

#: the methods of a class with tools that are no tools themselves, and their parameters
_NO_TOOLS = {"reset": ("prompt", "record"), "close": ()}
#: the beginning of the text of a reply that is an error
ERROR = "Error: "
#: a call that the model makes: the name of the tool, its arguments, and a problem in place of a reply, or ""
MadeCall = tuple[str, Mapping[str, Any], str]


class Tools:
    """The tools of a run.

    paths: of functions and of classes, as package.module:name. All public methods of a class but reset and close are
        tools, and so is a method reward with arguments.
    is_limited: whether the process has a limit of memory. An error because of it is then raised.

    Raises ValueError for a path that cannot be imported or is no tool, and for two tools of one name.
    """

    def __init__(self, paths: Sequence[str], hint: Callable[[str], str] = lambda _: "", *, is_limited: bool = False):
        self.functions: dict[str, UserFunction] = {}
        self.classes: list[UserFunction] = []
        #: by the name of a tool: what transformers makes its schema of
        self.described: dict[str, Callable[..., Any]] = {}
        self._is_limited = is_limited
        for path in paths:
            loaded = load_function(TOOLS, path, hint(path))
            if inspect.isclass(loaded.function):
                self._add_class(load_class(loaded, _NO_TOOLS))
            else:
                name = str(getattr(loaded.function, "__name__", ""))  # the name in its schema
                self._add(name, loaded.function, path)
                self.functions[name] = loaded

    @property
    def have_state(self) -> bool:
        return bool(self.classes)

    def start(self, prompt: str, record: Mapping[str, Any], about: str) -> EpisodeObject:
        """The tools of one sample; see `EpisodeObject`."""
        functions, objects = dict(self.functions), []
        for of in self.classes:
            made = started(of, prompt, record, about)
            objects.append((of, made))
            functions |= {name: method_of(of, made, name) for name in _tool_names(of)}
        return _SampleTools(functions, objects, is_limited=self._is_limited)

    def _add_class(self, of: UserFunction) -> None:
        names = _tool_names(of)
        if not names:
            raise ValueError(
                f"got {of.path!r}, a class without tools: expected public methods besides reset and close"
            )
        for name in names:
            method = getattr(of.function, name)
            if not isinstance(inspect.getattr_static(of.function, name), staticmethod):
                method = MethodType(method, object())  # transformers does not describe the `self` of a bound method
            self._add(name, method, f"{of.path}.{name}")
        self.classes.append(of)

    def _add(self, name: str, described: Callable[..., Any], path: str) -> None:
        if name in self.described:
            raise ValueError(f"got {path!r}, but there is another tool of this name: expected different names")
        require_synchronous(path, described)
        self.described[name] = described


def answer_of(key: str, path: str, *, is_limited: bool = False) -> Callable[..., Any]:
    """Return the calls in this process of the function, the class or the tools (their paths, with spaces) of a key.

    Raises ValueError if they cannot be imported. is_limited: see `Tools`.
    """
    if key != TOOLS:
        return caller_of(load_function(key, path))
    tools = Tools(path.split(), is_limited=is_limited)
    return Episodes(f"{key}: {path}", tools.start, have_state=tools.have_state)


class _SampleTools:
    def __init__(
        self,
        functions: Mapping[str, UserFunction],
        objects: Sequence[tuple[UserFunction, Any]],
        *,
        is_limited: bool,
    ):
        self._functions, self._objects, self._is_limited = functions, objects, is_limited

    def step(self, turn: Sequence[MadeCall], about: str) -> list[str]:
        """The texts of the replies to the calls of a turn, in their order."""
        return [
            f"{ERROR}{problem}" if problem else self._reply(self._functions[name], arguments, about)
            for name, arguments, problem in turn
        ]

    def reward(self, about: str) -> float:
        (rewarded,) = ((of, made) for of, made in self._objects if gives_reward(of))
        return reward_of(*rewarded, about)

    def close(self, about: str) -> None:
        for of, made in self._objects:
            closed(of, made, about)

    def _reply(self, tool: UserFunction, arguments: Mapping[str, Any], about: str) -> str:
        call = UserFunction(tool.key, tool.path, partial(_called, tool.function, arguments))
        try:
            reply: str = call(about=about)
        except ValueError as error:
            cause = error.__cause__
            if cause is None or (self._is_limited and isinstance(cause, MemoryError)):
                raise
            reply = f"{ERROR}{in_words(cause)}"
        return reply.encode(errors="replace").decode()  # half of a surrogate pair may come from the model's JSON


def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    value = function(**arguments)
    return str.__str__(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _tool_names(of: UserFunction) -> list[str]:
    no_tools = {*_NO_TOOLS, REWARD_METHOD} if gives_reward(of) else _NO_TOOLS
    names = [name for name, _ in inspect.getmembers(of.function, inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in no_tools]
