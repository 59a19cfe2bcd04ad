"""The user's own functions: rewards for completions, environments that reply to completions, and evaluations.

Any exception that a function raises, even SystemExit, becomes an error that names the function and its call, with the
traceback of the user's own frames. A function gets a copy of the record, so that it cannot change the record for
later calls. Otherwise, a resumed run could not repeat a call with the same result.
"""

import copy
import importlib
import inspect
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from traceback import StackSummary, TracebackException, extract_tb
from types import TracebackType
from typing import Any, Literal, TypedDict

from stillhouse import preemption
from stillhouse.display import escaped
from stillhouse.preemption import OverdueError, interruptible

CALLBACKS, REWARD, ENVIRONMENT = "eval.callbacks", "rollout.reward", "rollout.environment"
EVAL_REWARD, TOOLS = "eval.prompts.reward", "rollout.tools"
#: the argument by which a reward function for TRL is recognised, and the text that the error then adds
_OF_TRL = "completions"
_WRAPPED = "; reward functions for TRL take and return lists, and docs/coming_from.md has a wrapper for them"
#: the parameters of rewards and environments. prompt: the text before the completion; completion: the text of the
#: completion without special tokens; record: the full record of the data. A reward returns a number, and can also
#: have the parameter `turns`. An environment returns the text that follows the completion, or None to end the sample;
#: it can also be a class (`_METHODS`). Callbacks get an `EvaluationContext` instead
_PARAMETERS = ("prompt", "completion", "record")
#: an optional parameter of a reward: a list of `Turn`
TURNS = "turns"
#: the method, in a class of an environment or of tools, that returns the sample's reward after the last turn
REWARD_METHOD = "reward"
#: the methods of a class that is an environment, with their parameters. turn: the text of the model's last turn
_METHODS: Mapping[str, tuple[str, ...]] = {"reset": ("prompt", "record"), "step": ("turn",)}
#: the numbers of frames that an error shows from the beginning and from the end of a long traceback
_FIRST, _LAST = 2, 6
#: the maximum number of characters shown of a completion, and of the message of a function's error
_SHOWN, _WIDTH = 80, 400
#: the files of the frames that come before the user's frames in a traceback
_IMPORT = (importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_OWN = (__file__, preemption.__file__, *_IMPORT)


class UserFunctionError(ValueError):
    """Raised if a call of a user's function fails. The run then saves its finished steps, and can be continued."""


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the working directory was removed
        return os.curdir


def _settings() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """For each setting of the process that a function must not change, the functions that read and set it."""
    settings: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "the working directory": (_folder, os.chdir)
    }
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_grad_enabled"):  # only if the process has imported torch, which workers do not
        settings["torch's default dtype"] = (torch.get_default_dtype, torch.set_default_dtype)
        settings["whether torch records gradients"] = (torch.is_grad_enabled, torch.set_grad_enabled)
    return settings


class Turn(TypedDict):
    """A part of a completion, in the form that reward functions and reward servers get.

    role: "student" for a turn of the model, "environment" for a reply of `rollout.environment` or `rollout.tools`.
    text: the text without special tokens. A reply of tools includes all text of the chat template between two turns.
    """

    role: Literal["student", "environment"]
    text: str


@dataclass(frozen=True)
class UserFunction:
    """A function of the user.

    key: the configuration key that names this function.
    path: `package.module:function`.
    """

    key: str
    path: str
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.key}: {self.path}"

    @property
    def takes_turns(self) -> bool:
        """Whether the function has a parameter `turns`. If a decorator wraps the function and the wrapper accepts
        `**`, the parameters of the wrapped function count, too.
        """
        try:
            outer = inspect.signature(self.function, follow_wrapped=False).parameters
            inner = inspect.signature(self.function).parameters
        except (ValueError, TypeError):  # some built-in functions have no signature
            return False
        passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in outer.values())
        return TURNS in outer or (passes_on and TURNS in inner)

    def __call__(self, *arguments: Any, about: str = "", **named: Any) -> Any:
        """Call the function.

        about: a text that is added to error messages, for example to name the completion.

        Raises UserFunctionError if the function raises an exception or changes settings of the process (which are
        then restored), and OverdueError if the function does not return after a signal.
        """
        settings = _settings()
        before = {name: read() for name, (read, _) in settings.items()}
        try:
            with _ForeignCode(str(self), about):
                call = partial(self.function, *arguments, **named)
                # no advice for evaluations: callbacks never run in workers, and a run without rollouts has none
                advice = "; rollout.workers with rollout.worker_timeout limits the time of a call"
                value = interruptible(str(self), call, about, advice if self.key.startswith("rollout.") else "")
        finally:
            changed = [name for name, (read, _) in settings.items() if read() != before[name]]
            for name in changed:
                settings[name][1](before[name])
        if changed:
            changes = " and ".join(changed)
            raise UserFunctionError(
                f"{self} changes {changes}{about}: expected a function that restores what it changes"
            )
        return value


def load_object(path: str, hint: str = "") -> Any:
    """Import the object `package.module:name`, also from modules in the working directory.

    hint: a text that the error adds if there is no such module.

    Raises ValueError for an object that cannot be imported.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with _ForeignCode(f"got {path!r}, but importing {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists, but it imports another module that does not exist
            module = None
    if module is None:
        raise no_module(path, module_name, hint)
    if (content := getattr(module, name, None)) is None:
        raise no_function(path, module_name, name)
    return content


def load_function(key: str, path: str, hint: str = "") -> UserFunction:
    """Import the function `package.module:function` (see `load_object`).

    key: the configuration key, which determines the parameters that the function must have.

    Raises ValueError for a function that cannot be imported, is asynchronous, or does not have these parameters.
    """
    function = load_object(path, hint)
    parameters = ("context",) if key == CALLBACKS else _PARAMETERS
    if not callable(function):
        kind = type(function).__name__
        expected = "a function or a class" if key in (ENVIRONMENT, TOOLS) else f"a function({', '.join(parameters)})"
        raise ValueError(f"got {path!r}, which is of type {kind}, not a function: expected {expected}")
    loaded = UserFunction(key, path, function)
    require_synchronous(path, function)
    if key == ENVIRONMENT and inspect.isclass(function):
        return load_class(loaded, _METHODS)
    if key != TOOLS:  # a tool can have any parameters, because the model gets their descriptions
        named = (TURNS,) if key in (REWARD, EVAL_REWARD) and loaded.takes_turns else ()
        _require_parameters(path, function, parameters, named)
    return loaded


def load_class(of: UserFunction, methods: Mapping[str, tuple[str, ...]]) -> UserFunction:
    """Check and return a class of the user.

    methods: the methods that the class must have, with their parameters; close is optional.

    Raises ValueError if the class needs arguments or lacks a method.
    """
    path, made = of.path, of.function
    _require_parameters(path, made, ())
    for name, parameters in methods.items():
        method = getattr(made, name, None)
        if method is None and name == "close":
            continue
        if not callable(method):
            expected = " and ".join(
                f"{method}({', '.join(names)})" for method, names in methods.items() if method != "close"
            )
            raise ValueError(f"got {path!r}, a class without the method {name}: expected a class with {expected}")
        require_synchronous(f"{path}.{name}", method)
        is_bound = isinstance(inspect.getattr_static(made, name), staticmethod | classmethod)
        _require_parameters(f"{path}.{name}", method, parameters if is_bound else ("self", *parameters))
    return of


def require_synchronous(path: str, function: Callable[..., Any]) -> None:
    """Raise ValueError for a function with `async def`, and for an object whose `__call__` has `async def`."""
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    called = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    if any(is_kind(one) for is_kind in kinds for one in (function, called)):
        raise ValueError(
            f"got {path!r}, which is asynchronous (async def): expected a function without async, which can call "
            "asyncio.run itself. rollout.workers makes many calls at once"
        )


def gives_reward(of: UserFunction) -> bool:
    """Whether `of` is a class whose objects give a reward: it has a method `reward` without arguments."""
    method = inspect.getattr_static(of.function, REWARD_METHOD, None) if inspect.isclass(of.function) else None
    try:
        return inspect.isfunction(method) and inspect.signature(method).bind("self") is not None
    except TypeError:
        return False


def method_of(of: UserFunction, made: Any, name: str) -> UserFunction:
    """Return a method of an object of a user's class as a `UserFunction`.

    of: the class.
    made: the object.
    """
    return replace(of, path=f"{of.path}.{name}", function=getattr(made, name))


def no_module(path: str, module: str, hint: str) -> ValueError:
    expected = f"expected a module that is installed or is in the working directory{hint}"
    return ValueError(f"got {path!r}, but there is no module {module!r}: {expected}")


def no_function(path: str, module: str, name: str) -> ValueError:
    return ValueError(f"got {path!r}, but {module} has no function or class {name!r}")


def checked_reward(
    reward: UserFunction,
    prompt: str,
    completion: str,
    record: Mapping[str, Any],
    source: str,
    turns: Sequence[Turn] = (),
) -> float:
    """Call a reward function, and return the reward of a completion.

    source: `file:line` of the record.
    turns: the turns and replies of the completion, for a function with the parameter `turns`.

    Raises UserFunctionError if the function fails, or if its result is not a finite number.
    """
    about = about_completion(completion, source)
    named = {TURNS: [turn.copy() for turn in turns]} if reward.takes_turns else {}
    value = reward(prompt, completion, copied_record(record, source), about=about, **named)
    return checked_number(reward, value, about)


def checked_number(reward: UserFunction, value: Any, about: str) -> float:
    """The result of a reward as a float. Raises UserFunctionError unless it is a finite number."""
    number = finite_number(value)
    if number is None:
        hint = _WRAPPED if isinstance(value, list) else ""
        raise UserFunctionError(f"{reward} gives {shown(value)}{about}: expected a finite number{hint}")
    return number


def finite_number(value: Any) -> float | None:
    """Return the result of a function as a float, or None if it is not a finite number. Numbers of numpy are allowed.
    Methods that a subclass of int or float overrides are not called.
    """
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.generic):
        value = value.item()
    if not isinstance(value, int | float):
        return None
    try:
        number = float.__float__(value) if isinstance(value, float) else int.__float__(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """Describe a function's result for an error message: by its type alone if its repr could be long or fail."""
    if isinstance(value, str):
        return repr(str.__str__(value)[:_SHOWN])
    if isinstance(value, bool):
        return repr(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, int):
        bits = int.bit_length(value)
        return int.__repr__(value) if bits <= 64 else f"an integer of {bits:,} bits"
    return type(value).__name__


def copied_record(record: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """A deep copy of a record. source: `file:line` of the record.

    Raises UserFunctionError if the record is nested too deeply.
    """
    try:
        return copy.deepcopy(record)
    except RecursionError as error:
        raise UserFunctionError(f"{source}: the record is nested too deeply to be copied for a function") from error


def about_completion(completion: str, source: str) -> str:
    """The part of an error message that names a completion. source: `file:line` of the completion's record."""
    return f" for the completion {completion[:_SHOWN]!r} of {source}"


class _ForeignCode(AbstractContextManager[object]):
    """Converts exceptions in the block to UserFunctionError, except OverdueError and Ctrl-C.

    SystemExit is also converted, because exit code 0 of the process would mean that the run is complete.

    what, about: the texts before and after the exception in the message.
    """

    def __init__(self, what: str, about: str = ""):
        self._what, self._about = what, about

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        # In a program that uses the library, Ctrl-C raises KeyboardInterrupt. In the command line and in workers, our
        # own signal handler catches Ctrl-C and raises nothing, so a KeyboardInterrupt comes from the function itself.
        raises_on_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        is_ctrl_c = isinstance(error, KeyboardInterrupt) and raises_on_ctrl_c
        if error is None or isinstance(error, OverdueError) or is_ctrl_c:
            return
        message = f"{self._what} raises {in_words(error)}{self._about}"
        raise UserFunctionError(message + _frames(error.__traceback__)) from error


def _require_parameters(
    path: str, function: Callable[..., Any], parameters: tuple[str, ...], named: tuple[str, ...] = ()
) -> None:
    try:
        # the signature of the wrapper counts, because a decorator can change the arguments
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*parameters, **dict.fromkeys(named))
    except TypeError as error:
        is_class = inspect.isclass(function)
        expected = f"a function({', '.join(parameters)})" if parameters or not is_class else "no required arguments"
        raise ValueError(
            f"got {path!r}, {'a class, ' if is_class else ''}which takes {signature}: expected {expected}"
            f"{_WRAPPED if _OF_TRL in signature.parameters else ''}"
        ) from error


def in_words(error: BaseException) -> str:
    """The type of an error and the first line of its message, with at most `_WIDTH` characters."""
    message = str(TracebackException(type(error), error, None))
    first = escaped(message.strip().partition("\n")[0])
    shown = first if len(first) <= _WIDTH else f"{first[: _WIDTH - 3]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def _frames(trace: TracebackType | None) -> str:
    """The user's frames of a traceback, as lines that follow the message."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN:
        trace = trace.tb_next
    # column numbers are omitted, because they would add lines with position markers
    frames = [(frame.filename, frame.lineno or 0, frame.name, frame.line) for frame in extract_tb(trace)]
    entries = StackSummary.from_list(frames).format()  # repeated frames become one entry
    if len(entries) > _FIRST + _LAST:
        left_out = f"  ... {len(entries) - _FIRST - _LAST} more frames\n"
        entries = [*entries[:_FIRST], left_out, *entries[-_LAST:]]
    return "".join(["\n", *entries]).rstrip()
