"""Rows of a cache that no teacher gives are refused, packed (by version 0.1.0) or not."""

import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from artefacts.write_artefacts import ARTEFACTS
from kit.damaged_checkpoints import resealed
from kit.runs import run, session_of, write_run
from torch import Tensor

from stillhouse.signals import SignalCache
from stillhouse.signals.signal_spec import DocumentRows
from stillhouse.tools.write_cache import write_cache

FORWARD_KL = {"objective.loss": "forward_kl"}
SHARD_BYTES = 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache of each kind, and with packed ones of version 0.1.0."""
    folder = tmp_path_factory.mktemp("rows")
    config = write_run(folder, **FORWARD_KL)
    for kind, options in KINDS.items():
        write_cache(config, folder / kind, **options, shard_bytes=SHARD_BYTES)
    for kind in ("sampled", "top_k"):
        shutil.copytree(ARTEFACTS / "0.1.0" / "caches" / kind, folder / f"packed {kind}")
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"kind": "sampled", "top_k": 50},
    "top_k": {"kind": "top_k", "top_k": 7},
    "top_k float16": {"kind": "top_k", "top_k": 7, "dtype": "float16"},
    "label": {"kind": "top_k", "top_k": 3, "with_label": True},
}


def emptied(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-3].clone()})


def changed(name: str, value: int, at: int = 0) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[name].view(-1).__setitem__(at, value)


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "truncated pairs": ("packed sampled", emptied("pairs"), "'pairs' ends before the last row"),
    "lost numbers": ("packed sampled", emptied("distinct"), "'distinct' ends before the last row"),
    "lost offsets": ("packed sampled", emptied("pair_offsets"), "is damaged"),
    "a larger number": ("packed sampled", changed("distinct", 51), "'distinct' has 51 ids in a row of 50 draws"),
    "another number": (
        "packed sampled",
        changed("distinct", 1),
        "is damaged|do not add up|twice|do not fit|not in the vocabulary",
    ),
    "foreign pairs": (
        "packed sampled",
        lambda tensors: tensors["pairs"].zero_(),
        "an id twice in a row|do not add up",
    ),
    "pairs of ones": ("packed sampled", lambda tensors: tensors["pairs"].fill_(255), "not in the vocabulary"),
    "offsets back": ("packed sampled", changed("pair_offsets", 0, 1), "'pair_offsets' of document 0 does not fit"),
    "counts of fewer draws": ("sampled", changed("counts", 0), "do not fit|do not add up"),
    "one count more": ("sampled", lambda tensors: tensors["counts"][0, :1].add_(1), "add up to 50 draws"),
    "an id beyond": ("sampled", changed("ids", 999), "not in the vocabulary of"),
    "an id beyond of top-k": ("top_k", changed("ids", 999), "not in the vocabulary of"),
    "an id beyond of packed top-k": ("packed top_k", changed("ids", 255), "not in the vocabulary|an id twice"),
    "truncated ids": ("packed top_k", emptied("ids"), "'ids' ends before the last row"),
    "narrower ids": (
        "packed top_k",
        lambda tensors: tensors.update(ids=tensors["ids"][:, :-1].contiguous()),
        "expected .rows, ",
    ),
    "an id twice": ("top_k", lambda tensors: tensors["ids"][0].fill_(3), "an id twice in a row"),
    "a positive number": ("top_k", lambda tensors: tensors["log_probs"][0, 0].fill_(0.5), "a positive number"),
    "another temperature": ("top_k", lambda tensors: tensors["log_probs"].mul_(0.5), "do not add up to 1"),
    "a known label": ("label", lambda tensors: tensors["log_probs"][:, -1].fill_(-0.1), "do not add up to 1"),
    "NaN": ("packed top_k", lambda tensors: tensors["tail_log_prob"].fill_(torch.nan), "has NaN"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_rows_that_no_teacher_gives_are_refused_by_name(folder: Path, tmp_path: Path, damage: str) -> None:
    kind, change, message = DAMAGE[damage]
    copied = Path(shutil.copytree(folder / kind, tmp_path / "copied"))
    resealed(copied, change)
    with pytest.raises(ValueError, match=rf"00000\.safetensors.*({message})"):
        SignalCache(copied).verify()


def test_the_label_of_a_row_is_the_next_token_of_its_document(folder: Path) -> None:
    cache, session = SignalCache(folder / "label"), session_of(folder, **FORWARD_KL)
    documents, present = session.data.train.documents, 0
    for number in range(len(documents)):
        tokens = torch.from_numpy(documents.tokens(number))
        signal = cache.read([DocumentRows(tokens.numpy(), range(len(tokens) - 1))])[0]
        known = (signal["ids"][:, :-1] == tokens[1:, None]).any(1)
        assert torch.equal(signal["ids"][:, -1], tokens[1:].int().masked_fill(known, -1))
        assert torch.equal(signal["log_probs"][:, -1] == -torch.inf, known)
        present += int((~known).sum())
    assert present > 50


def test_the_command_writes_draws_and_says_what_they_are(folder: Path, tmp_path: Path) -> None:
    write_run(folder, **FORWARD_KL)
    shown = run("cache", folder / "run.yaml", "--out", tmp_path / "a", "--signal", "sampled").out
    assert "50 draws at temperature 1 of" in shown
    assert run("cache", "info", tmp_path / "a").out == shown
    with_label = ("--signal", "top_k", "--top-k", "5", "--with-label", "--dtype", "float16")
    shown = run("cache", folder / "run.yaml", "--out", tmp_path / "b", *with_label).out
    assert "top 5 and the actual token's log-probabilities in float16" in shown


@pytest.mark.parametrize("arguments", [("merge", "a", "b", "--out", "c"), ("run.yaml", "--out", "c", "--packed")])
def test_a_command_of_version_0_1_0_is_answered(arguments: tuple[str, ...]) -> None:
    name = next(name for name in arguments if name in ("merge", "--packed"))
    assert f"`cache` has no {name} any more: removed in November 2026" in run("cache", *arguments, code=2).err


def test_a_cache_may_have_the_name_of_a_former_command(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "label", tmp_path / "merge")
    with chdir(tmp_path):
        assert "actual token" in run("cache", "info", "merge").out
