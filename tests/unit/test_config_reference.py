"""Files that are written from the configuration: dumped runs, the reference page and the JSON schema."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.config_cases import load, yaml_file
from ruamel.yaml import YAML

from docs.write_config import EXAMPLE, json_schema, markdown, write
from stillhouse.config import RunConfig, TeacherConfig, dump_config, load_config
from stillhouse.config.schema import ANY_NAME, section_of, value_fields

DOCS = Path(__file__).parents[2] / "docs"

texts = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn")), min_size=1, max_size=30)
positive = st.floats(min_value=1e-12, max_value=1e12)
shares = st.floats(min_value=0, max_value=1, exclude_max=True)
section = st.fixed_dictionaries
awkward = st.sampled_from(["null", "1", "1e5", "true", "on", "~", "a: b", "# c", "- d", "2026-11-21", "*x", "'", " "])
train = {"learning_rate": positive, "betas": st.tuples(shares, shares), "clip": st.none() | positive}
runs = section(
    {
        "student": section({"model": texts, "revision": awkward}),
        "teacher": st.none() | section({"model": texts}),
        "data": section({"train": texts, "eval": texts | shares}),
        "train": section(train | {"epochs": positive}) | section(train | {"steps": st.integers(1, 10**9)}),
        "track": st.just(["tensorboard"]),
        "out": texts,
    }
)


@given(content=runs)
def test_a_dump_loads_as_the_same(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    config = RunConfig.model_validate(content)
    path = yaml_file(tmp_path_factory.mktemp("dump"), dump_config(config))
    assert load_config(path) == config


#: overrides of configurations that together have every section; no single one can have all of them
SECTIONS = [
    ["teacher={model: t, parallel: {}}", "student.adapter={}", "rollout={samples_per_prompt: 1}"],
    ["teachers={math: {model: t, parallel: {}}}", "student.mtp={}"],
    ["student.init={from: random}", "eval.prompts={data: p.jsonl}"],
    ["teacher.model=t", "rollout={}", "objective.by_origin={student: reverse_kl}"],
]


def keys_of(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_dumps_have_every_key_in_order() -> None:
    known = list(value_fields(RunConfig))
    seen: set[str] = set()
    for overrides in SECTIONS:
        dumped = YAML(typ="safe", pure=True).load(dump_config(load(*overrides)))
        keys = [key.replace("teachers.math.", f"teachers.{ANY_NAME}.") for key in keys_of(dumped)]
        absent = {key for key in keys if key not in known}  # sections that are null
        expected = [key for key in known if not any(key.startswith(f"{section}.") for section in absent)]
        assert [key for key in keys if key not in absent] == expected
        seen |= set(keys) - absent
    assert seen == set(known)


def test_the_reference_has_every_key_and_is_up_to_date(tmp_path: Path) -> None:
    text = markdown()
    # the keys that teachers.<name> and teacher have in common are described once
    common = {f"teachers.{ANY_NAME}.{key}" for key in value_fields(TeacherConfig)}
    assert all(f"| `{key}` |" in text for key in value_fields(RunConfig) if key not in common)
    assert all(f"## `{name}`" in text for name, field in RunConfig.model_fields.items() if section_of(field))
    for key, field in value_fields(RunConfig).items():
        assert field.description, key
        assert field.description.endswith("."), key
        assert "|" not in field.description, key
    write(tmp_path)
    for name in ("config.md", "config.schema.json"):
        fresh = (tmp_path / name).read_text(encoding="utf-8")
        assert (DOCS / name).read_text(encoding="utf-8") == fresh, "run python docs/write_config.py"


def test_the_schema_agrees_with_the_classes() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    example = YAML(typ="safe", pure=True).load(EXAMPLE)
    validator.validate(example)
    validator.validate({"train": {"steps": 3}})
    for broken in ({"sed": 1}, {"train": {"learning_rate": 0}}, {"train": {"betas": [1]}}, {"device": "gpu"}):
        assert not validator.is_valid(broken), broken
