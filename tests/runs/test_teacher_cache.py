"""Training from a cache of signals: the live teacher's loss and gradients; a cache that is not whole is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.damaged_checkpoints import interrupt_writer
from kit.runs import contents, metrics, refused_changes, run, write_run, write_texts
from kit.teacher_gradients import assert_close, gradients, gradients_of_signals, log_probs_TV

from stillhouse.config import ConfigError
from stillhouse.data import MicroBatch
from stillhouse.loops.session import Session
from stillhouse.objective import TopK
from stillhouse.output.folder import folder_lock
from stillhouse.signals import SignalCache
from stillhouse.signals.cache_files import shard_name
from stillhouse.tools.write_cache import write_cache

SHARD_BYTES = 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def hidden(folder: Path) -> Path:
    write_cache(write_run(folder), folder / "hidden", "hidden", shard_bytes=SHARD_BYTES)
    return folder / "hidden"


@pytest.fixture
def copied(hidden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hidden, tmp_path / "copied"))


def cached(folder: Path) -> dict[str, Any]:
    return {"teacher.cache": str(folder)}


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("change", [{}, {"seed": 5, "data.max_tokens": 40, "train.tokens_per_step": 160}])
def test_hidden_states_give_the_gradients_of_the_live_teacher(
    folder: Path, hidden: Path, temperature: float, change: dict[str, Any]
) -> None:
    settings = {"objective.temperature": temperature, **change}
    assert_close(gradients(folder, **cached(hidden), **settings), gradients(folder, **settings))


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
def test_top_k_gives_the_gradients_of_a_signal_from_the_teachers_logits(folder: Path, tail: str) -> None:
    out = folder / "top_k"
    settings = {"objective.temperature": 2.0, "objective.loss": "0.3*cross_entropy + 0.7*forward_kl"}
    write_cache(write_run(folder, **settings), out, "top_k", top_k=7, shard_bytes=SHARD_BYTES)
    from_cache = gradients(folder, **cached(out), **settings, **{"teacher.tail": tail})

    def top_k(session: Session, micro_batch: MicroBatch) -> TopK:
        log_p_TV = log_probs_TV(session, micro_batch, 2.0)
        best_TK, ids_TK = log_p_TV.topk(7)
        outside_T = log_p_TV.scatter(1, ids_TK, -torch.inf).logsumexp(1)
        return TopK(ids_TK, best_TK.float(), tail, outside_T.float(), 2.0)

    assert_close(from_cache, gradients_of_signals(folder, top_k, **settings))


def test_a_cache_does_not_depend_on_where_it_was_interrupted(
    folder: Path, hidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = interrupt_writer(monkeypatch, 1, 3)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            write_cache(write_run(folder), tmp_path / "x", "hidden", shard_bytes=SHARD_BYTES)
        with pytest.raises(ValueError, match="is an unfinished cache"):
            SignalCache(tmp_path / "x")
    write_cache(write_run(folder), tmp_path / "x", "hidden", shard_bytes=SHARD_BYTES)
    assert contents(tmp_path / "x") == contents(hidden)
    assert len(calls) == len(list((hidden / "shards").glob("*.safetensors"))) + 2


def edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda cache: (cache / name).write_bytes(change((cache / name).read_bytes()))


def flipped(at: int) -> Callable[[bytes], bytes]:
    """A bit of one byte, counted from the end, is another one."""
    return lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


HEAD = "teacher/model.safetensors"


@pytest.mark.parametrize(("damage", "message"), refused_changes("cache"))
def test_a_damaged_cache_is_refused_by_name(folder: Path, copied: Path, damage: str, message: str) -> None:
    eval(damage)(copied)
    with pytest.raises(ValueError, match=message):
        SignalCache(copied).verify()
    if "-1000" in damage or "unlink" in damage:  # found when the first row is read, and when it is opened
        with pytest.raises(ValueError, match=message):
            gradients(folder, **cached(copied))


def test_a_shard_of_another_cache_is_refused(folder: Path, copied: Path, tmp_path: Path) -> None:
    settings = {"teacher.model": str(folder / "student")}
    write_cache(write_run(folder, **settings), tmp_path / "other", "hidden", shard_bytes=SHARD_BYTES)
    shutil.copy(tmp_path / "other" / shard_name(0), copied / shard_name(0))
    with pytest.raises(ValueError, match=r"00000\.safetensors is not shard 0 of this cache"):
        SignalCache(copied)


def test_a_cache_of_other_data_targets_or_temperature_is_refused(folder: Path, hidden: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "more.jsonl", records=41)
    with pytest.raises(
        ConfigError, match=r"teacher.cache: .* lacks 1 of the 41 documents of data.train.*more\.jsonl:41"
    ):
        gradients(folder, **cached(hidden), **{"data.train": str(tmp_path / "more.jsonl")})
    top_k = {"objective.loss": "forward_kl"}
    write_cache(write_run(folder, **top_k), tmp_path / "top_k", "top_k", top_k=3)
    with pytest.raises(
        ConfigError, match=r"objective.temperature: got 2, but .* at temperature 1: expected the same"
    ):
        gradients(folder, **cached(tmp_path / "top_k"), **top_k, **{"objective.temperature": 2.0})


def test_a_folder_with_another_cache_is_not_continued(folder: Path, copied: Path, tmp_path: Path) -> None:
    before = contents(copied)
    with pytest.raises(ValueError, match="has another cache: signal"):
        write_cache(write_run(folder), copied, "top_k", top_k=3)
    assert contents(copied) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(ValueError, match="is not empty and has no cache"):
        write_cache(write_run(folder), tmp_path / "full", "hidden")


def test_two_commands_do_not_write_to_one_folder(folder: Path, copied: Path) -> None:
    message = rf"another process \(process {os.getpid()} on .*\) is writing to"
    with folder_lock(copied), pytest.raises(ValueError, match=message):
        write_cache(write_run(folder), copied, "hidden", shard_bytes=SHARD_BYTES)


def test_nan_of_the_teacher_is_not_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stillhouse.tools import write_cache as module

    load = module.load_model

    def with_nan(*arguments: Any) -> Any:
        teacher = load(*arguments)
        teacher.backbone.norm.register_forward_hook(
            lambda _, __, hidden: hidden.index_fill(1, torch.tensor(3), torch.nan)
        )
        return teacher

    monkeypatch.setattr(module, "load_model", with_nan)
    with pytest.raises(ValueError, match=r"the teacher's 'hidden' is not finite on .*train\.jsonl"):
        write_cache(write_run(folder), tmp_path / "out", "hidden")
    assert not list((tmp_path / "out" / "shards").iterdir())


def test_without_a_configuration_the_teacher_stands_for_the_student(folder: Path, tmp_path: Path) -> None:
    write_run(folder)
    teacher, data, sizes = str(folder / "teacher"), str(folder / "train.jsonl"), ("data.max_tokens=24", "data.eval=0")
    plain = run("cache", "--teacher", teacher, "--data", data, "--out", tmp_path / "plain", *sizes).out
    assert "for 43 documents" in plain  # some texts have more than 24 tokens
    (tmp_path / "run.yaml").write_text(
        f"student: {{model: {folder / 'student'}}}\nteacher: {{model: {teacher}}}\n"
        f"data: {{train: {data}, max_tokens: 24, eval: 0}}\n"
    )
    run("cache", tmp_path / "run.yaml", "--out", tmp_path / "named")
    for name in ("index.json", "shards/00000.safetensors"):
        assert (tmp_path / "named" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    missing = run("cache", "--data", data, "--out", tmp_path / "x", *sizes, code=2).err
    assert "student.model" in missing


def test_the_command_and_a_run_from_it(folder: Path, tmp_path: Path) -> None:
    write_run(folder)
    run("cache", folder / "run.yaml", "--out", tmp_path / "cache")
    assert "hidden states in float32" in run("cache", "verify", tmp_path / "cache").out
    trained = write_run(folder, cached=True, **{"teacher.cache": str(tmp_path / "cache"), "out": str(tmp_path / "a")})
    (tmp_path / "run.yaml").write_text((folder / "run.yaml").read_text())
    run("distill", tmp_path / "run.yaml")
    write_run(folder)
    run("distill", folder / "run.yaml", f"out={tmp_path / 'live'}")
    cached, live = metrics(Path(trained.out)), metrics(tmp_path / "live")
    assert [line["step"] for line in cached] == [line["step"] for line in live]
    for one, other in zip(cached, live, strict=True):
        for key in ("loss/total_nats_per_token", "train/gradient_norm", "eval/forward_kl", "train/agreement"):
            assert (key in one) == (key in other)
            if key in one:
                assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-7), key
    assert json.loads((tmp_path / "a" / "tokens.json").read_text())["documents"]
