"""Reads the keys of the configuration and their accepted values from the classes of the sections."""

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
    """The class of the items if a field accepts a list of sections, otherwise None."""
    lists = [kind for kind in (field.annotation, *get_args(field.annotation)) if get_origin(kind) is list]
    kinds = [kind for annotation in lists for kind in get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def section_at(key: str, model: type[Section]) -> type[Section] | None:
    """The class of the section with this dotted key, such as data.train[1]; None if there is no such section."""
    section: type[Section] | None = model
    for part in key.split(".") if key else ():
        name, bracket, _ = part.partition("[")
        if section is None or (bracket and name not in section.model_fields):
            return None
        section = item_section(section.model_fields[name]) if bracket else inner_section(section, name)
    return section


def named_sections(model: type[Section]) -> type[Section] | None:
    """The class of the subsections whose names the user chooses (teachers.<name>); None if there are none."""
    if model.model_config.get("extra") != "allow":
        return None
    return get_args(get_type_hints(model)["__pydantic_extra__"])[1]


def inner_section(model: type[Section], name: str) -> type[Section] | None:
    """The class of the subsection with this name; None for a plain value and for an unknown name."""
    if name in model.model_fields:
        return section_of(model.model_fields[name])
    return named_sections(model)


def value_fields(model: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """All keys with values (not with sections), by full dotted path, in the order of the classes."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        section = section_of(field)
        fields |= {prefix + name: field} if section is None else value_fields(section, f"{prefix}{name}.")
    if named := named_sections(model):
        fields |= value_fields(named, f"{prefix}{ANY_NAME}.")
    return fields


def accepted_values(schema: Schema) -> str:
    """The accepted values, such as `whole number >= 1 or null`, `bf16 or fp32`, `list of 2 (number >= 0 and < 1)`."""
    return enumerated(_options(schema), "or")


def _options(schema: Schema) -> list[str]:
    limits = " and ".join(f"{sign} {schema[name]}" for name, sign in LIMITS.items() if name in schema)
    match schema:
        case {"anyOf": parts}:
            return [option for part in parts for option in _options(part)]
        case {"enum": values}:
            return [str(value) for value in values]
        case {"const": value}:
            return [str(value)]
        case {"$ref": _}:
            return ["a section"]
        case {"pattern": _}:
            return [f"text such as {', '.join(schema['examples'])}"]
        case {"type": "integer" | "number" as kind}:
            return [" ".join(filter(None, ["whole number" if kind == "integer" else "number", limits]))]
        case {"type": "string" | "boolean" | "null" as kind}:
            return [{"string": "text", "boolean": "true or false", "null": "null"}[kind]]
        case {"prefixItems": items}:
            return [f"list of {len(items)} ({accepted_values(items[0])})"]
        case {"items": {"$ref": _}}:
            return ["list of sections"]
        case {"items": items}:
            return [f"list of {accepted_values(items)}"]
        case {"additionalProperties": values}:
            return [f"mapping of names to {accepted_values(values)}"]
    raise AssertionError(f"no words for {schema} in the configuration")


def yaml_value(value: Any) -> str:
    """A value in YAML on one line."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {yaml_value(part)}' for name, part in value.items())}}}"
    return value if isinstance(value, str) else json.dumps(value)
