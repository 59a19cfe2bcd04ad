"""Configurations, data and models from strangers: loaded, or refused in a few lines; none of their code runs."""

import ast
import contextlib
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from runs import ROOT, run, save_model, write_records, write_run
from toy_tokenizer import toy_tokenizer

from stillhouse.config import ConfigError, load_config
from stillhouse.data import DataError, load_documents, load_tokenizer, templates
from stillhouse.models import Decoder
from stillhouse.parallel.loading import empty_decoder, load_weights

MARKER = "foreign-code-was-here"


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def readable(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert text.count("\n") < 12
    assert len(text) < 1500
    assert "\x1b" not in text
    return text


# Code and pickle


def foreign(folder: Path, known: bool) -> Path:
    """Write a model whose folder contains its classes. known: its type is also one of transformers' types."""
    save_model(folder)
    marked = f"open({str(folder / MARKER)!r}, 'a').write('x')\n"
    begin = "from transformers import"
    (folder / "configuration_foreign.py").write_text(
        f"{begin} LlamaConfig\n{marked}class ForeignConfig(LlamaConfig):\n    model_type = 'foreign'\n"
    )
    (folder / "modeling_foreign.py").write_text(
        f"{begin} LlamaForCausalLM\nfrom .configuration_foreign import ForeignConfig\n{marked}"
        "class Foreign(LlamaForCausalLM):\n    config_class = ForeignConfig\n"
    )
    classes = {
        "AutoConfig": "configuration_foreign.ForeignConfig",
        "AutoModelForCausalLM": "modeling_foreign.Foreign",
    }
    edit(folder / "config.json", auto_map=classes, model_type="llama" if known else "foreign")
    return folder


@pytest.mark.parametrize(("processes", "command"), [(1, "check"), (2, "check")])
def test_code_that_comes_with_a_model_is_not_run_whatever_is_answered(
    tmp_path: Path, processes: int, command: str
) -> None:
    folder = foreign(tmp_path / "foreign", known=False)
    write_run(tmp_path, teacher=False)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = launcher if processes > 1 else [sys.executable]
    ended = subprocess.run(
        [*launcher, "-m", "stillhouse", command, str(tmp_path / "run.yaml"), f"student.model={folder}"],
        input="y\n" * 20, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode
    assert "[y/N]" not in ended.stdout + ended.stderr
    assert "error: " in ended.stderr
    assert not (folder / MARKER).exists()


@pytest.mark.parametrize("known", [True, False])
def test_code_that_comes_with_a_model_is_not_run_by_any_way_in(
    tmp_path: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = foreign(tmp_path / "foreign", known)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (Decoder.from_pretrained, empty_decoder, lambda each: load_tokenizer(str(each))):
        with contextlib.suppress(ValueError):  # a known type is loaded with transformers' own class
            load(folder)
    assert not (folder / MARKER).exists()


def test_every_call_that_could_run_foreign_code_says_whether_it_may() -> None:
    """The run must ask, whatever transformers' default is."""
    silent = []
    files = [*(ROOT / "stillhouse").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr in ("from_pretrained", "from_config") and owner.startswith("Auto"):
                given = {each.arg for each in node.keywords}
                silent += [] if given & {"trust_remote_code", None} else [f"{path}:{node.lineno}"]
    assert len(files) > 50
    assert not silent


class Harm:
    """Writes the marker when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.path}",)


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_by_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}, "metadata": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle_by_configuration(folder: Path) -> None:
    edit(folder / "config.json", transformers_weights="pytorch_model.bin")


def pickle_by_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    (folder / "pytorch_model.bin").rename(folder / "adapter_model.bin")


@pytest.mark.parametrize("harmful", [True, False])
@pytest.mark.parametrize("how", [only_pickle, pickle_by_index, pickle_by_configuration, pickle_by_adapter])
def test_no_pickle_is_read(tmp_path: Path, how: Callable[[Path], None], harmful: bool) -> None:
    folder = save_model(tmp_path / "model")
    content = Harm(tmp_path / MARKER) if harmful else Decoder.from_pretrained(folder).pretrained.state_dict()
    if harmful:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / "pytorch_model.bin")
    how(folder)
    for load in (Decoder.from_pretrained, empty_decoder):
        for trust in [{}, {"trust_remote_code": True}] if load == Decoder.from_pretrained else [{}]:
            with pytest.raises(ValueError, match=r"expected (the name of a |a plain model|safetensors)") as error:
                load(folder, **trust)
            assert str(folder) in readable(error)
    assert not (tmp_path / MARKER).exists()


# Model folders


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "../model.safetensors", "/etc/hostname"])
def test_an_index_of_files_that_are_no_safetensors(tmp_path: Path, file: str) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0 not a header")
    names = dict.fromkeys(["model.embed_tokens.weight", "lm_head.weight"], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names, "metadata": {}}))
    with pytest.raises(ValueError, match=f"{folder}") as error:
        Decoder.from_pretrained(folder)
    readable(error)
    with pytest.raises(ValueError, match=f"{folder}"):
        load_weights(empty_decoder(folder), folder, torch.device("cpu"))


CONFIGURATIONS: list[dict[str, Any]] = [
    *({"hidden_size": "a"}, {"num_attention_heads": 0}, {"dtype": "float99"}, {"auto_map": 5}, {"vocab_size": -1}),
    *({"quantization_config": 5}, {"rope_parameters": {"rope_type": "no-such"}}, {"num_hidden_layers": 10**9}),
    *({"hidden_act": "no-such"}, {"num_key_value_heads": 0}, {"model_type": ["llama"]}, {"transformers_weights": 5}),
]


@pytest.mark.parametrize("values", CONFIGURATIONS, ids=str)
def test_a_damaged_configuration(tmp_path: Path, values: dict[str, Any]) -> None:
    folder = save_model(tmp_path / "model")
    edit(folder / "config.json", **values)
    for load in (Decoder.from_pretrained, lambda each: load_weights(empty_decoder(each), each, torch.device("cpu"))):
        with pytest.raises(ValueError, match=f"{folder}") as error:
            load(folder)
        readable(error)


TOKENIZERS: list[tuple[str, dict[str, Any]]] = [
    *(("tokenizer.json", {"model": each}) for each in (5, {"type": "BPE"})),
    ("tokenizer.json", {"added_tokens": 5}),
    ("tokenizer.json", {"pre_tokenizer": {"type": "no-such"}}),
    *(("tokenizer_config.json", {key: 5}) for key in ("tokenizer_class", "eos_token", "added_tokens_decoder")),
    ("tokenizer_config.json", {"model_max_length": "a"}),
    ("tokenizer_config.json", {"chat_template": [{"name": "a"}]}),
]


@pytest.mark.parametrize(("file", "values"), TOKENIZERS, ids=str)
def test_a_damaged_tokenizer(tmp_path: Path, file: str, values: dict[str, Any]) -> None:
    toy_tokenizer().save_pretrained(tmp_path)
    edit(tmp_path / file, **values)
    with pytest.raises(ValueError, match=f"the tokenizer of '{tmp_path}' cannot be (read|used)") as error:
        load_tokenizer(str(tmp_path))
    readable(error)


def test_an_id_that_the_library_would_count_up_to(tmp_path: Path) -> None:
    """With such an id, saving the tokenizer would take minutes."""
    toy_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["unheard of"] = 2**31
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="token 'unheard of' of 401 has the id 2,147,483,648, expected at most"):
        load_tokenizer(str(tmp_path))


def test_a_chat_template_that_cannot_be_saved_is_found_at_the_start(tmp_path: Path) -> None:
    write_run(tmp_path, teacher=False)
    edit(tmp_path / "student" / "tokenizer_config.json", chat_template="{{ '\ud800' }}")
    failed = run("distill", tmp_path / "run.yaml", code=1)
    assert f"the tokenizer of '{tmp_path}/student' cannot be used" in failed.err
    assert not (tmp_path / "out").exists()


# Configurations

VALUES = [
    *("!!bool maybe", "!!int 'x'", "!!float x", "!!binary '%'", "!!set {a}", "!!timestamp [a]", "!!omap [a]"),
    *("9" * 5000, "9" * 4000, "0x" + "f" * 5000, "[" * 2000, "&a [*a]", "!!python/object:os.system {}"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:16])
def test_hostile_yaml(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"seed: {value}\n")
    for arguments in ([path], [None, [f"seed={value}"]]):
        with pytest.raises(ConfigError) as error:
            load_config(*arguments)
        readable(error)


def test_many_mistakes_are_a_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("".join(f'"\\x1b[31m key {number}": 1\n' for number in range(150)))
    failed = run("check", path, code=2)
    assert failed.err.count("\n") < 14
    assert re.search(r"and \d+ more mistakes", failed.err)
    assert "\x1b" not in failed.err


# Data


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
    "syntax": "{% for %}",
    "ValueError": "{{ 'abc'.index('x') }}",
    "undefined": "{{ messages[0].content.nothing.more }}",
}


@pytest.mark.parametrize("template", RAISING.values(), ids=RAISING)
def test_a_chat_template_that_raises(conversations: Path, template: str) -> None:
    with pytest.raises(DataError, match=r"the chat template refuses the messages|the assistant's tokens") as error:
        load_documents(conversations, chat(template), max_tokens=32)
    assert readable(error).startswith(f"{conversations}:1: ")
    with pytest.raises(ValueError, match="nothing to train on; of 2 records 2 were skipped"):
        load_documents(conversations, chat(template), max_tokens=32, on_error="skip")


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "power of the data": "{{ (messages | length) ** (10 ** 11) }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_chat_template_without_an_end(conversations: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "TEMPLATE_SECONDS", 0.5)
    for on_error in ("raise", "skip"):  # the template itself is wrong, so every record fails
        with pytest.raises(DataError, match=r"took more than 0\.5 seconds|MemoryError|GiB of memory") as error:
            load_documents(conversations, chat(template), max_tokens=32, on_error=on_error)
        assert readable(error).startswith(f"{conversations}:1: the chat template")


def test_a_chat_template_of_endless_text(conversations: Path) -> None:
    endless = "{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}"
    with pytest.raises(DataError, match=r"the chat template renders has 9,899,901 characters; expected at most"):
        load_documents(conversations, chat(endless), max_tokens=32)


def test_the_process_of_a_template_ends_with_it(conversations: Path) -> None:
    template = templates.ChatTemplate(toy_tokenizer(chat="plain"), ("messages",), "completion")
    template.render(json.loads(conversations.read_text().splitlines()[0]))
    process = template.render_isolated._process
    assert process is not None
    (pid, *_) = process.end.peek()[2]
    os.kill(pid, 0)
    del process, template
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_empty_saved_dataset(tmp_path: Path) -> None:
    datasets.Dataset.from_list([]).save_to_disk(tmp_path / "none")
    datasets.DatasetDict().save_to_disk(tmp_path / "no-split")
    for name in ("none", "no-split"):
        with pytest.raises(ValueError, match="dataset is empty"):
            load_documents(tmp_path / name, toy_tokenizer(), max_tokens=32)


def test_a_saved_dataset_whose_offsets_point_anywhere(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": f"the heart {number}"} for number in range(50)]).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("*.arrow")
    content = file.read_bytes()
    offsets = (11).to_bytes(4, "little") + (22).to_bytes(4, "little")
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, (11).to_bytes(4, "little") + (2**31 - 1).to_bytes(4, "little")))
    with pytest.raises(ValueError, match="not a readable saved dataset"):
        load_documents(tmp_path, toy_tokenizer(), max_tokens=32)


@pytest.mark.parametrize("digits", [4000, 5000])
def test_long_numbers_and_deep_nesting_in_records(tmp_path: Path, digits: int) -> None:
    path = tmp_path / "x.jsonl"
    nested = "[" * 600 + "]" * 600
    path.write_text(
        f'{{"text": {"9" * digits}}}\n{{"text": "fine"}}\n{{"text": "fine", "x": {nested}}}\n{"[" * 9999}\n'
    )
    documents = load_documents(path, toy_tokenizer(), max_tokens=32, on_error="skip")
    assert len(documents) >= 1
    assert all(len(reason) < 400 for reason in documents.report.reasons)
    with pytest.raises(DataError) as error:
        load_documents(path, toy_tokenizer(), max_tokens=32)
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


# line 17 is longer than a record may be


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
            load_documents(path, tokenizer, max_tokens=32)
        assert readable(error).startswith(f"{path}:2: ")
        assert load_documents(path, tokenizer, max_tokens=32, on_error="skip").report.skipped == 1


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("w") as file:
        file.write('{"text": "fine"}\n{"text": "')
        for _ in range(34):
            file.write("a" * 2**20)
        file.write('"}\n{"text": "fine, too"}\n')
    with pytest.raises(DataError, match=f"{path}:2: longer than 33,554,432 bytes"):
        load_documents(path, toy_tokenizer(), max_tokens=32)
    documents = load_documents(path, toy_tokenizer(), max_tokens=32, on_error="skip")
    assert documents.sources == [f"{path}:1", f"{path}:3"]
