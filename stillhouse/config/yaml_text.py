"""YAML 1.2 in and out: `2e-5` is a number; `on`, `no` and dates are text; a repeated key is an error."""

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from stillhouse.config.errors import ConfigError


class _Constructor(SafeConstructor):
    """YAML 1.2's core schema: what 1.1 read as a date or as `=` is text."""


for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)


def read_yaml(text: str, origin: str, *, numbered: bool = True) -> Any:
    """The value of one YAML document (None if empty); a ConfigError names `origin` and, if `numbered`, the line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        return yaml.load(text)
    except YAMLError as error:
        line = _line(error, text) if numbered else ""
        raise ConfigError(None, f"{origin}{line}: not valid YAML: {_problem(error)}") from error


def write_yaml(data: dict[str, Any]) -> str:
    """`data` as block-style YAML, keys in their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 10**6
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


def _line(error: YAMLError, text: str) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f":{error.problem_mark.line + 1}"
    if isinstance(error, ReaderError):
        return f":{text[: error.position].count(chr(10)) + 1}"
    return ""


def _problem(error: YAMLError) -> str:
    if isinstance(error, MarkedYAMLError):
        return ", ".join(part for part in (error.context, error.problem) if part)
    return str(error).partition("\n")[0]
