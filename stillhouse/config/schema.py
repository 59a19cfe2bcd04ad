"""The keys of the configuration and descriptions of their accepted values, from the classes of the sections."""

import json
from typing import Any, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from stillhouse.config.section import Section
from stillhouse.display import enumerated

#: placeholder in a dotted key for a name that the user chooses
ANY_NAME = "<name>"
Schema = dict[str, Any]
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field; None if the field is a plain value or a list of sections."""
    if get_origin(field.annotation) is list:
        return None
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def item_section(field: FieldInfo) -> type[Section] | None:
    """The class of the items if a field is or may be a list of sections, otherwise None."""
    lists = [kind for kind in (field.annotation, *get_args(field.annotation)) if get_origin(kind) is list]
    kinds = [kind for annotation in lists for kind in get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def section_at(key: str, model: type[Section]) -> type[Section] | None:
    """The class of the section with this dotted key, such as data.train[1]; None if there is none."""
    section: type[Section] | None = model
    for part in key.split(".") if key else ():
        name, bracket, _ = part.partition("[")
        if section is None:
            return None
        field = section.model_fields.get(name)
        section = inner_section(section, name) if not bracket else None if field is None else item_section(field)
    return section


def named_sections(model: type[Section]) -> type[Section] | None:
    """The class of subsections with names that the user chooses (teachers.<name>); None if there are none."""
    if model.model_config.get("extra") != "allow":
        return None
    return get_args(get_type_hints(model)["__pydantic_extra__"])[1]


def inner_section(model: type[Section], name: str) -> type[Section] | None:
    """The class of the subsection with this name; None for a plain value and for an unknown name."""
    if name in model.model_fields:
        return section_of(model.model_fields[name])
    return named_sections(model)


def value_fields(model: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """All keys with values (not sections), by full dotted path, in the order of the classes."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            fields[prefix + name] = field
        else:
            fields |= value_fields(section, f"{prefix}{name}.")
    if named := named_sections(model):
        fields |= value_fields(named, f"{prefix}{ANY_NAME}.")
    return fields


def describe(schema: Schema) -> str:
    """The accepted values, such as `whole number >= 1 or null`, `bf16 or fp32`, `list of 2 (number >= 0 and < 1)`."""
    return enumerated(_options(schema), "or")


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


def yaml_value(value: Any) -> str:
    """A value in YAML on one line."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {yaml_value(part)}' for name, part in value.items())}}}"
    return value if isinstance(value, str) else json.dumps(value)
