"""The configuration: what YAML and overrides mean, and that every fault is a line with its key."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ruamel.yaml import YAML

from stillhouse.config import (
    AdapterConfig,
    ConfigError,
    MissingKeyError,
    RunConfig,
    TrainConfig,
    dump_config,
    load_config,
)
from stillhouse.config.document import EXAMPLE, json_schema, markdown, write
from stillhouse.config.keys import section_of, value_fields

DOCS = Path(__file__).parent.parent / "docs"
LEAST = ("student.model=s", "data.train=d.jsonl", "out=o")


def load(*overrides: str, **layers: Any) -> RunConfig:
    return load_config(None, [*LEAST, *overrides], **layers)


def failure(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return caught.value


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_example_of_the_reference_means_what_it_says(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, EXAMPLE))
    assert config.teacher is not None
    assert (config.student.model, config.teacher.dtype) == ("Qwen/Qwen3-0.6B", "bfloat16")
    assert (config.data.eval, config.data.max_tokens) == (0.02, 4096)
    assert config.objective.loss == "0.3*cross_entropy + 0.7*jsd(0.5)"
    assert (config.train.learning_rate, config.train.epochs, config.train.steps) == (2e-5, 1.0, None)
    assert (config.eval.every, config.checkpoint.keep, config.track, config.out) == (
        100,
        2,
        ["tensorboard"],
        "runs/qwen3",
    )


def test_the_least_configuration_has_the_defaults() -> None:
    config = load()
    assert config.teacher is None
    assert config.train == TrainConfig()
    assert (config.train.tokens_per_step, config.train.betas, config.train.clip) == (131072, (0.9, 0.95), 1.0)
    assert (config.objective.loss, config.data.on_error, config.device, config.seed) == (
        "forward_kl",
        "raise",
        "auto",
        0,
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("2e-5", 2e-5), ("1e-4", 1e-4), ("1E-3", 1e-3), ("1", 1.0), ("0o17", 15.0), ("017", 17.0), (".5", 0.5)],
)
def test_numbers_are_yaml_1_2(text: str, value: float) -> None:
    rate = load(f"train.learning_rate={text}").train.learning_rate
    assert isinstance(rate, float)
    assert rate == value


@pytest.mark.parametrize("text", ["on", "no", "yes", "off", "y", "2026-11-21", "12:30", "=", "runs/a b", "café"])
def test_words_that_yaml_1_1_reads_otherwise_are_text(tmp_path: Path, text: str) -> None:
    assert load(f"out={text}").out == text
    path = written(tmp_path, f"out: {text}\n")
    assert load_config(path, LEAST[:2]).out == text


@pytest.mark.parametrize("text", ["null", "~", ""])
def test_null_turns_off_what_can_be_turned_off(text: str) -> None:
    assert load(f"train.clip={text}").train.clip is None
    assert failure(f"train.learning_rate={text}").key == "train.learning_rate"


def test_later_layers_win(tmp_path: Path) -> None:
    path = written(tmp_path, "seed: 2\nout: file\ntrain: {eps: 0.2, weight_decay: 0.2}\n")
    config = load_config(
        path,
        [*LEAST[:2], "train.weight_decay=0.4", "train.weight_decay=0.5"],
        defaults={"seed": 1, "device": "cpu", "train": {"clip": 0.1}},
        settings={"out": "settings", "train": {"weight_decay": 0.3}},
    )
    assert (config.device, config.seed, config.out) == ("cpu", 2, "settings")
    assert (config.train.clip, config.train.eps, config.train.weight_decay) == (0.1, 0.2, 0.5)


def test_an_override_can_be_a_whole_section() -> None:
    config = load("teacher={model: t, dtype: float16}", "teacher.revision=main")
    assert config.teacher is not None
    assert (config.teacher.model, config.teacher.dtype, config.teacher.revision) == ("t", "float16", "main")


def test_empty_sections_have_their_defaults_and_a_null_teacher_is_none(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "train:\nteacher:\nobjective: {}\n"), LEAST)
    assert config == load()
    assert load_config(written(tmp_path, "teacher: {model: t}"), [*LEAST, "teacher=null"]).teacher is None


def test_an_empty_file_is_a_file_without_keys(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing yet\n"), LEAST) == load()


def test_an_adapter_is_a_section_of_the_student_or_null() -> None:
    assert load().student.adapter is None
    adapter = load("student.adapter={type: lora, r: 8, alpha: 16, targets: [q_proj]}", "student.adapter.r=4").student
    assert adapter.adapter == AdapterConfig(r=4, alpha=16, targets=["q_proj"])
    assert load("student.adapter.dropout=0.1").student.adapter == AdapterConfig(dropout=0.1)
    assert load("student.adapter={r: 8}", "student.adapter=null").student.adapter is None


def test_steps_take_the_place_of_epochs() -> None:
    assert (load("train.steps=5").train.epochs, TrainConfig(steps=5).epochs) == (None, None)
    assert failure("train.steps=5", "train.epochs=2").key == "train.steps"
    assert failure("train.epochs=null").key == "train.epochs"


def test_steps_of_a_later_layer_replace_epochs_of_an_earlier_one(tmp_path: Path) -> None:
    epochs, steps = "train: {epochs: 3}", "train: {steps: 30}"
    train = load_config(written(tmp_path, epochs), [*LEAST, "train.steps=5"]).train
    assert (train.epochs, train.steps) == (None, 5)
    train = load_config(written(tmp_path, steps), [*LEAST, "train.epochs=2"]).train
    assert (train.epochs, train.steps) == (2.0, None)
    with pytest.raises(ConfigError, match=r"train\.steps"):
        load_config(written(tmp_path, "train: {epochs: 3, steps: 30}"), LEAST)


def test_home_is_expanded_and_hub_ids_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load("out=~/runs/a", "student.model=org/name~1", "data.eval=~/eval.jsonl")
    assert (config.out, config.data.eval) == ("/home/somebody/runs/a", "/home/somebody/eval.jsonl")
    assert config.student.model == "org/name~1"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.learning_rat", "did you mean train.learning_rate?"),
        ("learning_rate", "did you mean train.learning_rate?"),
        ("data.learning_rate", "did you mean train.learning_rate?"),
        ("trian.micro_batch_tokens", "did you mean train.micro_batch_tokens?"),
        ("train_learning_rate", "did you mean train.learning_rate?"),
        ("every", "did you mean eval.every or checkpoint.every?"),
        ("max_token", "did you mean data.max_tokens?"),
        ("model", "did you mean student.model or teacher.model?"),
        ("objective.qqq", "objective has: loss, temperature"),
        ("zzz", "there are: student, teacher, data"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(key: str, hint: str) -> None:
    error = failure(f"{key}=1")
    assert error.key == key
    assert hint in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {learning_rat: 1}", "train.learning_rat: unknown key; did you mean train.learning_rate?"),
        ("learning_rate: 1", "learning_rate: unknown key; did you mean train.learning_rate?"),
        ("trian: {learning_rate: 1}", "trian: unknown key; did you mean data.train or train?"),
        ("objective: {qqq: 1}", "objective.qqq: unknown key; objective has: loss, temperature"),
        ("1: 2", "1: unknown key; there are: student, teacher"),
        ("data: {1: 2}", "data.1: unknown key; data has: train, eval"),
    ],
)
def test_an_unknown_key_of_a_file_names_the_nearest_right_one(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), LEAST)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=fast", "train.learning_rate: got 'fast' (text); expected: number > 0"),
        ("train.learning_rate='2e-5'", "train.learning_rate: got '2e-5' (text); expected: number > 0"),
        ("train.learning_rate=true", "train.learning_rate: got true; expected: number > 0"),
        ("train.learning_rate=0", "train.learning_rate: got 0; expected: number > 0"),
        ("train.learning_rate=.nan", "train.learning_rate: got nan; expected: number > 0"),
        ("train.tokens_per_step=1e5", "train.tokens_per_step: got 100000.0; expected: whole number >= 1"),
        ("seed=true", "seed: got true; expected: whole number >= 0 and < 4294967296"),
        ("seed=-1", "seed: got -1; expected: whole number >= 0 and < 4294967296"),
        ("out=7", "out: got 7; expected: text"),
        ("data.eval=1", "data.eval: got 1; expected: text or number >= 0 and < 1"),
        ("data.eval=[a]", "data.eval: got ['a']; expected: text or number >= 0 and < 1"),
        ("train.schedule=cosin", "train.schedule: got 'cosin' (text); expected: constant, linear, cosine or wsd"),
        ("train.betas=[0.9]", "train.betas: got [0.9]; expected: list of 2 (number >= 0 and < 1)"),
        ("train.betas=[0.9, '0.95']", "train.betas: got [0.9, '0.95']; expected: list of 2 (number >= 0 and < 1)"),
        ("student.trust_remote_code=yes", "student.trust_remote_code: got 'yes' (text); expected: true or false"),
        ("track=tensorboard", "track: got 'tensorboard' (text); expected: list of tensorboard"),
        ("checkpoint.best=loss", "expected: eval/cross_entropy, eval/forward_kl, eval/agreement or null"),
        ("device=gpu", "device: got 'gpu' (text); expected: text such as auto, cpu, cuda, cuda:1"),
        ("train.warmup=1.5", "train.warmup: got 1.5, expected a share below 1 or a whole number of steps"),
        ("eval=0.1", "eval: got 0.1; expected: a section with the keys every, micro_batch_tokens"),
        ("student.adapter.r=0", "student.adapter.r: got 0; expected: whole number >= 1"),
        ("student.adapter.type=lra", "student.adapter.type: got 'lra' (text); expected: lora"),
        ("student.adapter.targets=[]", "student.adapter.targets: got []; expected: all-linear or list of text"),
        (
            "student.adapter.targets=q_proj",
            "student.adapter.targets: got 'q_proj' (text); expected: all-linear or list",
        ),
        ("seed.x=1", "seed.x: seed is a value without keys of its own: write seed=..."),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_expectation(override: str, message: str) -> None:
    error = failure(override)
    assert message in str(error)
    assert error.key == override.partition("=")[0]
    assert "\n" not in str(error)


def test_a_section_that_a_file_gives_as_a_value_is_not_overridden(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train: got 5; expected: a section"):
        load_config(written(tmp_path, "train: 5"), [*LEAST, "train.steps=3"])


def test_every_fault_has_its_line() -> None:
    error = failure("train.clip=a", "device=gpu", "parallel.tensor=0")
    assert [part.key for part in error.parts] == ["train.clip", "parallel.tensor", "device"]
    assert error.key == "train.clip"
    assert len(str(error).splitlines()) == 3


def test_missing_keys_say_what_to_give() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["teacher.dtype=float32"])
    parts = caught.value.parts
    assert [part.key for part in parts] == ["student.model", "teacher.model", "data.train", "out"]
    assert all(isinstance(part, MissingKeyError) for part in parts)
    assert "out: required, but not given; expected: text, such as runs/qwen3" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.max_tokens=4096", "train.micro_batch_tokens=2048"], "train.micro_batch_tokens"),
        (["data.max_tokens=4096", "train.tokens_per_step=2048"], "train.tokens_per_step"),
        (["data.max_tokens=4096", "eval.micro_batch_tokens=2048"], "eval.micro_batch_tokens"),
    ],
)
def test_a_packed_sequence_must_fit(overrides: list[str], key: str) -> None:
    error = failure(*overrides)
    assert error.key == key
    assert "2048" in str(error)
    assert "data.max_tokens=4096" in str(error)


def test_weights_are_gathered_in_what_is_computed_in() -> None:
    error = failure("parallel.gather_dtype=bfloat16", "train.precision=fp32")
    assert error.key == "parallel.gather_dtype"
    assert "expected null, or train.precision=bf16" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\nout: a\nseed: 2\n",
            ':3: not valid YAML: while constructing a mapping, found duplicate key "seed"',
        ),
        ("out: a\ntrain: {steps: 1\nseed: 1\n", ":3: not valid YAML: while parsing a flow mapping"),
        ("out: a\nseed: b: c\n", ":2: not valid YAML: mapping values are not allowed here"),
        ("out: a\n\tseed: 1\n", ":2: not valid YAML"),
        ("out: a\nseed: \x07\n", ":2: not valid YAML: unacceptable character"),
        ("out: !!python/object:os.system x\n", ":1: not valid YAML: could not determine a constructor"),
        ("- a\n", ": got a list, expected sections"),
        ("just words\n", ": got a str, expected sections"),
    ],
)
def test_broken_yaml_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, LEAST)
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read the configuration: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("out: café".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8 text"):
        load_config(tmp_path / "latin.yaml")


def test_a_broken_override_is_named() -> None:
    assert "override 'train.betas=[0.9': not valid YAML" in str(failure("train.betas=[0.9"))
    assert "override 'train.steps': expected key=value" in str(failure("train.steps"))


def test_sections_are_frozen_and_strict_in_python_too() -> None:
    config = load()
    with pytest.raises(ValidationError):
        config.seed = 3
    with pytest.raises(ValidationError):
        TrainConfig(learning_rate="2e-5")  # type: ignore[arg-type]


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
    dumped = YAML(typ="safe", pure=True).load(
        dump_config(load("teacher={model: t, parallel: {}}", "student.adapter={}"))
    )

    def keys(section: dict[str, Any], prefix: str = "") -> list[str]:
        named = [(f"{prefix}{name}", part) for name, part in section.items()]
        return [key for name, part in named for key in (keys(part, f"{name}.") if isinstance(part, dict) else [name])]

    assert keys(dumped) == list(value_fields(RunConfig))


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
    assert all(f"| `{key}` |" in text for key in value_fields(RunConfig))
    assert all(f"## `{name}`" in text for name, field in RunConfig.model_fields.items() if section_of(field))


def test_the_schema_agrees_with_the_classes() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    example = YAML(typ="safe", pure=True).load(EXAMPLE)
    validator.validate(example)
    validator.validate({"train": {"steps": 3}})
    for broken in ({"sed": 1}, {"train": {"learning_rate": 0}}, {"train": {"betas": [1]}}, {"device": "gpu"}):
        assert not validator.is_valid(broken), broken


def test_the_configuration_is_free_of_torch() -> None:
    code = (
        "import sys, stillhouse.config.document; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []
