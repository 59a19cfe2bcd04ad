"""GGUF files as models: the plain folder has exactly their values, and what cannot be proven is refused by name."""

import io
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.config_cases import assert_refused, refused_calls
from kit.gguf_files import TEMPLATE, gguf_log_probs, small_model, write_gguf
from kit.runs import losses, run, write_records, write_run
from kit.shard_ranks import Rank, on_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse import display
from stillhouse.config.model_folder import gguf_file, require_model
from stillhouse.fetch import fetch
from stillhouse.gguf import plain_folder as conversion
from stillhouse.gguf.plain_folder import plain_folder
from stillhouse.hashing import folder_hashes
from stillhouse.run.run import distill
from stillhouse.serving.server.role import ModelOptions
from stillhouse.serving.server.served_teacher import ServedTeacher

IDS = [1, 40, 87, 251, 7, 9, 120, 299, 33, 33, 64, 5]
#: rounding of float32 in the forward; with a wrong norm, permutation or window, the difference is above 0.05
CLOSE = 2e-4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STILLHOUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def log_probs(folder: str) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float32
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].log_softmax(-1).numpy()


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False), ("gemma3", True)]
)
def test_a_gguf_becomes_a_folder_with_equal_weights(architecture: str, tied: bool, tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "small.gguf", architecture, small_model(architecture, tied=tied))
    folder = plain_folder(tmp_path / "small.gguf")
    read = AutoModelForCausalLM.from_pretrained(folder)
    expected, weights = written.state_dict(), read.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert np.abs(log_probs(folder) - gguf_log_probs(tmp_path / "small.gguf", IDS)).max() < CLOSE
    assert plain_folder(folder) == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = (2, 1) if architecture == "gemma3" else (1, 2)
    assert tokenizer("a still")["input_ids"][0] == tokenizer.bos_token_id == ends[0]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.chat_template) == (ends[1], 0, TEMPLATE)
    if architecture == "gemma3":  # transformers loses the runs of spaces
        assert tokenizer.tokenize("a     a") == ["a", "▁▁▁", "▁▁", "a"]
    assert "gguf" not in (Path(folder) / "config.json").read_text()


def bytes_of(path: Path, change: str) -> None:
    """Write a small Llama, and damage its file."""
    write_gguf(path)
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "no magic": b"XXXX" + content[4:]}[change])


@pytest.mark.parametrize(("call", "error"), refused_calls("models in GGUF files"))
def test_what_cannot_be_proven_is_refused(call: str, error: str, tmp_path: Path, cache: Path) -> None:
    names = {"write": write_gguf, "damaged": bytes_of, "small": small_model, "np": np, "path": tmp_path / "m.gguf"}
    eval(call, names)
    assert_refused("plain_folder(path)", error, names | {"plain_folder": plain_folder})
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_values_that_transformers_reads_otherwise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import modeling_gguf_pytorch_utils as library

    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setitem(library.TENSOR_PROCESSORS, "llama", library.TensorProcessor)  # does not undo the interleaving
    with pytest.raises(ValueError, match=r"other values of model.layers.0.self_attn.k_proj.weight|q_proj"):
        plain_folder(tmp_path / "m.gguf")


def test_a_file_that_changes_is_refused_and_is_then_another_model(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, proven = tmp_path / "m.gguf", conversion.gguf_tokenizer
    write_gguf(path)

    def change_then(*arguments: object) -> object:
        with path.open("ab") as file:
            file.write(b"x")
        return proven(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "gguf_tokenizer", change_then)
        with pytest.raises(ValueError, match=r"m\.gguf has changed while it was read"):
            plain_folder(path)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]
    write_gguf(path)
    first = plain_folder(path)
    write_gguf(path, model=small_model("llama", tied=False))
    assert plain_folder(path) != first


def test_a_damaged_folder_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "m.gguf")
    folder = Path(plain_folder(tmp_path / "m.gguf"))
    expected = folder_hashes(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert plain_folder(tmp_path / "m.gguf") == str(folder)
    assert folder_hashes(folder) == expected
    assert "has changed files (model.safetensors): the folder is made again" in capsys.readouterr().err


def converted(rank: Rank, path: str) -> tuple[str, list[str], list[str]]:
    """All ranks convert the same file at once. Returns the folder, the lines, and the folders of the cache."""
    lines = io.StringIO()
    with redirect_stderr(lines):
        folder = plain_folder(path)
    folders = [entry.name for entry in Path(folder).parent.iterdir() if entry.is_dir()]
    return folder, lines.getvalue().splitlines(), folders


def test_all_ranks_at_once_convert_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    first, second = on_ranks(converted, 2, str(tmp_path / "m.gguf"))
    assert first[0] == second[0]
    assert first[2] == second[2] == [Path(first[0]).name]
    assert [line.endswith("once") for line in sorted(first[1] + second[1], key=len)] == [True, False, False]


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "one.gguf")
    assert gguf_file(tmp_path) == str(tmp_path / "one.gguf")
    require_model(str(tmp_path))
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ValueError, match=r"has 2 GGUFs: expected the path of one of one\.gguf, two\.gguf"):
        require_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert gguf_file(tmp_path) is None  # a plain folder
    with pytest.raises(ValueError, match=r"got .*none\.gguf, but there is no such file"):
        require_model(str(tmp_path / "none.gguf"))


def test_a_run_of_ggufs_is_that_of_their_plain_folders(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of two GGUFs has the losses and the identity of a run of their plain folders, and resumes as one."""
    for name, tied in (("student", True), ("teacher", False)):
        write_gguf(tmp_path / f"{name}.gguf", model=small_model("llama", tied=tied))
    models = {f"{name}.model": str(tmp_path / f"{name}.gguf") for name in ("student", "teacher")}
    common: dict[str, Any] = {"train.steps": 2, "data.eval": 0, "checkpoint.every": 1}
    out = distill(write_run(tmp_path, **common, **models, out=str(tmp_path / "a")))
    plain = {key: plain_folder(path) for key, path in models.items()}
    assert str(cache) in plain["student.model"]
    distill(write_run(tmp_path, **common, **plain, out=str(tmp_path / "b")))
    assert losses(out) == losses(tmp_path / "b")
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoints" / "step-00000002")
    monkeypatch.setenv("STILLHOUSE_CACHE", str(tmp_path / "another cache"))  # a run keeps the paths of the GGUFs
    distill(write_run(tmp_path, **common, **models, out=str(tmp_path / "a")))
    assert losses(out) == losses(tmp_path / "b")
    shown = (out / "config.yaml").read_text()
    assert all(path in shown for path in models.values())


def test_commands_take_a_gguf_and_print_only_results_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "SLOW_SECONDS", 0.0)
    model, prompts, texts = (str(tmp_path / name) for name in ("m.gguf", "p.jsonl", "t.jsonl"))
    write_gguf(tmp_path / "m.gguf")
    write_records(tmp_path / "p.jsonl", [{"prompt": "The kettle"}])
    write_records(tmp_path / "t.jsonl", [{"text": "The kettle is still heated."}])
    monkeypatch.setattr(sys, "stdin", io.StringIO("The kettle\n"))
    chat = run("chat", model, "--max-new-tokens", "3")
    assert "loading" in chat.err
    assert "…" not in chat.out
    assert "…" not in run("evaluate", model, "--data", texts).out
    run(
        "generate",
        "--model",
        model,
        "--prompts",
        prompts,
        "--out",
        str(tmp_path / "a.jsonl"),
        "--keep-cut",
        "--max-new-tokens",
        "3",
    )


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"got smollm2, a GGUF"):
        fetch("smollm2")
    for read in (require_model, plain_folder):
        with pytest.raises(
            ValueError, match=r"m\.gguf, a GGUF: reading it needs packages; pip install 'stillhouse\[gguf\]'"
        ):
            read(str(tmp_path / "m.gguf"))


def test_a_server_serves_a_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    for folder in (tmp_path / "m.gguf", Path(plain_folder(tmp_path / "m.gguf"))):
        options = ModelOptions(str(folder), "auto", "cpu", None, None, None, False)
        teacher = ServedTeacher(options, tmp_path / f"{folder.name}.served", 64, 1024, 8)
        assert teacher.info["model"] == str(folder)
    assert folder_hashes(tmp_path / "m.gguf.served") == folder_hashes(tmp_path / f"{folder.name}.served")
