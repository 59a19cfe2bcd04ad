"""The columns of ShareGPT and Alpaca, and those that data.columns names, give the documents of our own columns, and
what is ambiguous is refused.
"""

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from kit.config_cases import refused_calls
from kit.documents import load_records, same_documents
from kit.template_messages import chat_templates
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.data import DataError, LoadOptions, load_documents

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


#: records of a file with its own names, and the names by those that Stillhouse reads
QUESTIONS = [{"question": f"{number} and two?", "answer": "four", "level": "easy"} for number in range(5)]
NAMES = {"prompt": "question", "completion": "answer"}
OURS = [{"prompt": record["question"], "completion": record["answer"]} for record in QUESTIONS]


def written_table(folder: Path, form: str, records: list[dict[str, Any]]) -> Path:
    """Write records in a format of files, or save them as `datasets` does, and return the source."""
    if form == "saved":
        datasets.Dataset.from_list(records).save_to_disk(folder / "saved")
        return folder / "saved"
    (folder / form).mkdir()
    path = folder / form / f"part.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif form in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]), delimiter="," if form == "csv" else "\t")
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_text("\n".join(map(json.dumps, records)))
    return path.parent


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "parquet", "saved"])
def test_renamed_columns_give_the_documents_of_our_own_names(tmp_path: Path, form: str) -> None:
    ours = load_records(tmp_path, OURS)
    source = written_table(tmp_path, form, QUESTIONS)
    options = LoadOptions(max_tokens=64, column_names=NAMES, columns=["level", "answer"], keep_records=True)
    documents = load_documents(source, toy_tokenizer(), options)
    assert np.array_equal(documents.tokens_N, ours.tokens_N)
    assert np.array_equal(documents.targets_N, ours.targets_N)
    assert np.array_equal(documents.keys_D, ours.keys_D)  # the same records are held out
    assert documents.records == QUESTIONS  # rewards read the names of the file
    assert documents.columns["answer"] == ["four"] * 5


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_renamed_conversations_lose_the_nulls_that_arrow_adds(tmp_path: Path, form: str) -> None:
    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("a", "b")]
    turns = [MESSAGES[1], {"role": "assistant", "content": "", "tool_calls": calls}]
    tools = [{"name": "a", "parameters": {"x": "int"}}, {"name": "b", "strict": True}]
    source = written_table(tmp_path, form, [{"dialog": turns, "functions": tools}])
    template = chat_templates()["qwen3"]
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    names = {"messages": "dialog", "tools": "functions"}
    documents = load_documents(source, tokenizer, LoadOptions(max_tokens=4000, column_names=names))
    ours = load_records(tmp_path, [{"messages": turns, "tools": tools}], tokenizer, max_tokens=4000)
    assert np.array_equal(documents.tokens_N, ours.tokens_N)


@pytest.mark.parametrize(
    ("fields", "names", "ours"),
    [
        ({"a": "one", "b": "two"}, {"prompt": "a", "completion": "b"}, {"prompt": "one", "completion": "two"}),
        ({"prompt": "two", "completion": "one"}, {"prompt": "completion", "completion": "prompt"}, OURS[0]),
        ({"a.b": "one"}, {"text": "a.b"}, {"text": "one"}),
        ({"text": "one"}, {"text": "text"}, {"text": "one"}),
        ({"prompt": "one", "completion": "two"}, {"text": "completion"}, {"text": "two"}),
        ({"chat": SHAREGPT, "preamble": "Be brief."}, {"conversations": "chat", "system": "preamble"}, MESSAGES),
        ({"q": "Add.", "input": "2 and 2", "a": "four"}, {"instruction": "q", "output": "a"}, ALPACA),
    ],
)
def test_names_can_be_exchanged_and_belong_to_other_forms(
    tmp_path: Path, fields: dict[str, Any], names: dict[str, str], ours: Any
) -> None:
    if ours is OURS[0]:
        ours = {"prompt": "one", "completion": "two"}
    elif ours is MESSAGES:
        ours = {"messages": MESSAGES}
    documents = load_records(tmp_path, [fields], column_names=names, **CHAT)
    assert same_documents(documents, load_records(tmp_path, [ours], **CHAT))


@pytest.mark.parametrize(("call", "message"), refused_calls("renamed columns"))
def test_a_wrong_name_of_a_column_is_refused_with_its_line(tmp_path: Path, call: str, message: str) -> None:
    records, names = eval(call)
    with pytest.raises(ValueError, match=rf"train\.jsonl{message}"):
        load_records(tmp_path, records, column_names=names, **CHAT)


def test_other_names_have_another_token_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"a": "one", "b": "two"}))
    for names in ({"prompt": "a", "completion": "b"}, {"prompt": "b", "completion": "a"}) * 2:
        options = LoadOptions(max_tokens=64, column_names=names)
        documents = load_documents(path, toy_tokenizer(), options, tmp_path / "cache")
        target = toy_tokenizer().decode(documents.tokens_N[documents.targets_N].tolist())
        assert target == ("two</s>" if names["prompt"] == "a" else "one</s>")
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 2
