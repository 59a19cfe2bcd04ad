"""Names of other tools: every one leads to a key that exists, and the page that lists them is true."""

import re
from pathlib import Path

import pytest
from kit.config_cases import failure, load, yaml_file
from kit.pages import code_blocks
from ruamel.yaml import YAML

from stillhouse.cli import cli
from stillhouse.config import RunConfig, load_config, override_hint
from stillhouse.config.explain_errors import nearest
from stillhouse.config.other_tools import PEERS, peer_entries, peer_hint, peer_table
from stillhouse.config.schema import value_fields
from stillhouse.config.write_docs import with_names

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
KNOWN = {**value_fields(RunConfig), **RunConfig.model_fields}


def test_every_entry_has_names_and_a_key_that_exists_or_a_note() -> None:
    assert all(list(entry.names()) for entry in peer_entries())
    assert all(entry.ours for entry in peer_table().keys)
    assert all(entry.note and not entry.ours for entry in peer_table().without_key)
    assert [key for entry in peer_entries() for key in entry.ours if key not in {*KNOWN, "student.adapter"}] == []


def test_every_command_of_the_table_exists() -> None:
    named = [name for entry in peer_entries() for name in re.findall(r"stillhouse (\w+)", entry.note)]
    assert {"distill", "evaluate", "export"} <= set(named) <= set(cli.commands)


def test_every_value_of_another_tool_leads_to_one_that_is_accepted() -> None:
    for key, values in peer_table().values.items():
        for ours, theirs in values.items():
            load(f"{key}={ours}")
            for value in theirs:
                assert f"did you mean {ours}?" in str(failure(f"{key}={value}"))


@pytest.mark.parametrize("peer", PEERS)
def test_every_name_leads_to_its_key(peer: str) -> None:
    rows = [(name, entry) for entry in peer_entries() for name in getattr(entry, peer)]
    assert len(rows) > 20
    for name, entry in rows:
        last = name.rpartition(".")[2]
        if any(key.rpartition(".")[2] == last for key in KNOWN):
            continue  # the same name, in another section
        hint = peer_hint(name)
        assert hint is not None, name
        assert PEERS[peer] in hint or f" {name.rpartition('.')[2]}" in f" {hint}", name
        assert not entry.ours or any(key in hint for key in entry.ours), name


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--learning-rate", "; an override has no dashes: train.learning_rate=..."),
        ("--learning_rate", "; an override has no dashes: train.learning_rate=..."),
        ("--train.steps", "; an override has no dashes: train.steps=..."),
        ("--lr", "; lr is train.learning_rate here; write key=value, without dashes"),
        ("--micro-batch", "; did you mean the override train.micro_batch_tokens=..."),
        ("--output_dir", "; output_dir of TRL, ms-swift and axolotl is the key out here"),
        ("--foo", ""),
        ("--verbose", ""),
    ],
)
def test_an_option_that_is_a_key(option: str, words: str) -> None:
    hint = override_hint(option, RunConfig)
    assert hint.startswith(words)
    assert bool(hint) == bool(words)


#: our keys, and misspelled ones of which each is the nearest
MISSPELLED = {
    "train.learning_rate": ["train.learing_rate", "train.leaning_rate"],
    "train.micro_batch_tokens": ["train.micro_batch_token"],
    "train.weight_decay": ["train.weigth_decay"],
    "train.epochs": ["trian.epochs"],
    "data.max_tokens": ["data.max_token"],
    "data.on_error": ["data.on_errors"],
    "objective.temperature": ["objective.temprature", "objective.temp"],
    "objective.loss": ["objective.los"],
    "student.model": ["student.modle"],
    "student.adapter.targets": ["student.adapter.target"],
    "teacher.dtype": ["teacher.dtyp"],
    "checkpoint.resume": ["checkpoint.resum"],
    "parallel.pipeline": ["parallel.pipline"],
    "rollout.max_new_tokens": ["rollout.max_new_token"],
    "seed": ["sed"],
    "device": ["devise"],
}


@pytest.mark.parametrize("key", MISSPELLED)
def test_a_misspelled_key_gets_the_right_one(key: str) -> None:
    assert {nearest(misspelled, KNOWN)[0] for misspelled in MISSPELLED[key]} == {key}


@pytest.mark.parametrize(
    "word",
    ["zzz", "verbose", "train.cuda_graphs", "data.streaming", "fp8", "teacher.name", "model_class", "model._target_"],
)
def test_a_foreign_word_gets_no_near_name(word: str) -> None:
    assert nearest(word, KNOWN) == []


def test_the_tables_of_the_page_are_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- names: ") == len(PEERS) == text.count("<!-- end -->")
    assert with_names(text) == text, "run python -m stillhouse.config.write_docs"


def test_our_configurations_of_the_page_load(tmp_path: Path) -> None:
    blocks = code_blocks(PAGE.read_text(encoding="utf-8"), "yaml")
    ours = [block for block in blocks if "student" in (YAML(typ="safe").load(block) or {})]
    assert len(ours) == len(PEERS)
    for text in ours:
        assert load_config(yaml_file(tmp_path, text)).out == "runs/qwen3"
