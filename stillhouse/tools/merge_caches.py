"""Merges caches of one teacher: the command `stillhouse cache merge`."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from stillhouse.output.disk import flush
from stillhouse.signals import SignalCache, SignalSpec
from stillhouse.signals.cache.files import TEACHER, Manifest
from stillhouse.signals.signal_checks import row_differences
from stillhouse.tools.cache_folder import write_documents

#: the fields of the manifests that must be equal
SAME = ("signal", "teacher_hash", "tokenizer_hash", "vocabulary", "width", "packed", "images", "teacher_images")
#: the allowed difference between numbers of the same teacher, relative to their norm: rounding depends on the batch
TOLERANCE = 0.02


def merge_caches(folders: Sequence[Path], out: Path, *, shard_bytes: int | None = None) -> Manifest:
    """Write a cache with the documents of several caches, in their order, or continue to write it.

    If several caches have a document, it is copied from the first one. Raises ValueError if the caches have different
    teachers, tokenizers or signals, or if two caches have different rows or different numbers for a document.
    """
    if len(folders) < 2:
        raise ValueError(f"got {len(folders)} cache: expected two or more")
    caches = [SignalCache(folder) for folder in folders]
    first = caches[0]
    for other in caches[1:]:
        _require_same(first, other)
    owners: dict[bytes, tuple[SignalCache, range]] = {}
    for cache in caches:
        for document, rows in cache.documents().items():
            owner, first_rows = owners.setdefault(document, (cache, rows))
            if owner is not cache:
                _require_equal(document, first_rows, rows, owner, cache)
    documents = [(document, rows) for document, (_, rows) in owners.items()]

    def read(numbers: Sequence[int]) -> list[dict[str, Tensor]]:
        chosen = (documents[number] for number in numbers)
        return [owners[document][0].read_document(document, rows) for document, rows in chosen]

    def copy_teacher(folder: Path, _: SignalSpec) -> None:
        shutil.copytree(first.teacher_folder, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
        for path in folder.iterdir():
            flush(path)

    return write_documents(out, first.manifest, documents, read, copy_teacher, shard_bytes=shard_bytes)


def _require_same(first: SignalCache, other: SignalCache) -> None:
    different = [
        f"{name} is {getattr(first.manifest, name)} there and {getattr(other.manifest, name)} here"
        for name in SAME
        if getattr(first.manifest, name) != getattr(other.manifest, name)
    ]
    heads = [cache.hashes.get(f"{TEACHER}/model.safetensors") for cache in (first, other)]
    if not different and heads[0] != heads[1]:
        different = ["the output heads differ (was the teacher loaded in another dtype?)"]
    if different:
        raise ValueError(
            f"{other.folder} cannot be merged with {first.folder}: {'; '.join(different)}; "
            "expected caches of one teacher and signal"
        )


def _require_equal(document: bytes, first_rows: range, rows: range, owner: SignalCache, other: SignalCache) -> None:
    where = f"document {document.hex()} is in {owner.folder} and in {other.folder}"
    if rows != first_rows:
        raise ValueError(
            f"{where} with other rows, {first_rows.start} to {first_rows.stop - 1} and {rows.start} to "
            f"{rows.stop - 1}: expected caches that were written with the same objective.tokens"
        )
    ours, theirs = (cache.read_document(document, rows) for cache in (owner, other))
    if not _are_close(ours, theirs):
        raise ValueError(f"{where} with other signals: expected signals of one teacher")


def _are_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    if "counts" in ours:  # both caches used the same random numbers, so only a sample near a border may differ
        differs_N = (ours["counts"] != theirs["counts"]).any(1) | (ours["ids"] != theirs["ids"]).any(1)
        return int(differs_N.sum()) <= max(1, TOLERANCE * len(differs_N))
    return bool(row_differences(ours, theirs).mean() <= TOLERANCE)
