"""Joining caches: every document once, with the rows it had; another teacher, signal or set of rows is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.cache_damage import resealed
from kit.runs import run, write_records, write_run, write_texts
from torch import Tensor

from stillhouse.config import RunConfig
from stillhouse.signals import SignalCache
from stillhouse.tools.merge_caches import merge_caches
from stillhouse.tools.write_cache import write_cache

FORWARD_KL = {"objective.loss": "forward_kl"}
SHARD_BYTES = 5000
KINDS: dict[str, dict[str, Any]] = {
    "hidden": {"kind": "hidden"},
    "sampled": {"kind": "sampled", "top_k": 50, "packed": True},
    "top_k": {"kind": "top_k", "top_k": 7, "packed": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of the same held-out data, and of training data of which eight records are in both."""
    folder = tmp_path_factory.mktemp("merge")
    lines = (write_texts(folder / "all.jsonl", 60, seed=3)).read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(lines[:30]))
    (folder / "b.jsonl").write_text("".join(lines[22:]))
    for kind, options in KINDS.items():
        for part in ("a", "b"):
            write_cache(config_of(folder, part), folder / f"{kind} {part}", **options, shard_bytes=SHARD_BYTES)
    return folder


def config_of(folder: Path, part: str, **settings: Any) -> RunConfig:
    return write_run(folder, **FORWARD_KL, **{"data.train": str(folder / f"{part}.jsonl"), **settings})


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_cache_has_every_row_of_both(folder: Path, tmp_path: Path, kind: str) -> None:
    sources = [folder / f"{kind} a", folder / f"{kind} b"]
    merge_caches(sources, tmp_path / "c", shard_bytes=SHARD_BYTES)
    merged, first, second = (SignalCache(path) for path in (tmp_path / "c", *sources))
    merged.verify()
    expected = {**second.documents(), **first.documents()}
    assert merged.documents() == expected
    assert list(merged.documents())[: len(first.documents())] == list(first.documents())
    assert len(expected) == 60 + 8
    assert len(first.documents()) + len(second.documents()) == len(expected) + 8 + 8  # records, and held-out ones
    for document, rows in expected.items():
        owner = first if document in first.documents() else second
        tensors = merged.read_document(document, rows)
        assert all(torch.equal(tensors[name], value) for name, value in owner.read_document(document, rows).items())
    assert merged.manifest.shards > 3


def test_caches_of_another_teacher_signal_or_form_are_refused(folder: Path, tmp_path: Path) -> None:
    other = config_of(folder, "b", **{"teacher.model": str(folder / "student")})
    write_cache(other, tmp_path / "teacher", "hidden")
    write_cache(config_of(folder, "b"), tmp_path / "plain", "top_k", top_k=7)
    for sources, message in (
        (["hidden a", tmp_path / "teacher"], "cannot be merged with .*teacher_hash is .* there and .* here"),
        (["hidden a", "top_k b"], "cannot be merged with .*signal is hidden states in float32 there"),
        (["top_k a", tmp_path / "plain"], "packed is True there and False here"),
        (["hidden a"], "got 1 cache: expected two or more"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_caches([folder / name for name in sources], tmp_path / "x")
        assert not (tmp_path / "x").exists()


def test_a_document_with_other_rows_or_numbers_is_refused(folder: Path, tmp_path: Path) -> None:
    def noise(tensors: dict[str, Tensor]) -> None:
        tensors["hidden"].mul_(1.1)

    write_cache(config_of(folder, "b"), tmp_path / "b", "hidden")
    resealed(tmp_path / "b", noise)
    with pytest.raises(ValueError, match=r"document [0-9a-f]{32} is in .* and in .* with other signals"):
        merge_caches([folder / "hidden a", tmp_path / "b"], tmp_path / "x")

    write_records(folder / "chat.jsonl", [{"prompt": "one two", "completion": f" {word}"} for word in ("a", "b")])
    for tokens in ("all", "completion"):
        write_cache(config_of(folder, "chat", **{"objective.tokens": tokens}), tmp_path / tokens, "hidden")
    with pytest.raises(ValueError, match=r"with other rows, 0 to \d+ and \d+ to \d+: .*same objective.tokens"):
        merge_caches([tmp_path / "all", tmp_path / "completion"], tmp_path / "x")


def test_the_command(folder: Path, tmp_path: Path) -> None:
    write_cache(config_of(folder, "all"), tmp_path / "all", **KINDS["sampled"])
    sources = [folder / "sampled a", folder / "sampled b", tmp_path / "all"]
    shown = run("cache", "merge", *sources, "--out", tmp_path / "c").out
    assert "50 draws at temperature 1, packed of" in shown
    assert "for 68 documents" in shown
    assert run("cache", "verify", tmp_path / "c").out == shown
    assert "cannot be merged" in run("cache", "merge", folder / "sampled a", folder / "top_k b", "--out",
                                     tmp_path / "d", code=1).err  # fmt: skip
