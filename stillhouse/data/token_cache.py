"""Stores tokenized documents on disk. They are written once, checked by hashes at each read, and memory-mapped.

The name of an entry's folder is a hash of everything that determines the content: the bytes of the source's files,
the tokenizer with its chat template, the options, the libraries' versions, and the code of this package and of the
registered add-ons for readers and media. The folder has

    manifest.json     this hash, the report on the records, the sha256 of each other file and of the manifest itself
    sources.arrow     `file:line` of each document
    images.arrow      the images of all documents, if there are images: paths with hashes, or the bytes of their files
    NAME.bin          an array: tokens (int32), targets (bool), offsets (int64), keys (uint64), the arrays of the
                      substitutions, and image_offsets (int64)

An entry is written under a temporary name and then renamed, so that reading it needs no lock. A lock file lets one
process write an entry while the others wait.
"""

import inspect
import io
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import tokenizers
import transformers
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from stillhouse.data import media
from stillhouse.data.data_report import DataReport
from stillhouse.data.documents import Documents
from stillhouse.data.media_files import MediaFiles, MediaWriter, media_table
from stillhouse.data.offsets import offsets_of
from stillhouse.data.render.templates import Encoded
from stillhouse.data.substitutions import Substitution, Substitutions
from stillhouse.hashing import file_hash, json_hash
from stillhouse.libraries import reading
from stillhouse.registry import distribution, load_all, registered

MANIFEST, SOURCES, IMAGES = "manifest.json", "sources.arrow", "images.arrow"
_PROOF = "sha256_of_the_above"
TOKENS, TARGETS = "tokens", "targets"
_SUBSTITUTIONS = ("substituted_tokens", "substituted_offsets", "substituted_spans", "substituted_parts")
_IMAGE_OFFSETS = "image_offsets"
#: the dtypes of arrays; all other arrays are int64
_DTYPES = {TOKENS: np.int32, TARGETS: np.bool_, "keys": np.uint64, "substituted_tokens": np.int32}
_BATCH = 100_000  # the number of strings in one batch of an Arrow file


class StoredStrings(Sequence[str]):
    """Strings of a memory-mapped Arrow file."""

    def __init__(self, path: Path):
        table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        self._strings = table.column(0)

    def __len__(self) -> int:
        return len(self._strings)

    def __getitem__(self, index: Any) -> Any:
        return self._strings[index].to_pylist() if isinstance(index, slice) else self._strings[int(index)].as_py()


def entry_key(files: Iterable[Path], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    """The hash that names an entry. Reads all files. The tokenizer must be a fast tokenizer."""
    groups = ("stillhouse.readers", media.GROUP)
    add_ons = [point for group in groups if load_all(group) for point in registered(group).values()]
    decisive = {
        # another version of the code may convert records differently or write other files
        "code": [file_hash(path) for path in sorted(Path(__file__).parent.rglob("*.py"))],
        "add_ons": [[distribution(point), *map(file_hash, _code_of(point.module))] for point in add_ons],
        "libraries": [transformers.__version__, tokenizers.__version__],
        "files": [[str(path), file_hash(path)] for path in files],
        "tokenizer": [
            type(tokenizer).__name__,
            file_hash(Path(inspect.getfile(type(tokenizer)))),  # the class may be the model's own code
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.split_special_tokens,  # not part of the serialised tokenizer
            tokenizer.chat_template,
            {role: str(token) for role, token in tokenizer.special_tokens_map.items()},
        ],
        "options": options,
    }
    return json_hash(decisive)


def _code_of(module: str) -> list[Path]:
    """The file of a module, or all files of its package."""
    file = Path(inspect.getfile(import_module(module)))
    return sorted(file.parent.rglob("*.py")) if "." in module else [file]


def cached_documents(
    folder: Path, files: Callable[[], Sequence[Path]], key: Callable[[], str], load: Callable[[Path], Documents]
) -> Documents:
    """The documents of an entry. If the entry does not exist, it is written first.

    files: a function that lists the source's files. key: a function that returns the `entry_key`. load: a function
    that reads the records, writes the arrays of tokens and targets to the given folder, and returns the documents.

    Raises ValueError for an entry that differs from its hashes, for a folder that cannot be used, and if the source's
    files change while they are read.
    """
    before = _states(files())
    name = key()
    path = folder / name
    if path.exists():
        return _read(path, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock"):
            if not path.exists():
                _write(path, name, load, lambda: _states(files()) == before)
    except OSError as error:
        if error.filename is not None and str(error.filename) in before:  # an error of the source, not of the cache
            raise
        raise ValueError(
            f"{folder}: tokenized data cannot be cached in this folder ({error.strerror or error}): make room, or set"
            " data.cache to another folder or null"
        ) from error
    return _read(path, name)


def _write(path: Path, name: str, load: Callable[[Path], Documents], is_unchanged: Callable[[], bool]) -> None:
    prefix = f".partial-{name[:32]}-"
    for left in path.parent.glob(f"{prefix}*"):  # no other process has the lock, so a killed process left it
        shutil.rmtree(left)
    partial = path.parent / f"{prefix}{uuid.uuid4().hex}"
    partial.mkdir()
    try:
        documents = load(partial)
        if not is_unchanged():
            raise ValueError(f"{documents.report.source}: a file changed while it was read: start again")
        arrays = {"offsets": documents.offsets, "keys": documents.keys_D}
        for number, substitutions in enumerate(documents.substitutions.values()):
            values = (substitutions.tokens_N, substitutions.offsets, substitutions.spans_P2, substitutions.parts)
            arrays |= zip((f"{part}-{number}" for part in _SUBSTITUTIONS), values, strict=True)
        if documents.media is None:
            (partial / IMAGES).unlink(missing_ok=True)
        else:
            arrays[_IMAGE_OFFSETS] = documents.media.offsets
        for array, content in arrays.items():
            (partial / f"{array}.bin").write_bytes(np.ascontiguousarray(content).tobytes())
        schema = pyarrow.schema([("source", pyarrow.large_string())])
        with pyarrow.OSFile(str(partial / SOURCES), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
            for start in range(0, len(documents), _BATCH):
                strings = pyarrow.array(documents.sources[start : start + _BATCH], pyarrow.large_string())
                writer.write_batch(pyarrow.record_batch([strings], schema=schema))
        manifest = {
            "key": name,
            "report": asdict(documents.report),
            "columns": dict(documents.columns),
            "substitutions": list(documents.substitutions),
            "has_images": documents.media is not None,
            "sha256": {file.name: file_hash(file) for file in sorted(partial.iterdir())},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest | {_PROOF: json_hash(manifest)}), encoding="utf-8")
        for path_of_file in partial.iterdir():
            with path_of_file.open("rb") as file:
                os.fsync(file.fileno())
        del documents
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read(path: Path, name: str) -> Documents:
    damaged = f"{path}: the cached tokens are damaged; remove this folder, so that the next run writes it again"
    with reading(damaged):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        key, proof = manifest["key"], manifest.pop(_PROOF)
        sha256 = {file: file_hash(path / file) for file in manifest["sha256"]}
    if key != name:
        raise ValueError(f"{damaged}: its manifest belongs to the entry {key!r}")
    changed = [MANIFEST] if proof != json_hash(manifest) else []
    changed += [file for file, digest in sha256.items() if digest != manifest["sha256"][file]]
    if changed:
        raise ValueError(f"{damaged}: {changed[0]} has other bytes than when it was written")
    names = [TOKENS, TARGETS, "offsets", "keys"]
    names += [f"{part}-{number}" for number in range(len(manifest["substitutions"])) for part in _SUBSTITUTIONS]
    names += [_IMAGE_OFFSETS] if manifest["has_images"] else []
    expected = {SOURCES, *([IMAGES] if manifest["has_images"] else []), *(f"{array}.bin" for array in names)}
    if lost := expected - sha256.keys():
        raise ValueError(f"{damaged}: {', '.join(sorted(lost))} has no hash in {MANIFEST}")
    arrays = {}
    for array in names:
        file, dtype = path / f"{array}.bin", _DTYPES.get(array.partition("-")[0], np.int64)
        # an empty file cannot be mapped
        arrays[array] = np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype=dtype)
    substitutions, media = {}, None
    for number, teacher in enumerate(manifest["substitutions"]):
        tokens_N, offsets, spans, parts = (arrays[f"{part}-{number}"] for part in _SUBSTITUTIONS)
        substitutions[teacher] = Substitutions(tokens_N, offsets, spans.reshape(-1, 2), parts)
    if manifest["has_images"]:
        offsets = arrays[_IMAGE_OFFSETS]
        with reading(damaged):
            table = media_table(path / IMAGES)
        if offsets[-1] != len(table):
            raise ValueError(f"{damaged}: {IMAGES} has {len(table)} images, and {_IMAGE_OFFSETS} has {offsets[-1]}")
        media = MediaFiles(table, np.arange(offsets[-1]), offsets)
    documents = Documents(
        arrays[TOKENS],
        arrays[TARGETS],
        arrays["offsets"],
        arrays["keys"],
        StoredStrings(path / SOURCES),
        DataReport(**manifest["report"]),
        manifest["columns"],
        substitutions,
        media=media,
    )
    counts = {len(documents), len(documents.keys_D), len(documents.offsets) - 1}
    counts |= set() if documents.media is None else {len(documents.media.offsets) - 1}
    if len(counts) != 1 or not (documents.offsets[-1] == len(documents.tokens_N) == len(documents.targets_N)):
        raise ValueError(f"{damaged}: the numbers of documents and tokens differ between its files")
    return documents


def _states(files: Sequence[Path]) -> dict[str, tuple[int, int, int]]:
    """The inode, size and modification time of each file, by name. They change if the file changes."""
    states = ((path, path.stat()) for path in files)
    return {str(path): (state.st_ino, state.st_size, state.st_mtime_ns) for path, state in states}


def user_folder() -> Path:
    """The cache folder for `data.cache: auto`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stillhouse" / "data"


class DocumentWriter:
    """Collects the documents of one source.

    folder: the folder for the files of tokens, targets and media. If it is None, the contents are kept in memory.
    """

    def __init__(self, folder: Path | None):
        self._files: list[BinaryIO] = [
            io.BytesIO() if folder is None else (folder / f"{name}.bin").open("wb") for name in (TOKENS, TARGETS)
        ]
        self._media = MediaWriter(None if folder is None else folder / IMAGES)
        # each of these lists has one item per document
        self.sources: list[str] = []
        self.keys: list[int] = []
        self._lengths = list[int]()
        self._values, self._records = list[list[Any]](), list[dict[str, Any]]()
        self._substitutions: list[Mapping[str, list[Substitution]]] = []

    def add(
        self,
        document: Encoded,
        source: str,
        key: int,
        values: list[Any],
        substitutions: Mapping[str, list[Substitution]],
        record: dict[str, Any] | None,
    ) -> None:
        """Add a document. source: `file:line`. key: the hash of the record's content. values: the values of the kept
        columns. substitutions: each teacher's substitutions, by the teacher's name. record: the record if it is kept.
        """
        for file, array in zip(self._files, (document.ids, document.targets), strict=True):
            file.write(array.tobytes())
        self._media.add(document.media)
        self.sources.append(source)
        self._lengths.append(len(document.ids))
        self.keys.append(key)
        self._values.append(values)
        self._substitutions.append(substitutions)
        if record is not None:
            self._records.append(record)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of all documents, [N] each."""
        arrays: list[np.ndarray] = []
        for file, name in zip(self._files, (TOKENS, TARGETS), strict=True):
            if isinstance(file, io.BytesIO):
                arrays.append(np.frombuffer(file.getbuffer(), dtype=_DTYPES[name]))
            else:
                file.flush()
                arrays.append(np.memmap(file.name, dtype=_DTYPES[name], mode="r"))
        return arrays[0], arrays[1]

    def documents(
        self, report: DataReport, columns: Sequence[str], prefixes: Collection[str], teachers: Iterable[str]
    ) -> Documents:
        """All documents that were added. columns: the names of the kept columns. prefixes: the names of the teachers
        with a prefix. teachers: the names of the teachers whose tokens of media can differ from the student's.
        """
        values, media = map(list, zip(*self._values, strict=True)), self._media.finish()
        names = dict.fromkeys([*prefixes, *teachers])
        by_name = {name: [by_teacher.get(name, []) for by_teacher in self._substitutions] for name in names}
        return Documents(
            *self.arrays(),
            offsets_of(self._lengths),
            np.asarray(self.keys, dtype=np.uint64),
            self.sources,
            report,
            dict(zip(columns, values, strict=True)),
            {name: Substitutions.of(lists) for name, lists in by_name.items() if name in prefixes or any(lists)},
            self._records,
            media=media if len(media.table) else None,
        )

    def close(self) -> None:
        self._media.close()
        for file in self._files:
            if not isinstance(file, io.BytesIO):  # a BytesIO stays open, because the arrays use its buffer
                file.close()
