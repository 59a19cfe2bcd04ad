"""Damages of checkpoints, of published versions of the weights, and of caches, as a test or a campaign needs them."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.runs import run, write_run
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stillhouse.rollout.published_folder import MANIFEST
from stillhouse.signals.cache_files import CACHE_KEY, INDEX, shard_name
from stillhouse.tools import write_cache as writer


def resealed(cache: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply `change` to the tensors of the first shard, and write the shard and its hash."""
    path = cache / shard_name(0)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        identity = file.metadata()[CACHE_KEY]
    change(tensors)
    save_file(tensors, path, metadata={CACHE_KEY: identity})
    index = json.loads((cache / INDEX).read_text())
    index["sha256"][shard_name(0)] = hashlib.sha256(path.read_bytes()).hexdigest()
    (cache / INDEX).write_text(json.dumps(index))


def interrupt_writer(monkeypatch: pytest.MonkeyPatch, *calls: int) -> list[object]:
    """Interrupt these computations of a shard, counted from 1; return the list of all that are made."""
    compute, made = writer.shard_tensors, list[object]()

    def interrupted(*arguments: Any) -> dict[str, Tensor]:
        made.append(arguments)
        if len(made) in calls:
            raise KeyboardInterrupt
        return compute(*arguments)

    monkeypatch.setattr(writer, "shard_tensors", interrupted)
    return made


WEIGHTS = "model.safetensors"


def _manifest_of(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _older(final: Path, before: Path) -> None:
    """The version before, as it is."""
    shutil.rmtree(final)
    shutil.copytree(before, final)


def _older_with_this_number(final: Path, before: Path) -> None:
    """The version before under this one's number: all hashes are right."""
    _older(final, before)
    _manifest_of(final, lambda manifest: manifest.update(version=manifest["version"] + 1))


def _removed(final: Path) -> Path:
    (final / WEIGHTS).unlink()
    return final / WEIGHTS


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "older": _older,
    "older with this number": _older_with_this_number,
    "older files": lambda final, before: shutil.copy(before / WEIGHTS, final / WEIGHTS),
    "pipe": lambda final, _: os.mkfifo(_removed(final)),
    "link": lambda final, _: _removed(final).symlink_to("/dev/zero"),
    "elsewhere": lambda final, before: _manifest_of(
        final, lambda manifest: manifest["files"].update({f"../{before.name}/{WEIGHTS}": "0" * 64})
    ),
    "cut": lambda final, _: os.truncate(final / WEIGHTS, 1000),
}


NEWEST, BEFORE = "step-00000004", "step-00000002"


@pytest.fixture(scope="session")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run in one process with all its checkpoints."""
    folder = tmp_path_factory.mktemp("complete")
    write_run(folder, **{"checkpoint.every": 2, "checkpoint.keep": 9})
    run("distill", folder / "run.yaml")
    return folder


def interrupted(complete_run: Path, folder: Path) -> Path:
    """Copy `whole`/out to a new folder, in the state of a run that was killed after step 4."""
    out = folder / "out"
    shutil.copytree(complete_run / "out", out)
    for name in ("model", "checkpoints/step-00000006"):
        shutil.rmtree(out / name)
    for name in ("hashes.json", "report.html"):
        (out / name).unlink(missing_ok=True)
    return out


def zeroed(newest: Path) -> str:
    path = next((newest / "resume").glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-64:] = bytes(64)
    path.write_bytes(raw)
    return f"resume/{path.name} is not what was written (its hash differs)"
