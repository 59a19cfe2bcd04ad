"""Files that are written from the configuration: dumped runs, the reference page and the JSON schema."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.config_cases import load
from ruamel.yaml import YAML

from stillhouse.config import RunConfig, TeacherConfig, dump_config, load_config
from stillhouse.config.document import EXAMPLE, json_schema, markdown, write
from stillhouse.config.schema import ANY_NAME, section_of, value_fields

DOCS = Path(__file__).parents[2] / "docs"


texts = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn")), min_size=1, max_size=30)
positive = st.floats(min_value=1e-12, max_value=1e12)
shares = st.floats(min_value=0, max_value=1, exclude_max=True)


@given(
    names=st.lists(texts, min_size=4, max_size=4),
    awkward=st.sampled_from(
        ["null", "1", "1e5", "true", "on", "~", "a: b", "# c", "- d", "2026-11-21", "*x", "'", " "]
    ),
    held_out=texts | shares,
    rate=positive,
    betas=st.tuples(shares, shares),
    clip=st.none() | positive,
    length=st.fixed_dictionaries({"epochs": positive}) | st.fixed_dictionaries({"steps": st.integers(1, 10**9)}),
    with_teacher=st.booleans(),
)
def test_a_dumped_configuration_loads_as_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    awkward: str,
    held_out: str | float,
    rate: float,
    betas: tuple[float, float],
    clip: float | None,
    length: dict[str, Any],
    with_teacher: bool,
) -> None:
    config = RunConfig.model_validate(
        {
            "student": {"model": names[0], "revision": awkward},
            "teacher": {"model": names[1]} if with_teacher else None,
            "data": {"train": names[2], "eval": held_out},
            "train": {"learning_rate": rate, "betas": betas, "clip": clip, **length},
            "track": ["tensorboard"],
            "out": names[3],
        }
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def test_a_dump_has_every_key_in_order() -> None:
    dumped, several, begun = (
        YAML(typ="safe", pure=True).load(dump_config(load(*settings)))
        for settings in (
            ("teacher={model: t, parallel: {}}", "student.adapter={}", "rollout={samples_per_prompt: 1}"),
            ("teachers={math: {model: t, parallel: {}}}", "student.mtp={}"),
            ("student.init={from: random}",),
        )
    )

    def keys(section: dict[str, Any], prefix: str = "") -> list[str]:
        named = [(f"{prefix}{name}", part) for name, part in section.items()]
        return [key for name, part in named for key in (keys(part, f"{name}.") if isinstance(part, dict) else [name])]

    known = list(value_fields(RunConfig))
    of_several = [key for key in known if key.startswith("teachers.")]
    # neither is possible with an adapter
    of_mtp, of_init = ([key for key in known if key.startswith(f"student.{name}.")] for name in ("mtp", "init"))
    short = {of_several[0]: "teachers", of_mtp[0]: "student.mtp", of_init[0]: "student.init"}
    expected = [short.get(key, key) for key in known if key not in of_several[1:] + of_mtp[1:] + of_init[1:]]
    assert keys(dumped) == expected
    found = [key.replace("teachers.math.", f"teachers.{ANY_NAME}.") for key in keys(several)]
    assert [key for key in found if key.startswith("teachers.")] == of_several
    assert [key for key in found if key.startswith("student.mtp.")] == of_mtp
    assert [key for key in keys(begun) if key.startswith("student.init.")] == of_init


def test_every_key_has_one_line_of_description() -> None:
    for key, field in value_fields(RunConfig).items():
        assert field.description, key
        assert field.description.endswith("."), key
        assert "\n" not in field.description, key
        assert "|" not in field.description, key


def test_the_reference_is_up_to_date(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("config.md", "config.schema.json"):
        fresh = (tmp_path / name).read_text(encoding="utf-8")
        assert (DOCS / name).read_text(encoding="utf-8") == fresh, "run python -m stillhouse.config.document"


def test_the_reference_has_every_key() -> None:
    text = markdown()
    # the keys that teachers.<name> and teacher have in common are described once
    common = {f"teachers.{ANY_NAME}.{key}" for key in value_fields(TeacherConfig)}
    assert all(f"| `{key}` |" in text for key in value_fields(RunConfig) if key not in common)
    assert all(f"## `{name}`" in text for name, field in RunConfig.model_fields.items() if section_of(field))


def test_the_schema_agrees_with_the_classes() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    example = YAML(typ="safe", pure=True).load(EXAMPLE)
    validator.validate(example)
    validator.validate({"train": {"steps": 3}})
    for broken in ({"sed": 1}, {"train": {"learning_rate": 0}}, {"train": {"betas": [1]}}, {"device": "gpu"}):
        assert not validator.is_valid(broken), broken
