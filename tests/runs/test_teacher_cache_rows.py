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
from kit.runs import refused_changes, run, session_of, write_run
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


@pytest.mark.parametrize(("damage", "message"), refused_changes("rows of a cache"))
def test_rows_that_no_teacher_gives_are_refused(folder: Path, tmp_path: Path, damage: str, message: str) -> None:
    kind, change = eval(damage)
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
