"""The columns of ShareGPT and Alpaca give the documents of our own columns, and what is ambiguous is refused."""

from pathlib import Path
from typing import Any

import pytest
from kit.config_cases import refused_calls
from kit.documents import load_records, same_documents
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.data import DataError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "four"},
]
SHAREGPT = [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "four"}]
SYSTEM = {"from": "system", "value": "Be brief."}
ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "four"}
CHAT: dict[str, Any] = {"chat": "plain", "max_tokens": 400}


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize(
    ("fields", "ours", "words"),
    [
        ({"conversations": [SYSTEM, *SHAREGPT]}, {"messages": MESSAGES}, "ShareGPT columns read as messages"),
        (
            {"conversations": SHAREGPT, "system": "Be brief."},
            {"messages": MESSAGES},
            "ShareGPT columns read as messages",
        ),
        (
            ALPACA,
            {"prompt": [{"role": "user", "content": "Add.\n\n2 and 2"}], "completion": MESSAGES[2:]},
            "Alpaca columns read as a user's message and its answer",
        ),
        (ALPACA | {"messages": MESSAGES}, {"messages": MESSAGES}, ""),  # our own columns win
    ],
)
def test_the_documents_are_those_of_our_own_columns(
    tmp_path: Path, fields: dict[str, Any], ours: dict[str, Any], words: str, prompts: bool
) -> None:
    documents = load_records(tmp_path, [fields], prompts=prompts, **CHAT)
    assert same_documents(documents, load_records(tmp_path, [ours], prompts=prompts, **CHAT))
    assert documents.report.form == words
    assert documents.report.summary().endswith(words)


@pytest.mark.parametrize("input_text", ["2 and 2", "", None])
def test_alpaca_is_its_own_prompt_without_a_chat_template(tmp_path: Path, input_text: str | None) -> None:
    documents = load_records(tmp_path, [ALPACA | {"input": input_text}], max_tokens=400)
    text = toy_tokenizer().decode(documents.tokens_N.tolist(), skip_special_tokens=True)
    assert text.startswith("Below is an instruction that describes a task")
    middle = "### Input:\n2 and 2\n\n" if input_text else ""
    assert text.endswith(f"### Instruction:\nAdd.\n\n{middle}### Response:\nfour")
    assert toy_tokenizer().decode(documents.tokens_N[documents.targets_N].tolist()) == "four</s>"


@pytest.mark.parametrize(("call", "message"), refused_calls("columns of other tools"))
def test_what_cannot_be_read_is_named(tmp_path: Path, call: str, message: str) -> None:
    fields = eval(call)
    with pytest.raises(DataError, match=rf"train\.jsonl:1: {message}"):
        load_records(tmp_path, [fields], **CHAT)


def test_a_turn_that_counts_may_say_so(tmp_path: Path) -> None:
    """And the turns of others, and the turns of a prompt, are no targets whatever they say."""
    weighed = [turn | {"weight": int(turn["from"] == "gpt")} for turn in SHAREGPT]
    one, other = (load_records(tmp_path, [{"conversations": turns}], **CHAT) for turns in (weighed, SHAREGPT))
    assert same_documents(one, other)
    prompt = [MESSAGES[1], MESSAGES[2] | {"weight": 0}, MESSAGES[1]]
    documents = load_records(tmp_path, [{"prompt": prompt, "completion": [MESSAGES[2]]}], **CHAT)
    assert toy_tokenizer().decode(documents.tokens_N[documents.targets_N].tolist()) == "four<|im_end|>"


def test_a_later_record_with_our_columns_is_refused(tmp_path: Path) -> None:
    records = [ALPACA, ALPACA | {"text": "b"}]
    with pytest.raises(DataError, match=r"train\.jsonl:2: ambiguous columns"):
        load_records(tmp_path, records, max_tokens=400)
    assert load_records(tmp_path, records, max_tokens=400, on_error="skip").report.skipped == 1
