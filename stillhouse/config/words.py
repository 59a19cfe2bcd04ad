"""Describes the values that a key accepts, from its JSON schema: the same words for the reference and for errors."""

import json
from typing import Any

Schema = dict[str, Any]
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def describe(schema: Schema) -> str:
    """The accepted values, such as `whole number >= 1 or null`, `bf16 or fp32`, `list of 2 (number >= 0 and < 1)`."""
    options = _options(schema)
    return " or ".join(filter(None, [", ".join(options[:-1]), options[-1]]))


def _options(schema: Schema) -> list[str]:
    if "anyOf" in schema:
        return [option for part in schema["anyOf"] for option in _options(part)]
    if "enum" in schema:
        return [str(value) for value in schema["enum"]]
    if "const" in schema:
        return [str(schema["const"])]
    if "$ref" in schema:
        return ["a section"]
    if schema.get("pattern"):
        return [f"text such as {', '.join(schema['examples'])}"]
    return [_plain(schema)]


def _plain(schema: Schema) -> str:
    match schema["type"]:
        case "integer":
            return f"whole number{_range(schema)}"
        case "number":
            return f"number{_range(schema)}"
        case "string":
            return "text"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array" if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])} ({describe(schema['prefixItems'][0])})"
        case "array" if "$ref" in schema["items"]:
            return "list of sections"
        case "array":
            return f"list of {describe(schema['items'])}"
        case "object":
            return f"names with {describe(schema['additionalProperties'])} each"
        case kind:
            raise AssertionError(f"no words for a {kind} in the configuration")


def _range(schema: Schema) -> str:
    limits = [f"{sign} {schema[name]}" for name, sign in LIMITS.items() if name in schema]
    return f" {' and '.join(limits)}" if limits else ""


def written(value: Any) -> str:
    """A value as it is written in YAML."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {written(part)}' for name, part in value.items())}}}"
    return value if isinstance(value, str) else json.dumps(value)
