"""Arguments of tool calls: as objects and as JSON text, from every format of files, for templates of either form."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, Features, Json, List, Value
from kit.config_cases import refused_calls
from kit.documents import load_records
from kit.template_messages import chat_templates
from kit.toy_tokenizer import toy_tokenizer
from transformers import PreTrainedTokenizerFast

from stillhouse.data import DataError, LoadOptions, load_documents
from stillhouse.data.read.data_source import read_records
from stillhouse.data.read.messages import tools_of

USER = {"role": "user", "content": "Go"}
ARGUMENTS = [{"city": "Oslo", "near": {"x": 1}}, {"n": None, "all": [{"y": None}]}]
TEXT = Value("string")


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    made = toy_tokenizer(adds_bos=False)
    made.chat_template = chat_templates()[name]
    return made


def calls(arguments: Any, form: str = "function", **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    if form == "function_call":
        return {"role": "assistant", "content": "", "function_call": function}
    call = {"type": "function", "function": function} if form == "function" else function
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def rendered(source: Path, made: PreTrainedTokenizerFast) -> list[str]:
    documents = load_documents(source, made, LoadOptions(4096))
    return [made.decode(documents.tokens(number)) for number in range(len(documents))]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "function") for name in ("qwen2_5", "llama3_1", "gptoss", "qwen3", "glm4moe", "deepseekv3")),
        *((name, "bare") for name in ("qwen2_5", "qwen3", "glm4moe")),
    ],
)
def test_json_text_and_an_object_are_the_same_call(tmp_path: Path, name: str, form: str) -> None:
    made, arguments = tokenizer(name), {"city": "Oslo", "n": None}
    if name == "llama3_1":
        made.chat_template = LLAMA
    records = [{"messages": [USER, calls(given, form)]} for given in (arguments, json.dumps(arguments))]
    records += [{"prompt": [USER], "completion": record["messages"][1:]} for record in records]
    (text,) = {*(load_text(tmp_path, record, made) for record in records)}
    assert "Oslo" in text
    assert '\\"' not in text
    assert name not in ("qwen2_5", "deepseekv3") or json.dumps(arguments) in text


#: as Llama 3.1's template with tools
LLAMA = (
    "{% for message in messages %}{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}</s>' }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
#: writes an object as Python does
PYTHON = (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments }}</s>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "deepseekv3_training", "glm4moe", "lfm2_2_5", "nemotron_3_nano_training"]
)
def test_a_call_without_arguments_is_one_with_an_empty_object(tmp_path: Path, name: str) -> None:
    """Of null, some templates write "null"; without the key, others raise an error."""
    made, absent = tokenizer(name), calls(None)
    del absent["tool_calls"][0]["function"]["arguments"]
    messages = [absent, *map(calls, ("", None, " ", "null", {}, "{}"))]
    records = [{"prompt": [USER], "completion": [message]} for message in messages]
    documents = load_records(tmp_path, records, made, max_tokens=4096)
    (text,) = {made.decode(documents.tokens(number)) for number in range(len(documents))}
    assert "null" not in text
    assert "{}" in text or name in ("glm4moe", "lfm2_2_5", "nemotron_3_nano_training")


@pytest.mark.parametrize("key", ["parameters", "args", "input"])
def test_arguments_under_another_name_are_not_lost(tmp_path: Path, key: str) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", key: {"city": None}}]}
    with pytest.raises(DataError, match="not write the argument 'city' of 'tool_calls' of message 2"):
        load_records(tmp_path, [{"messages": [USER, call]}], tokenizer("qwen2_5"), max_tokens=4096)


def load_text(folder: Path, record: dict[str, Any], made: PreTrainedTokenizerFast) -> str:
    return made.decode(load_records(folder, [record], made, max_tokens=4096, tokens="all").tokens(0))


def test_a_template_for_strings_keeps_the_users_text(tmp_path: Path) -> None:
    made, text = tokenizer("deepseekv3"), '{"city":"Oslo",  "ü":1.0}'
    assert text in load_text(tmp_path, {"messages": [USER, calls(text)]}, made)
    assert '{"ü": 1.0}' in load_text(tmp_path, {"messages": [USER, calls({"ü": 1.0})]}, made)
    made.chat_template = PYTHON
    assert 'Gof{"ü": 1.0}</s>' in load_text(tmp_path, {"messages": [USER, calls({"ü": 1.0})]}, made)


@pytest.mark.parametrize("form", ["function", "bare", "function_call"])
@pytest.mark.parametrize(("call", "reason"), refused_calls("arguments of calls"))
def test_text_that_is_no_json_object_is_refused(tmp_path: Path, form: str, call: str, reason: str) -> None:
    text = eval(call)
    good, bad = ({"messages": [USER, message]} for message in (calls("{}"), calls(text, form)))
    message = (
        r"train\.jsonl:2: 'arguments' of call 1 of message 2 of 'messages' is a string, but not the JSON of an object"
    )
    with pytest.raises(DataError, match=rf"{message} \(.*{reason}"):
        load_records(tmp_path, [good, bad], tokenizer("qwen2_5"), max_tokens=4096)


RECORDS = [{"messages": [USER, calls(arguments)]} for arguments in ARGUMENTS]
#: the second one's nulls cannot be told from those of Arrow
WITHOUT_NULL = [ARGUMENTS[0], {"all": [{}]}]


def arguments_of(source: Path) -> list[Any]:
    return [record.fields["messages"][1]["tool_calls"][0]["function"]["arguments"] for record in read_records(source)]


@pytest.mark.parametrize("kind", ["parquet", "saved", "jsonl"])
def test_nulls_of_arrow_are_removed_at_every_depth(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    elif kind == "saved":
        Dataset(pyarrow.Table.from_pylist(RECORDS)).save_to_disk(path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    expected = ARGUMENTS if kind == "jsonl" else WITHOUT_NULL
    assert arguments_of(path) == expected
    for text, arguments in zip(rendered(path, tokenizer("qwen2_5")), expected, strict=True):
        assert f'"arguments": {json.dumps(arguments)}' in text


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_json_columns_are_decoded_wherever_they_are(tmp_path: Path, kind: str) -> None:
    """Also those in a list and in an object; their own nulls stay, and so do those of other columns."""
    function = {"name": TEXT, "arguments": Json()}
    call = {"type": TEXT, "function": function}
    messages = List({"role": TEXT, "content": TEXT, "tool_calls": List(call)})
    meta_features = {"value": Json(), "other": TEXT}
    features = Features({"messages": messages, "tools": List(Json()), "meta": meta_features})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    meta = {"value": [None, {"a": None}], "other": None}
    records = [
        {"messages": [USER | {"tool_calls": None}, calls(arguments)], "tools": tools, "meta": meta}
        for arguments in ARGUMENTS
    ]
    dataset, path = Dataset.from_list(records, features=features), tmp_path / kind
    if kind == "saved":
        dataset.save_to_disk(path)
    else:
        dataset.to_parquet(path := path.with_suffix(".parquet"))
    assert arguments_of(path) == ARGUMENTS
    for record in read_records(path):
        assert record.fields["messages"][0] == USER
        assert record.fields["meta"] == meta
        assert tools_of(record.fields) == tools
    assert f'"arguments": {json.dumps(ARGUMENTS[1])}' in rendered(path, tokenizer("qwen2_5"))[1]
