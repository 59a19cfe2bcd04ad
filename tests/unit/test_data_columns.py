"""The columns of ShareGPT and Alpaca give the documents of our own columns, and what is ambiguous is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.runs import write_records
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.data import DataError, Documents, load_documents

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "four"},
]
SHAREGPT = [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "four"}]
ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "four"}


def load(folder: Path, fields: dict[str, Any], *, chat: bool = True, **options: Any) -> Documents:
    path = write_records(folder / "a.jsonl", [fields])
    return load_documents(path, toy_tokenizer(chat="plain" if chat else None), max_tokens=400, **options)


def same(one: Documents, other: Documents) -> bool:
    pairs = ((one.tokens_N, other.tokens_N), (one.targets_N, other.targets_N), (one.keys_D, other.keys_D))
    return all(np.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]},
        {"conversations": SHAREGPT, "system": "Be brief."},
    ],
)
def test_sharegpt_is_read_as_messages(tmp_path: Path, fields: dict[str, Any], prompts: bool) -> None:
    found = load(tmp_path, fields, prompts=prompts)
    assert same(found, load(tmp_path, {"messages": MESSAGES}, prompts=prompts))
    assert found.report.summary().endswith("ShareGPT columns read as messages")


@pytest.mark.parametrize("prompts", [False, True])
def test_alpaca_is_a_message_with_a_chat_template(tmp_path: Path, prompts: bool) -> None:
    ours = {
        "prompt": [{"role": "user", "content": "Add.\n\n2 and 2"}],
        "completion": [{"role": "assistant", "content": "four"}],
    }
    found = load(tmp_path, ALPACA, prompts=prompts)
    assert same(found, load(tmp_path, ours, prompts=prompts))
    assert found.report.form.startswith("Alpaca columns read as a user's message")


@pytest.mark.parametrize("given", ["2 and 2", "", None])
def test_alpaca_is_its_own_prompt_without_a_chat_template(tmp_path: Path, given: str | None) -> None:
    documents = load(tmp_path, ALPACA | {"input": given}, chat=False)
    text = toy_tokenizer().decode(documents.tokens_N.tolist(), skip_special_tokens=True)
    assert text.startswith("Below is an instruction that describes a task")
    assert ("### Input:\n2 and 2\n\n" in text) == bool(given)
    assert text.endswith("### Instruction:\nAdd.\n\n### Response:\nfour" if not given else "\n\n### Response:\nfour")
    assert toy_tokenizer().decode(documents.tokens_N[documents.targets_N].tolist()) == "four</s>"


def test_our_own_columns_win(tmp_path: Path) -> None:
    assert same(load(tmp_path, ALPACA | {"text": "the heads"}), load(tmp_path, {"text": "the heads"}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"conversations": SHAREGPT} | ALPACA, "ambiguous columns"),
        ({"conversations": SHAREGPT, "prompt": "a"}, "ambiguous columns"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, r"'from' of turn 1 .*'bot'\): expected one of .*human"),
        ({"conversations": MESSAGES}, r".* must have 'from' and 'value', found .*belong in a column 'messages'"),
        ({"conversations": "a"}, "'conversations' must be a list"),
        (
            {"conversations": [{"from": "tool", "value": "a"}]},
            r"'from' of turn 1 .*'tool'\): expected one of .*human",
        ),
        (
            {"conversations": [{"from": "system", "value": "a"}, *SHAREGPT], "system": "b"},
            "'system' is not empty, and 'conversations' has a system turn, too",
        ),
        (
            {"conversations": [*SHAREGPT, SHAREGPT[0], {"from": "gpt", "value": "a", "weight": 0}]},
            r"'weight' of message 4 of 'messages' is a number \(0\), but every turn of the assistant is a target",
        ),
        (
            {"messages": [*MESSAGES, MESSAGES[-2], {"role": "assistant", "content": "a", "train": False}]},
            r"'train' of message 5 of 'messages' is a boolean \(False\), but every turn",
        ),
        (ALPACA | {"history": [["a", "b"]]}, "'history' is not empty"),
        (ALPACA | {"output": ""}, "'output' is empty"),
        (ALPACA | {"input": 3}, "'input' must be a string"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:1: {reason}"):
        load(tmp_path, fields)


def test_a_turn_that_counts_may_say_so(tmp_path: Path) -> None:
    """And the turns of others, and the turns of a prompt, are no targets whatever they say."""
    weighed = [each | {"weight": int(each["from"] == "gpt")} for each in SHAREGPT]
    assert same(load(tmp_path, {"conversations": weighed}), load(tmp_path, {"conversations": SHAREGPT}))
    prompt = [*MESSAGES[:2], MESSAGES[2] | {"weight": 0}, MESSAGES[1]]
    found = load(tmp_path, {"prompt": prompt, "completion": [MESSAGES[2]]})
    assert toy_tokenizer().decode(found.tokens_N[found.targets_N].tolist()) == "four<|im_end|>"


def test_a_later_record_with_our_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ALPACA) + "\n" + json.dumps(ALPACA | {"text": "b"}))
    with pytest.raises(DataError, match=r"a\.jsonl:2: ambiguous columns"):
        load_documents(path, toy_tokenizer(), max_tokens=400)
    assert load_documents(path, toy_tokenizer(), max_tokens=400, on_error="skip").report.skipped == 1
