"""The base class of all sections, and value types that several sections use.

Sections are strict and frozen, and unknown keys raise an error. Strict means that text and `true` are not accepted as
numbers; a whole number is accepted as a float.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from inspect import get_annotations
from pathlib import PurePath
from typing import Annotated, Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model, model_validator
from pydantic_core.core_schema import CoreSchema, literal_schema

from stillhouse.config.errors import ConfigError
from stillhouse.registry import distribution, load, registered

#: the beginnings of this project's own entry points; a fork can rename the distribution, so it is not compared
_OWN = ("stillhouse.", "stillhouse:")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
#: a parameter of an address whose value is a secret
_SECRET_PARAMETER = re.compile(
    r"[?&][\w-]*(key|token|secret|password|passwd|pwd|auth|credential|signature|sig)=", re.IGNORECASE
)
_FILE = re.compile(r"(?P<file>[^:]+)\.py(::?(?P<name>[A-Za-z_]\w*))?")


Removed = Mapping[str, tuple[Any, str]]


@dataclass(frozen=True)
class Registered:
    """Annotates a text as the name of a registered add-on. group: its entry points. others: more valid names."""

    group: str
    others: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        names = [*self.others, *registered(self.group)]
        return literal_schema(names) if names else handler(source)


class Section(BaseModel):
    """A part of the configuration. The text after a field is its description in the reference (`docs/config.md`)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )
    #: keys of earlier versions; for each key, its old default, and when and why it was removed
    removed: ClassVar[Removed] = {}
    #: for each key of an add-on in this section, the error if the name is already taken (`keys_of_add_ons`)
    add_ons: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise ValueError if a key of an add-on has the name of another key or of an attribute."""
        super().__init_subclass__(**options)
        classes = [part for part in cls.__mro__ if not vars(part).get("add_ons")]
        keys = {name for part in classes for name in (*vars(part), *get_annotations(part))}
        for name, error in cls.add_ons.items():
            if name in keys:
                raise ValueError(error)

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, content: Any) -> Any:
        for name, (default, _) in cls.removed.items():
            if isinstance(content, dict) and name in content:  # as in config.yaml of an earlier run
                content = dict(content)
                if content.pop(name) != default:
                    raise cls.removed_key(name)
        return content

    @classmethod
    def removed_key(cls, key: str) -> ConfigError:
        """Return the error for a key of this section that is in `removed`."""
        _, reason = cls.removed[key.rpartition(".")[2]]
        return ConfigError(key, f"does not exist any more: {reason}; leave it out")


def text_list(texts: str | list[str] | None) -> list[str]:
    """The value of a key that accepts a text, a list of texts or null, converted to a list."""
    return [] if texts is None else [texts] if isinstance(texts, str) else texts


def _checked_functions(paths: str | list[str] | None) -> str | list[str] | None:
    for path in [""] if paths == [] else text_list(paths):
        checked_function(path)
    if len(set(text_list(paths))) < len(text_list(paths)):
        raise ValueError(f"got {paths}, expected different functions")
    return paths


def _checked_urls(urls: str | list[str] | None) -> str | list[str] | None:
    expected = "http://host:port without a path, such as /v1"
    for url in [""] if urls == [] else text_list(urls):
        parts = checked_address(url, expected, "token_variable")
        if parts.path.strip("/") or parts.query:
            raise ValueError(f"got {url!r}, expected {expected}")
    return urls


def checked_address(
    url: str, expected: str, token_key: str, schemes: Collection[str] = ("http", "https")
) -> SplitResult:
    """Check an address, and return its parts.

    expected: the valid form, for the error.
    token_key: the key for tokens, for the error.

    Raises ValueError for any other text, and for an address with a secret, because addresses are written to files of
    the run. The message does not show the secret.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or a bracket is missing
        is_address = False
    if "@" in url or _SECRET_PARAMETER.search(url):
        raise ValueError(
            f"got an address with a user, a password or a key, which would be written to files: expected the address "
            f"alone, and in {token_key} the name of an environment variable that contains the token"
        )
    if not is_address or parts.fragment or " " in url or not url.isprintable():
        raise ValueError(f"got {url!r}, expected {expected}")
    return parts


def checked_function(path: str, text: str | None = None) -> str:
    """Return the path. Raises ValueError if it is not package.module:function.

    text: the user's text that contains the path; the error quotes it. If it is None, the error quotes the path.
    """
    if not _FUNCTION.fullmatch(path):
        expected = f"package.module:function, such as mypkg.rewards:exact{function_hint(path)}"
        raise ValueError(f"got {text or path!r}, expected {expected}")
    return path


def keys_of_add_ons(group: str, section: str, kind: Any = None, description: str = "") -> type[Section]:
    """Return a section with the keys that other distributions register in a group of entry points.

    section: the name of the section that inherits the keys.
    kind: the type of each key. If it is None, the attribute `field` of each entry is the field of its key. An entry
        whose `field` is None has no key.
    description: the text for each key of this type, in which {name} and {distribution} are replaced.

    A class that inherits the keys raises ValueError if one of their names is taken.
    """
    fields: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, point in registered(group).items():
        if point.value.startswith(_OWN):
            continue
        owner = distribution(point)
        text = description.format(name=name, distribution=owner)
        field = load(group, name).field if kind is None else (kind, Field(default=None, description=text))
        if field:
            fields[name] = field
            errors[name] = (
                f"{owner} registers {name!r} in {group}, and {section}.{name} is the name of a key or an attribute "
                "already: register it under another name"
            )
    keys = create_model("_Keys", __base__=Section, **fields)
    keys.add_ons = errors
    return keys


def function_hint(path: str) -> str:
    """A hint with the right form for a function path such as my.py:f or my.f; "" for other paths."""
    if match := _FILE.fullmatch(path):
        file, name = PurePath(match["file"]), match["name"] or "function"
        if all(part.isidentifier() for part in file.parts):
            return f"; write {'.'.join(file.parts)}:{name}"
        if file.name.isidentifier():
            return f"; write {file.name}:{name}, and set PYTHONPATH={file.parent}"
        return ""
    module, dot, name = path.rpartition(".")
    return f"; did you mean {module}:{name}?" if dot and _FUNCTION.fullmatch(f"{module}:{name}") else ""


Text = Annotated[str, Field(min_length=1)]
#: a path; the shell does not replace ~ inside YAML, so ~/ is replaced here
PathText = Annotated[Text, AfterValidator(lambda path: os.path.expanduser(path) if path.startswith("~/") else path)]
Share = Annotated[float, Field(ge=0, lt=1)]
#: the address of a server, a list of addresses, or None
Urls = Annotated[Text | list[Text] | None, AfterValidator(_checked_urls)]
#: a Python function of the user: package.module:function
FunctionPath = Annotated[Text, AfterValidator(checked_function)]
#: a Python function of the user, a list of such functions, or None
FunctionPaths = Annotated[Text | list[Text] | None, AfterValidator(_checked_functions)]
