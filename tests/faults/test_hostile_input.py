"""Configurations and models from strangers are loaded, or refused in a few lines; none of their code runs."""

import ast
import contextlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.mutations import readable
from kit.runs import ROOT, run, save_model, write_run
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.config import ConfigError, load_config
from stillhouse.data import load_tokenizer
from stillhouse.display import LINES
from stillhouse.models import Decoder
from stillhouse.models.pretrained import require_safe_files
from stillhouse.parallel.sharded_loading import empty_decoder, load_weights

MARKER = "foreign-code-was-here"


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


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


@pytest.mark.slow
def test_code_that_comes_with_a_model_is_not_run_whatever_is_answered(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "foreign", known=False)
    write_run(tmp_path, teacher=False)
    ended = subprocess.run(
        [sys.executable, "-m", "stillhouse", "check", str(tmp_path / "run.yaml"), f"student.model={folder}"],
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
    for load in (Decoder.from_pretrained, empty_decoder, lambda path: load_tokenizer(str(path))):
        with contextlib.suppress(ValueError):  # a known type is loaded with transformers' own class
            load(folder)
    assert not (folder / MARKER).exists()


def test_every_call_that_could_run_foreign_code_passes_trust_remote_code() -> None:
    """Each call must pass trust_remote_code, because transformers' default may change."""
    silent = []
    files = [*(ROOT / "stillhouse").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr in ("from_pretrained", "from_config") and owner.startswith("Auto"):
                keywords = {keyword.arg for keyword in node.keywords}
                silent += [] if keywords & {"trust_remote_code", None} else [f"{path}:{node.lineno}"]
    assert len(files) > 50
    assert not silent


class HarmfulPickle:
    """An object that creates the marker file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("harmful", [True, False])
@pytest.mark.parametrize("named_by", ["its name", "index", "configuration", "adapter"])
def test_no_pickle_is_read(tmp_path: Path, named_by: str, harmful: bool) -> None:
    folder = save_model(tmp_path / "model")
    content = HarmfulPickle(tmp_path / MARKER) if harmful else Decoder.from_pretrained(folder).pretrained.state_dict()
    if harmful:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / "pytorch_model.bin")
    if named_by in ("its name", "index"):
        (folder / "model.safetensors").unlink()
    if named_by == "index":
        index = {"weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}, "metadata": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif named_by == "configuration":
        edit(folder / "config.json", transformers_weights="pytorch_model.bin")
    elif named_by == "adapter":
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
        (folder / "pytorch_model.bin").rename(folder / "adapter_model.bin")
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
    for load in (Decoder.from_pretrained, lambda path: load_weights(empty_decoder(path), path, torch.device("cpu"))):
        with pytest.raises(ValueError, match=f"{folder}") as error:
            load(folder)
        readable(error)


def test_a_number_of_layers_in_a_part_of_a_configuration(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    edit(folder / "config.json", text_config={"num_hidden_layers": 10**9})
    with pytest.raises(ValueError, match=r"has text_config\.num_hidden_layers 1000000000: expected at most"):
        require_safe_files(folder)
    edit(folder / "config.json", text_config={"vocab_size_per_layer_input": 262_144})  # as in Gemma 3n and 4
    require_safe_files(folder)


TOKENIZERS: list[tuple[str, dict[str, Any]]] = [
    *(("tokenizer.json", {"model": model}) for model in (5, {"type": "BPE"})),
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
    """The id is refused before the tokenizer is serialised, which would take half a minute or longer."""
    toy_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    model = json.loads(path.read_text())["model"]
    edit(path, model=model | {"vocab": model["vocab"] | {"unheard of": 2**31}})
    started = time.process_time()
    with pytest.raises(ValueError, match="token 'unheard of' of 401 has the id 2,147,483,648, expected at most"):
        load_tokenizer(str(tmp_path))
    assert time.process_time() - started < 10


def test_a_chat_template_that_cannot_be_saved_is_found_at_the_start(tmp_path: Path) -> None:
    write_run(tmp_path, teacher=False)
    edit(tmp_path / "student" / "tokenizer_config.json", chat_template="{{ '\ud800' }}")
    failed = run("distill", tmp_path / "run.yaml", code=2)
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
    assert failed.err.count("\n") <= LINES
    assert re.search(r"and \d+ more mistakes", failed.err)
    assert "\x1b" not in failed.err
