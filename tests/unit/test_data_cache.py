"""Tokenized data on disk: the documents are the same, what decides them is in the key, and damage is refused."""

import importlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from filelock import FileLock
from kit.add_ons import installed, write_distribution
from kit.documents import same_documents, write_fingerprint
from kit.fork_server import fork_server
from kit.runs import ROOT, session_of, write_run
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.checkpoint.resume import configuration_hash
from stillhouse.config.read_config import dotted_values
from stillhouse.data import Documents, LoadOptions, load_documents, make_micro_batch, token_cache
from stillhouse.data.read.data_source import local_files, read_records
from stillhouse.data.token_cache import cached_documents, entry_key, user_folder
from stillhouse.hashing import json_hash


def load(folder: Path, cache: Path | None, **options: Any) -> Documents:
    return load_documents(folder / "a.jsonl", toy_tokenizer(), LoadOptions(**{"max_tokens": 32} | options), cache)


def write(folder: Path, count: int = 40, seed: int = 0) -> None:
    records = [{"text": f"{number} word by word " * (number % 7 + 1), "n": "x" * number} for number in range(count)]
    (folder / "a.jsonl").write_text("".join(json.dumps(record | {"seed": seed}) + "\n" for record in records))


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def same(one: Documents, other: Documents) -> bool:
    return same_documents(one, other) and list(one.sources) == list(other.sources) and one.report == other.report


@pytest.mark.parametrize("options", [{}, {"prefixes": {"t": "{n}"}, "columns": ["n"], "max_tokens": 64}])
def test_cached_documents_are_those_that_were_tokenized(tmp_path: Path, options: dict[str, Any]) -> None:
    write(tmp_path)
    plain, cache = load(tmp_path, None, **options), tmp_path / "cache"
    first = load(tmp_path, cache, **options)
    inodes = {path: path.stat().st_ino for path in entries(cache)[0].iterdir()}
    second = load(tmp_path, cache, **options)
    assert same(plain, first)
    assert same(plain, second)
    assert isinstance(second.tokens_N, np.memmap)
    assert second.columns == plain.columns
    assert {path: path.stat().st_ino for path in entries(cache)[0].iterdir()} == inodes
    assert all(same(one, other) for one, other in zip(plain.split(0.3), second.split(0.3), strict=True))
    rows = [range(len(plain))]
    one, other = (make_micro_batch(documents, rows, list(plain.substitutions)) for documents in (plain, second))
    assert all(torch.equal(value, other.inputs[name]) for name, value in one.inputs.items())
    assert torch.equal(one.labels_T, other.labels_T)


def test_whatever_decides_the_tokens_is_in_the_key(tmp_path: Path) -> None:
    write(tmp_path)
    cache, path = tmp_path / "cache", tmp_path / "a.jsonl"
    load(tmp_path, cache)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    text = path.read_text()
    path.write_text(text.replace("0 word by word", "0 word by work", 1))  # of the same size and time
    os.utime(path, ns=times)
    assert same(load(tmp_path, cache), load(tmp_path, None))
    assert len(entries(cache)) == 2
    path.write_text(text)
    for number, options in enumerate(({"max_tokens": 31}, {"on_error": "skip"}, {"columns": ["n"]}), start=3):
        assert same(load(tmp_path, cache, **options), load(tmp_path, None, **options))
        assert len(entries(cache)) == number
    other = toy_tokenizer(adds_eos=True)
    load_documents(path, other, LoadOptions(max_tokens=32), cache=cache)
    other.chat_template = "{{ messages }}"
    load_documents(path, other, LoadOptions(max_tokens=32), cache=cache)
    assert len(entries(cache)) == 7
    path.write_text(json.dumps({"text": "a <|im_end|> b"}))
    for splits in (False, True):  # an attribute that the text of the backend does not have
        other.split_special_tokens = splits
        plain = load_documents(path, other, LoadOptions(max_tokens=32))
        assert same(load_documents(path, other, LoadOptions(max_tokens=32), cache=cache), plain)
        assert (other.convert_tokens_to_ids("<|im_end|>") in plain.tokens_N) == (not splits)
    path.write_text(text)
    load(tmp_path, cache)
    assert len(entries(cache)) == 9


def test_the_code_that_makes_documents_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that ends documents otherwise makes an entry of its own, without anybody raising a number."""
    shutil.copytree(ROOT / "stillhouse" / "data", tmp_path / "data")
    tokenizer = toy_tokenizer()
    key = entry_key([], tokenizer, {})
    monkeypatch.setattr(token_cache, "__file__", str(tmp_path / "data" / "token_cache.py"))
    assert entry_key([], tokenizer, {}) == key
    templates = tmp_path / "data" / "render" / "templates.py"
    templates.write_text(templates.read_text() + "\n")
    assert entry_key([], tokenizer, {}) != key


def test_the_code_of_registered_readers_and_media_is_in_the_key(tmp_path: Path) -> None:
    tokenizer, keys = toy_tokenizer(), []
    for number, code in enumerate(("class Lines: ...\n", "class Lines: ...  # changed\n")):
        site = tmp_path / str(number)
        write_distribution(site, {"stillhouse.readers": {"lines": "line_reader:Lines"}}, {"line_reader.py": code})
        with installed(site):
            keys.append(entry_key([], tokenizer, {}))
    assert len({*keys, entry_key([], tokenizer, {})}) == 3
    assert {path.parent.name for path in token_cache._code_of("stillhouse.images")} == {"images"}


@pytest.mark.parametrize("name", ["tokens.bin", "targets.bin", "offsets.bin", "sources.arrow", "manifest.json"])
@pytest.mark.parametrize("damage", ["lost", "short", "changed", "empty"])
def test_a_damaged_entry_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path)
    cache = tmp_path / "cache"
    load(tmp_path, cache)
    path = entries(cache)[0] / name
    content = bytearray(path.read_bytes())
    if damage == "lost":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1 if name != "manifest.json" else 0x80
        path.write_bytes({"short": bytes(content[:-8]), "changed": bytes(content), "empty": b""}[damage])
    with pytest.raises(ValueError, match=rf"{path.parent}: the cached tokens are damaged; remove this folder"):
        load(tmp_path, cache)


def test_a_tokenizers_own_code_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trust_remote_code, a class of the same name may do something else on the next day."""
    write(tmp_path)
    code = (
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast):\n"
        "    def __call__(self, texts, **options):\n"
        "        return super().__call__([each.CHANGE() for each in texts], **options)\n"
    )
    backend = toy_tokenizer().backend_tokenizer
    monkeypatch.syspath_prepend(tmp_path)
    for number, change in enumerate(("upper", "lower"), start=1):
        (tmp_path / f"own_{change}.py").write_text(code.replace("CHANGE", change))
        kind = importlib.import_module(f"own_{change}").Own
        tokenizer = kind(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
        documents = load_documents(tmp_path / "a.jsonl", tokenizer, LoadOptions(max_tokens=64), tmp_path / "cache")
        assert same(documents, load_documents(tmp_path / "a.jsonl", tokenizer, LoadOptions(max_tokens=64)))
        assert len(entries(tmp_path / "cache")) == number


@pytest.mark.parametrize("name", ["tokens.bin", "sources.arrow"])
def test_a_file_without_a_hash_is_refused(tmp_path: Path, name: str) -> None:
    """The manifest is complete in itself, as another writer could have made it."""
    write(tmp_path)
    load(tmp_path, tmp_path / "cache")
    path = entries(tmp_path / "cache")[0] / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"][name], manifest["sha256_of_the_above"]
    path.write_text(json.dumps(manifest | {"sha256_of_the_above": json_hash(manifest)}))
    with pytest.raises(ValueError, match=rf"are damaged; .*: {name} has no hash in manifest\.json"):
        load(tmp_path, tmp_path / "cache")


def test_an_entry_of_other_content_is_refused(tmp_path: Path) -> None:
    """The columns are in the manifest itself: one of them may name the teacher of a document."""
    write(tmp_path)
    cache = tmp_path / "cache"
    load(tmp_path, cache, columns=["n"])
    first = entries(cache)[0]
    manifest = first / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"xx"', '"xy"', 1))
    with pytest.raises(ValueError, match=r"are damaged; remove this folder, .* manifest\.json has other bytes"):
        load(tmp_path, cache, columns=["n"])
    load(tmp_path, cache, max_tokens=16)
    (second,) = set(entries(cache)) - {first}
    shutil.rmtree(first)
    shutil.copytree(second, first)
    with pytest.raises(ValueError, match="its manifest belongs to the entry"):
        load(tmp_path, cache, columns=["n"])


def test_only_the_files_that_are_read_decide(tmp_path: Path) -> None:
    """A cache, a run or a link to nothing in the folder of the source changes nothing; another source does."""
    source = tmp_path / "data"
    source.mkdir()
    write(source)

    def of(folder: Path) -> Documents:
        return load_documents(folder, toy_tokenizer(), LoadOptions(max_tokens=32), cache=source / "cache")

    first = of(source)
    (source / "run").mkdir()
    (source / "run" / "metrics.jsonl").write_text("{}\n")
    (source / "notes.txt").write_text("later")
    (source / "link").symlink_to(tmp_path / "nothing")
    assert same(of(source), first)
    assert len(entries(source / "cache")) == 1
    datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "a b"}])).save_to_disk(source / "saved")
    one = of(source / "saved")
    (source / "saved" / "cache.lock").mkdir()
    assert same(of(source / "saved"), one)
    shutil.rmtree(source / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "a c"}])).save_to_disk(source / "saved")
    assert not same(of(source / "saved"), one)
    assert len(entries(source / "cache")) == 3


def test_a_file_that_comes_or_goes_while_the_others_are_read(tmp_path: Path) -> None:
    source, cache = tmp_path / "data", tmp_path / "cache"
    source.mkdir()
    write(source)
    second = source / "b.jsonl"

    def cached(load: Callable[[Path], Documents]) -> Documents:
        return cached_documents(cache, lambda: local_files(source) or [], lambda: "0" * 64, load)

    def read_after(change: Callable[[], object]) -> Documents:
        change()
        return load_documents(source, toy_tokenizer(), LoadOptions(max_tokens=32))

    for change in (lambda: shutil.copy(source / "a.jsonl", second), second.unlink):
        with pytest.raises(ValueError, match="a file changed while it was read: start again"):
            cached(lambda _, change=change: read_after(change))  # type: ignore[misc]
        assert not entries(cache)
    shutil.copy(source / "a.jsonl", second)

    def lost(_: Path) -> Documents:
        next(records := read_records(source))
        second.unlink()
        raise AssertionError(list(records))

    with pytest.raises(FileNotFoundError, match=r"b\.jsonl"):  # the cache is not to blame
        cached(lost)


def test_a_complete_entry_needs_no_lock_and_is_for_everybody(tmp_path: Path) -> None:
    """Another machine may hold the lock, or the folder may be another user's; so the umask decides who reads it."""
    write(tmp_path)
    cache = tmp_path / "cache"
    before = os.umask(0o022)
    try:
        first = load(tmp_path, cache)
    finally:
        os.umask(before)
    assert entries(cache)[0].stat().st_mode & 0o777 == 0o755
    lock = FileLock(next(cache.glob("*.lock")))
    with ThreadPoolExecutor() as pool, lock:  # in this order, so that a failure does not wait for the lock
        assert same(pool.submit(load, tmp_path, cache).result(timeout=20), first)


def test_nothing_is_left_of_data_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(ValueError, match=r"a\.jsonl:41: not valid JSON"):
        load(tmp_path, tmp_path / "cache")
    assert not entries(tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file: tokenized data cannot be cached in this folder"):
        load(tmp_path, tmp_path / "file")


@pytest.mark.slow
def test_processes_that_start_together_write_one_entry(tmp_path: Path) -> None:
    write(tmp_path, 3000)
    results = [tmp_path / f"{number}.txt" for number in range(3)]
    jobs = [(str(tmp_path), str(path)) for path in results]
    processes = [fork_server().Process(target=write_fingerprint, args=job, daemon=True) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert {path.read_text() for path in results} == {load(tmp_path, None).fingerprint()}
    assert len(entries(tmp_path / "cache")) == 1


def test_a_run_is_the_same_with_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = {"data.cache": str(tmp_path / "cache"), "data.eval": 0.2}
    hashes = [session_of(tmp_path, **more).identity.data for more in ({"data.eval": 0.2}, cached, cached)]
    assert hashes[0] == hashes[1] == hashes[2]
    configs = [write_run(tmp_path, **more) for more in ({"data.eval": 0.2}, cached)]
    assert configuration_hash(dotted_values(configs[0])) == configuration_hash(dotted_values(configs[1]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert user_folder() == tmp_path / "user" / "stillhouse" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert user_folder() == Path.home() / ".cache" / "stillhouse" / "data"
