"""The user's functions in a checkpoint: the states of functions that have one, and the hashes of the sources.

A function has a state if it has the methods `state_dict()` and `load_state_dict(state)`, or if it is a method of an
object that has these two methods. If the function is a class, they must be class methods or static methods, because
a resumed run makes new objects for samples.
"""

import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from stillhouse.display import name_list
from stillhouse.hashing import file_hash
from stillhouse.user_code.functions import UserFunction, UserFunctionError, method_of

SAVE, LOAD = "state_dict", "load_state_dict"
#: the maximum number of characters of a state as JSON
MOST_CHARACTERS = 2**24
#: the names of folders of installed modules
_INSTALLED = {"site-packages", "dist-packages"}


def module_hashes(functions: Sequence[UserFunction]) -> dict[str, str]:
    """Return the sha256 of each module in the packages of the functions, as in `FunctionStates.sources`."""
    packages = {function.path.partition(":")[0].partition(".")[0] for function in functions}
    sources = FunctionStates(functions).sources
    return {name: digest for name, digest in sources.items() if name.partition(".")[0] in packages}


class FunctionStates:
    """The user's functions of a run, in this process.

    with_state: the functions with a state, by key and path.
    sources: by module, the sha256 of its source file, or "" if the file cannot be read. The modules are those of the
        functions and all imported modules that are not installed, without `__main__` and Stillhouse's own modules.
    """

    def __init__(self, functions: Iterable[UserFunction]):
        functions = list(functions)
        self.with_state = {str(function): function for function in functions if has_state(function)}
        self.sources: dict[str, str] = {}
        named = {function.path.partition(":")[0] for function in functions}
        files = {
            name: Path(file)
            for name, module in (sorted(sys.modules.items()) if functions else ())
            if isinstance(module, ModuleType) and isinstance(file := vars(module).get("__file__"), str)
        }
        # a virtual environment can use the standard library of another Python, in folders outside of the environment
        standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
        for name, file in files.items():
            top = name.partition(".")[0]
            package = files.get(top, file)  # some packages create modules in other folders, as torch.compile does
            is_installed = not _INSTALLED.isdisjoint(package.parts) or any(map(package.is_relative_to, standard))
            is_of_user = name in named or (file.suffix == ".py" and not is_installed)
            if is_of_user and top not in ("__main__", "__mp_main__", __name__.partition(".")[0]):
                try:
                    self.sources[name] = file_hash(file)
                except OSError:
                    self.sources[name] = ""

    def texts(self) -> dict[str, str]:
        """The states as JSON, by the functions' keys and paths. Raises UserFunctionError if a state is not valid."""
        return {name: state_text(function) for name, function in self.with_state.items()}

    def load(self, texts: Mapping[str, str], sources: Mapping[str, str], warn: Callable[[str], None]) -> None:
        """Load the states of a checkpoint.

        texts, sources: the values of `texts()` and `sources` in the checkpoint.
        warn: prints a line. It is called if the source of a module has changed, if the function of a state is
            missing, or if the checkpoint lacks the state of a function.

        Raises UserFunctionError if a function does not load its state.
        """
        if changed := [name for name, digest in self.sources.items() if sources.get(name, digest) != digest]:
            warn(
                f"the source of {name_list(changed)} has changed since the checkpoint was written: the functions of "
                "the run may give other results than before"
            )
        for name in sorted(texts.keys() ^ self.with_state.keys()):
            missing = f"no longer has {SAVE} and {LOAD}" if name in texts else "has no state in the checkpoint"
            warn(f"{name} {missing}: it begins anew, so the results differ from those of a run without interruption")
        for name, function in self.with_state.items():
            if name in texts:
                method_of(function, _owner(function), LOAD)(json.loads(texts[name]))


def has_state(function: UserFunction) -> bool:
    """Whether a function has a state. Raises ValueError if it has only one of state_dict and load_state_dict."""
    owner = _owner(function)
    # a reward that is a torch module inherits these methods, but its weights are not a state of the run
    if str(getattr(getattr(owner, LOAD, None), "__module__", "")).startswith("torch."):
        return False
    names = []
    for name in (SAVE, LOAD):
        if inspect.isclass(owner):
            is_method = isinstance(inspect.getattr_static(owner, name, None), classmethod | staticmethod)
        else:
            is_method = callable(getattr(owner, name, None))
        names += [name] * is_method
    if len(names) == 1:
        raise ValueError(f"got {function.path!r}, which has only {names[0]}: expected both {SAVE} and {LOAD}")
    return bool(names)


def state_text(function: UserFunction) -> str:
    """The state of a function as JSON. Raises UserFunctionError for a state that JSON would change."""
    method = method_of(function, _owner(function), SAVE)
    state = method()
    try:
        text = json.dumps(state) if _is_json(state) else None
    except (RecursionError, ValueError) as error:
        raise UserFunctionError(
            f"{method} gives a state that is nested too deeply for JSON, or has an integer with too many digits: "
            "expected fewer levels or digits"
        ) from error
    if text is None:
        raise UserFunctionError(
            f"{method} gives a state with types that JSON does not have: expected dicts with texts as keys, lists, "
            "texts, numbers, True, False and None"
        )
    if len(text) > MOST_CHARACTERS:
        raise UserFunctionError(
            f"{method} gives a state of {len(text):,} characters as JSON: expected at most {MOST_CHARACTERS:,}"
        )
    return text


def _owner(function: UserFunction) -> Any:
    """The object that can have the state: the object of a bound method, or the function itself."""
    return getattr(function.function, "__self__", function.function)


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, int | float | str)  # numpy.float64 is a subclass of float
