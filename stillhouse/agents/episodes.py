"""Environments and tools with state: for each sample, an object that gets the sample's turns.

An object exists only in the process that calls it. If the object is lost because its process has ended, a new object
gets the earlier turns again. So an environment that depends only on its arguments gives the same replies as in a run
without lost processes. Tools (`rollout.tools`) are functions, and methods of classes that have a state per sample.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

from stillhouse.user_code.environment import Episode
from stillhouse.user_code.functions import (
    REWARD_METHOD,
    TOOLS,
    UserFunction,
    UserFunctionError,
    about_completion,
    checked_number,
    copied_record,
    gives_reward,
    in_words,
    load_class,
    load_function,
    method_of,
    require_synchronous,
    shown,
)

#: in a class with tools, the methods that are not tools, with their parameters
_NO_TOOLS = {"reset": ("prompt", "record"), "close": ()}
#: the beginning of a reply that reports an error to the model
ERROR = "Error: "
#: a call that the model requests: the tool's name, the arguments, and the problem that prevents the call, or ""
MadeCall = tuple[str, Mapping[str, Any], str]

#: makes the object of a sample: start(prompt, record, about). The record is a copy that only this object gets
Start = Callable[[str, Mapping[str, Any], str], "UserObject | _SampleTools"]


def checked_reply(
    environment: UserFunction, prompt: str, completion: str, record: Mapping[str, Any], source: str
) -> str | None:
    """The environment's reply to a completion. Raises UserFunctionError unless the reply is a text or None."""
    about = about_completion(completion, source)
    reply = environment(prompt, completion, copied_record(record, source), about=about)
    return checked_text(environment, reply, about)


def checked_text(environment: UserFunction, value: Any, about: str) -> str | None:
    """Check and return a reply of an environment. Raises UserFunctionError unless the reply is None or a text that
    UTF-8 can represent.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise UserFunctionError(f"{environment} gives {shown(value)}{about}: expected a text, or None at the end")
    reply = str.__str__(value)  # a subclass of str can override methods
    try:
        reply.encode()
    except UnicodeEncodeError as error:
        raise UserFunctionError(
            f"{environment} gives a text with half of a surrogate pair at character {error.start + 1}{about}: "
            "expected text that UTF-8 can represent"
        ) from error
    return reply


class Episodes:
    """The objects of samples in this process. name: the key and the user's class, for error messages.

    have_state: whether the objects depend on earlier turns. If not, each turn has a new object, which does not get
        the earlier turns again: the calls in these turns could hang again, or give other replies at another time.
    """

    def __init__(self, name: str, start: Start, *, have_state: bool = True):
        self._name, self._start, self._have_state = name, start, have_state
        #: by the number of the sample: the object, and the number of turns that the object has received
        self._objects: dict[int, tuple[UserObject | _SampleTools, int]] = {}

    def __call__(self, prompt: str, completion: str, record: Mapping[str, Any], source: str, episode: Episode) -> Any:
        """The reply to the last turn of an episode, or the reward of the sample.

        Raises UserFunctionError if a method fails, or if the reply to an earlier turn differs from its first reply.
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
        reply: str | list[str] | None = None
        for number in range(got, len(turns)):
            reply = kept.step(turns[number], about)
            if number < len(episode.replies) and reply != (before := episode.replies[number]):
                raise UserFunctionError(
                    f"{self._name} replies {shown(reply)} to a turn after it was started again, and replied "
                    f"{shown(before)} before{about}: expected an environment that depends only on its arguments"
                )
        self._objects[episode.number] = kept, len(turns)
        return kept.reward(about) if episode.wants_reward else reply


class UserObject:
    """An object of a user's class, which was made and reset for a sample.

    of: the user's class.
    about: a text for error messages, which names the completion.

    Raises UserFunctionError if the object cannot be made or reset.
    """

    def __init__(self, of: UserFunction, prompt: str, record: Mapping[str, Any], about: str):
        self.of, self._made = of, of(about=about)
        value = self.method("reset")(prompt, record, about=about)
        if value is not None:
            raise UserFunctionError(
                f"{of}.reset gives {shown(value)}{about}: expected None, because the prompt comes from the data"
            )

    def method(self, name: str) -> UserFunction:
        return method_of(self.of, self._made, name)

    def step(self, turn: str, about: str) -> str | None:
        """The reply to a turn."""
        return checked_text(self.of, self.method("step")(turn, about=about), about)

    def reward(self, about: str) -> float:
        """The reward of the sample, after its last turn."""
        method = self.method(REWARD_METHOD)
        return checked_number(method, method(about=about), about)

    def close(self, about: str) -> None:
        """End the object after its sample has ended: call the method close, if the class has one."""
        if hasattr(self._made, "close"):
            self.method("close")(about=about)


class Tools:
    """The tools of a run.

    paths: the paths of functions and classes, as package.module:name. All public methods of a class are tools, except
        reset, close, and a method reward without arguments.
    hint: returns a text that the error adds if the module of a path does not exist.
    is_limited: whether the process has a limit of memory. A tool's MemoryError is then raised, and is no reply.

    Raises ValueError for a path that cannot be imported or is not a tool, and for two tools with the same name.
    """

    def __init__(self, paths: Sequence[str], hint: Callable[[str], str] = lambda _: "", *, is_limited: bool = False):
        self.functions: dict[str, UserFunction] = {}
        self.classes: list[UserFunction] = []
        #: by the name of a tool: the function from which transformers makes its schema
        self.described: dict[str, Callable[..., Any]] = {}
        self._is_limited = is_limited
        for path in paths:
            loaded = load_function(TOOLS, path, hint(path))
            if not inspect.isclass(loaded.function):
                name = str(getattr(loaded.function, "__name__", ""))  # the same name as in its schema
                self._add(name, loaded.function, path)
                self.functions[name] = loaded
                continue
            loaded = load_class(loaded, _NO_TOOLS)
            if not (names := _tool_names(loaded)):
                raise ValueError(
                    f"got {loaded.path!r}, a class without tools: expected public methods other than reset and close"
                )
            for name in names:
                method = getattr(loaded.function, name)
                if not isinstance(inspect.getattr_static(loaded.function, name), staticmethod):
                    # in a schema, transformers omits the `self` of a bound method
                    method = MethodType(method, object())
                self._add(name, method, f"{loaded.path}.{name}")
            self.classes.append(loaded)
        self.have_state = bool(self.classes)

    def start(self, prompt: str, record: Mapping[str, Any], about: str) -> "_SampleTools":
        """The tools of one sample."""
        functions, objects = dict(self.functions), list[UserObject]()
        for of in self.classes:
            objects.append(UserObject(of, prompt, record, about))
            functions |= {name: objects[-1].method(name) for name in _tool_names(of)}
        return _SampleTools(functions, objects, is_limited=self._is_limited)

    def _add(self, name: str, described: Callable[..., Any], path: str) -> None:
        if name in self.described:
            raise ValueError(f"got {path!r}, but another tool has the same name: expected different names")
        require_synchronous(path, described)
        self.described[name] = described


class _SampleTools:
    """The tools of a sample, with the methods of a `UserObject`."""

    def __init__(self, functions: Mapping[str, UserFunction], objects: Sequence[UserObject], *, is_limited: bool):
        self._functions, self._objects, self._is_limited = functions, objects, is_limited

    def step(self, turn: Sequence[MadeCall], about: str) -> list[str]:
        """The texts of the replies to the calls of a turn, in their order."""
        return [
            f"{ERROR}{problem}" if problem else self._reply(self._functions[name], arguments, about)
            for name, arguments, problem in turn
        ]

    def reward(self, about: str) -> float:
        (rewarded,) = (made for made in self._objects if gives_reward(made.of))
        return rewarded.reward(about)

    def close(self, about: str) -> None:
        for made in self._objects:
            made.close(about)

    def _reply(self, tool: UserFunction, arguments: Mapping[str, Any], about: str) -> str:
        def call() -> str:
            value = tool.function(**arguments)
            return (
                str.__str__(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            )

        try:
            reply: str = replace(tool, function=call)(about=about)
        except ValueError as error:
            cause = error.__cause__
            if cause is None or (self._is_limited and isinstance(cause, MemoryError)):
                raise
            reply = f"{ERROR}{in_words(cause)}"
        return reply.encode(errors="replace").decode()  # JSON of the model can contain half of a surrogate pair


def _tool_names(of: UserFunction) -> list[str]:
    no_tools = {*_NO_TOOLS, REWARD_METHOD} if gives_reward(of) else _NO_TOOLS
    names = [name for name, _ in inspect.getmembers(of.function, inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in no_tools]
