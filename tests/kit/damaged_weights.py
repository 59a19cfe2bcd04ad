"""Damages of a published version of the weights, each as a function of its folder and of the folder before it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stillhouse.rollout.published_folder import MANIFEST

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


def _older_files(final: Path, before: Path) -> None:
    shutil.copy(before / WEIGHTS, final / WEIGHTS)


def _pipe(final: Path, before: Path) -> None:
    (final / WEIGHTS).unlink()
    os.mkfifo(final / WEIGHTS)


def _link(final: Path, before: Path) -> None:
    (final / WEIGHTS).unlink()
    (final / WEIGHTS).symlink_to("/dev/zero")


def _elsewhere(final: Path, before: Path) -> None:
    _manifest_of(final, lambda manifest: manifest["files"].update({f"../{before.name}/{WEIGHTS}": "0" * 64}))


def _cut(final: Path, before: Path) -> None:
    os.truncate(final / WEIGHTS, 1000)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    fault.__name__.strip("_").replace("_", " "): fault
    for fault in (_older, _older_with_this_number, _older_files, _pipe, _link, _elsewhere, _cut)
}
