"""Reads and writes YAML 1.2: `2e-5` is a number; `on`, `no` and dates are text; a repeated key is an error."""

import io
import itertools
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from stillhouse.config.errors import ConfigError
from stillhouse.display import message
from stillhouse.libraries import reading

#: the largest 64-bit integer; a larger number must be a mistake, and Python cannot print very long numbers
LARGEST = 2**63 - 1
#: limits of a document: characters, and depth of nested brackets (reading time grows with the square of the depth)
MAX_CHARACTERS, MAX_DEPTH = 100_000, 200
_TAG = "tag:yaml.org,2002:"


class _Constructor(SafeConstructor):
    """YAML 1.2's core schema. Unlike in YAML 1.1, dates and `=` are text."""

    def construct_yaml_int(self, node: Any) -> int:
        number = int(super().construct_yaml_int(node))
        if abs(number) > LARGEST:
            raise ConstructorError(None, None, "found a whole number of more than 64 bits", node.start_mark)
        return number


_Constructor.add_constructor(f"{_TAG}int", _Constructor.construct_yaml_int)
for _name in ("timestamp", "value"):
    _Constructor.add_constructor(f"{_TAG}{_name}", SafeConstructor.construct_yaml_str)
for _name in ("binary", "omap", "pairs", "set"):
    _Constructor.add_constructor(f"{_TAG}{_name}", SafeConstructor.construct_undefined)


def read_yaml(text: str, source: str, *, numbered: bool = True) -> Any:
    """Return the value of one YAML document; None for an empty document.

    Raises ConfigError with `source` (the file or the override) and, if `numbered`, the line.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(None, f"{source}: {len(text):,} characters; expected at most {MAX_CHARACTERS:,} of YAML")
    steps = (1 if character in "[{" else -1 for character in text if character in "[{]}")
    if max(itertools.accumulate(steps), default=0) > MAX_DEPTH:
        raise ConfigError(None, f"{source}: not valid YAML: more than {MAX_DEPTH} nested brackets")
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        with reading("a value does not fit its tag or is nested too deeply", passes=YAMLError):
            return yaml.load(text)
    except (YAMLError, ValueError) as error:
        number: int | None = None  # the number of the line, from 0
        problem = str(error).partition("\n")[0]
        if isinstance(error, MarkedYAMLError):
            problem = ", ".join(part for part in (error.context, error.problem) if part)
            number = None if error.problem_mark is None else error.problem_mark.line
        elif isinstance(error, ReaderError):
            number = text[: error.position].count("\n")
        if isinstance(error, DuplicateKeyError):
            problem = str(error.problem).partition(" with value ")[0]  # leave out the value, which is not parsed yet
        line = f":{number + 1}" if numbered and number is not None else ""
        raise ConfigError(None, message(f"{source}{line}: not valid YAML: {problem}")) from error


def write_yaml(data: dict[str, Any]) -> str:
    """Return `data` as block-style YAML; the order of the keys is kept."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 10**6
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()
