"""The files of a cache of teacher signals.

    caches/qwen3-8b/
        cache.json                  what the cache holds and who computed it (`Manifest`)
        teacher/                    the teacher's configuration and tokenizer; with hidden states, its output head
        shards/00000.safetensors    the signals of some documents
        shards/00000.json           the shard's size and hash, written after the shard
        index.json                  a hash of every other file; written last, so a cache without it is unfinished

A shard is one safetensors file. Its tensors are, for D documents with N rows together:

    document        [D, 16] uint8       the document's id (`document_id`)
    first_row       [D] int32           the first row of the document that is stored
    offsets         [D+1] int64         the rows of document d are offsets[d]:offsets[d+1] of the following tensors
    hidden, ids, …  [N, …]              the tensors of the signal (`SignalSpec.tensors`)

Row t of a document is the teacher's distribution of token t + 1. Rows are stored from the first to the last one that
predicts a target. A document is found by its tokens, so the order, the packing and the number of epochs of a run do
not matter, and neither does the position of the document in its file.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stillhouse.config.teacher import CACHED
from stillhouse.teachers.spec import SignalSpec

FORMAT = 1
MANIFEST, INDEX, TEACHER, SHARDS = "cache.json", "index.json", CACHED, "shards"
ID_BYTES = 16
CACHE_KEY = "cache"


@dataclass(frozen=True)
class Manifest:
    """What a cache holds and who computed it.

    teacher: the model's name. teacher_hash: of its files. tokenizer_hash: of its tokenizer. vocabulary: rows of the
    teacher's head. width: the teacher's width. documents, rows: their number. documents_hash: of the ids and row
    ranges of all documents. shards: their number. versions: of the libraries.
    """

    signal: SignalSpec
    teacher: str
    teacher_hash: str
    tokenizer_hash: str
    vocabulary: int
    width: int
    documents: int
    rows: int
    documents_hash: str
    shards: int
    versions: dict[str, str]
    format: int = FORMAT

    @property
    def identity(self) -> str:
        """A hash of everything but the versions. Each shard holds it, so that one of another cache is refused."""
        decisive = {key: value for key, value in asdict(self).items() if key != "versions"}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def summary(self, folder: Path) -> str:
        """The cache in two lines, for a terminal."""
        per_token = self.signal.bytes_per_token(self.width)
        return (
            f"{folder}: {self.signal} of {self.teacher} for {self.documents:,} documents\n"
            f"{self.rows:,} tokens, {per_token:,} bytes each, {self.rows * per_token / 2**20:,.1f} MiB in "
            f"{self.shards:,} shard{'s' * (self.shards != 1)}"
        )

    def differences(self, other: "Manifest") -> list[tuple[str, Any, Any]]:
        """The name and the two values of everything but the versions that differs."""
        own, others = asdict(self), asdict(other)
        return [(name, own[name], others[name]) for name in own if name != "versions" and own[name] != others[name]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, path: object) -> "Manifest":
        """Raises ValueError, naming the path, for anything that `to_json` has not written."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.get("format") != FORMAT:
                raise ValueError(f"its format is {fields.get('format')}, expected {FORMAT}")
            return cls(**{**fields, "signal": SignalSpec(**fields["signal"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not the description of a cache: {error}") from error


def document_id(tokens: np.ndarray) -> bytes:
    """The id of a document: a hash of its token ids."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").data).digest()[:ID_BYTES]


def documents_hash(documents: Iterable[tuple[bytes, range]]) -> str:
    """A hash of the ids and rows of all documents of a cache, in their order."""
    digest = hashlib.sha256()
    for document, rows in documents:
        digest.update(document)
        digest.update(np.array([rows.start, rows.stop], dtype="<i8").tobytes())
    return digest.hexdigest()


def target_rows(targets: np.ndarray) -> range:
    """The rows of a document from the first to the last one that predicts a target; row t predicts token t + 1.

    targets: [tokens] bool, whether a token is to be predicted.
    """
    predicting = np.flatnonzero(targets[1:])
    return range(int(predicting[0]), int(predicting[-1]) + 1) if len(predicting) else range(0)


def shard_name(number: int) -> str:
    return f"{SHARDS}/{number:05d}.safetensors"


def shard_identity(manifest: Manifest, number: int) -> str:
    """What a shard holds under `CACHE_KEY` in its header."""
    return f"{manifest.identity} {number}"


def record_name(number: int) -> str:
    """The file with a shard's size and hash."""
    return f"{SHARDS}/{number:05d}.json"
