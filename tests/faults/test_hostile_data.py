"""Data and chat templates from strangers are loaded, or refused with an error of a few lines."""

import json
import os
import select
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest
from kit.mutations import readable
from kit.runs import run, write_records, write_run
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.data import DataError, LoadOptions, load_documents
from stillhouse.data.render import chat_template
from stillhouse.data.render.isolated_process import Isolated, LimitError


def chat(template: str) -> Any:
    tokenizer = toy_tokenizer(chat="plain")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    turns = [{"role": "user", "content": "Four?"}, {"role": "assistant", "content": "Four."}]
    return write_records(tmp_path / "chats.jsonl", [{"messages": turns}] * 2)


RAISING = {
    "OverflowError": "{{ 2.0 ** 100000 }}",
    "ZeroDivisionError": "{{ 1 // (messages | length - 2) }}",
    "LookupError": "{{ messages[0].content.encode('no-such') }}",
    "RecursionError": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "MemoryError": "{{ 'a' * (messages | length) * 10**13 }}",
    "ValueError": "{{ 'abc'.index('x') }}",
    "undefined": "{{ messages[0].content.nothing.more }}",
}


@pytest.mark.parametrize("template", RAISING.values(), ids=RAISING)
def test_a_chat_template_that_raises(conversations: Path, template: str) -> None:
    with pytest.raises(DataError, match=r"the chat template refuses the messages|the assistant's tokens") as error:
        load_documents(conversations, chat(template), LoadOptions(max_tokens=32))
    assert readable(error).startswith(f"{conversations}:1: ")
    with pytest.raises(ValueError, match="nothing to train on; of 2 records 2 were skipped"):
        load_documents(conversations, chat(template), LoadOptions(max_tokens=32, on_error="skip"))


def test_a_chat_template_with_a_syntax_error_is_no_error_of_a_record(conversations: Path) -> None:
    tokenizer = chat("{% for m in messages %}\n{{ m.role m.content }}\n{% endfor %}")
    for on_error in ("raise", "skip"):
        with pytest.raises(ValueError, match=r"^the chat template of '.*' has a syntax error in line 2 \('{{ m.rol"):
            load_documents(conversations, tokenizer, LoadOptions(max_tokens=32, on_error=on_error))


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "power of the data": "{{ (messages | length) ** (10 ** 11) }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_chat_template_without_an_end(conversations: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.5)
    for on_error in ("raise", "skip"):  # the template itself is wrong, so every record fails
        with pytest.raises(DataError, match=r"took more than 0\.5 seconds|MemoryError|GiB of memory") as error:
            load_documents(conversations, chat(template), LoadOptions(max_tokens=32, on_error=on_error))
        assert readable(error).startswith(f"{conversations}:1: the chat template")


def test_a_chat_template_of_endless_text(conversations: Path) -> None:
    endless = "{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}"
    with pytest.raises(DataError, match=r"the chat template renders has 9,899,901 characters; expected at most"):
        load_documents(conversations, chat(endless), LoadOptions(max_tokens=32))


def test_a_process_that_is_stopped_is_replaced_or_named() -> None:
    """A stopped process uses no processor time, and reads no request of more bytes than its socket holds."""

    def echoed(request: bytes) -> bytes:
        if request == b"stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return request

    isolated = Isolated(echoed, seconds=0.1, memory_bytes=2**30)
    assert isolated(b"a") == b"a"
    assert isolated._process is not None
    (pid, *_) = isolated._process[1].peek()[2]
    os.kill(pid, signal.SIGSTOP)
    assert isolated(b"b" * 10**6) == b"b" * 10**6
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(LimitError, match=r"did not answer within 0\.6 seconds, twice"):
        isolated(b"stop")
    assert isolated(b"c") == b"c"


def test_the_process_of_a_template_keeps_no_file_open_and_ends_with_it(conversations: Path) -> None:
    """A thread that starts a program at the same time waits until the pipe of this start is closed everywhere."""
    reader, writer = os.pipe()
    template = chat_template.ChatTemplate(toy_tokenizer(chat="plain"), ("messages",), "completion")
    template.render(json.loads(conversations.read_text().splitlines()[0]))
    os.close(writer)
    process = template.isolated._process
    assert process is not None
    assert select.select([reader], [], [], 10)[0] == [reader]
    assert os.read(reader, 1) == b""
    os.close(reader)
    (pid, *_) = process[1].peek()[2]
    os.kill(pid, 0)
    del process, template
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_empty_saved_dataset(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "none")
    datasets.DatasetDict().save_to_disk(tmp_path / "no-split")
    for name in ("none", "no-split"):
        with pytest.raises(ValueError, match="dataset is empty"):
            load_documents(tmp_path / name, toy_tokenizer(), LoadOptions(max_tokens=32))


def test_a_saved_dataset_whose_offsets_point_anywhere(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": f"the heart {number}"} for number in range(50)]).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("*.arrow")
    content = file.read_bytes()
    offsets = (11).to_bytes(4, "little") + (22).to_bytes(4, "little")
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, (11).to_bytes(4, "little") + (2**31 - 1).to_bytes(4, "little")))
    with pytest.raises(ValueError, match="not a readable saved dataset"):
        load_documents(tmp_path, toy_tokenizer(), LoadOptions(max_tokens=32))


@pytest.mark.parametrize("digits", [4000, 5000])
def test_long_numbers_and_deep_nesting_in_records(tmp_path: Path, digits: int) -> None:
    path = tmp_path / "x.jsonl"
    nested = "[" * 600 + "]" * 600
    path.write_text(f'{{"text": {"9" * digits}}}\n{{"text": "a"}}\n{{"text": "fine", "x": {nested}}}\n{"[" * 9999}\n')
    documents = load_documents(path, toy_tokenizer(), LoadOptions(max_tokens=32, on_error="skip"))
    assert len(documents) >= 1
    assert all(len(reason) < 400 for reason in documents.report.reasons)
    with pytest.raises(DataError) as error:
        load_documents(path, toy_tokenizer(), LoadOptions(max_tokens=32))
    assert readable(error).startswith(f"{path}:1: ")


def test_columns_and_texts_are_shown_escaped(tmp_path: Path) -> None:
    write_run(tmp_path, teacher=False)
    tricky = "\x1b[31mred\x1b[0m \u202egnorw \x07"
    path = write_records(tmp_path / "x.jsonl", [{tricky: 1, "other": 2}])
    failed = run("check", tmp_path / "run.yaml", f"data.train={path}", code=1)
    write_records(path, [{"text": f"{number} {tricky}"} for number in range(9)])
    shown = run("check", tmp_path / "run.yaml", f"data.train={path}")
    for text in (failed.err, shown.out):
        assert "\\x1b[31mred" in text
        assert "\\u202e" in text
        assert not {"\x1b", "\u202e", "\x07"} & set(text)


def test_a_record_of_too_many_characters_is_refused_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    turns = [{"role": "user", "content": "a" * 5_000_000}, {"role": "assistant", "content": "b"}]
    for records, tokenizer in (
        ([{"text": "fine"}, {"text": "the heart, " * 400_000}], toy_tokenizer()),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a " * 2_500_000, "completion": "b"}], toy_tokenizer()),
        ([{"messages": [turns[1] | {"role": "user"}, turns[1]]}, {"messages": turns}], toy_tokenizer(chat="plain")),
    ):
        write_records(path, records)
        with pytest.raises(DataError, match=r"characters; expected at most 4,000,000 in one record") as error:
            load_documents(path, tokenizer, LoadOptions(max_tokens=32))
        assert readable(error).startswith(f"{path}:2: ")
        assert load_documents(path, tokenizer, LoadOptions(max_tokens=32, on_error="skip")).report.skipped == 1


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("w") as file:
        file.write('{"text": "fine"}\n{"text": "')
        for _ in range(34):
            file.write("a" * 2**20)
        file.write('"}\n{"text": "fine, too"}\n')
    with pytest.raises(DataError, match=f"{path}:2: a line longer than 33,554,432 bytes"):
        load_documents(path, toy_tokenizer(), LoadOptions(max_tokens=32))
    documents = load_documents(path, toy_tokenizer(), LoadOptions(max_tokens=32, on_error="skip"))
    assert documents.sources == [f"{path}:1", f"{path}:3"]
