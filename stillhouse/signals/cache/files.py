"""The files of a cache of teacher signals.

    caches/qwen3-8b/
        cache.json                  a description of the cache and of the teacher (`Manifest`)
        teacher/                    the teacher's configuration and tokenizer; with hidden states, its output head
        shards/00000.safetensors    the signals of some documents
        shards/00000.json           the shard's hash, written after the shard
        index.json                  hashes of all files except shards/*.json; written last, marks a complete cache

A shard is one safetensors file. For D documents with N rows in total, its tensors are:

    document        [D, 16] uint8       the document's id (`document_id`)
    first_row       [D] int32           the first row of the document that is stored
    offsets         [D+1] int64         the rows of document d are offsets[d]:offsets[d+1] of the following tensors
    hidden, ids, …  [N, …]              the signal (`SignalSpec.tensors`); in caches of version 0.1.0 perhaps its
                                        packed form (shard_layout.py)

Row t of a document is the teacher's distribution of token t + 1. The rows from the first to the last one that
predicts a target are stored. A document is found by a hash of its tokens and media. So a cache does not depend on
the order and packing of a run, or on the number of epochs.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.media import MEDIA, DocumentMedia
from stillhouse.display import escaped
from stillhouse.hashing import json_hash
from stillhouse.signals.cache.shard_layout import ShardLayout, layout_of
from stillhouse.signals.signal_spec import SignalSpec

FORMAT = 2
MANIFEST, INDEX, TEACHER, SHARDS = "cache.json", "index.json", "teacher", "shards"
ID_BYTES = 16
CACHE_KEY = "cache"
#: the names of fields in the file
_STORED = {"media": MEDIA, "teacher_media": f"teacher_{MEDIA}"}


@dataclass(frozen=True)
class Manifest:
    """A description of a cache's content and of the teacher that computed it.

    teacher: the model's name
    teacher_hash, tokenizer_hash: hashes of the teacher's files and of its tokenizer
    vocabulary: rows of the teacher's head
    width: the teacher's width
    documents, rows, shards: numbers of documents, rows and shards
    documents_hash: a hash of the ids and row ranges of all documents
    versions: versions of the libraries
    packed: whether ids and counts are stored with the smallest possible number of bits
    media: how tensors were made of media (`MediaProcessor.pixels_identity`); None if the documents are texts
    teacher_media: a hash of the teacher's processor of media; None if it has none of its own

    Raises ValueError for a signal that cannot be packed.
    """

    signal: SignalSpec
    teacher: str
    teacher_hash: str
    tokenizer_hash: str
    vocabulary: int
    width: int
    documents: int = 0
    rows: int = 0
    documents_hash: str = ""
    shards: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    packed: bool = False
    format: int = FORMAT
    media: str | None = None
    teacher_media: str | None = None

    def __post_init__(self) -> None:
        layout_of(self.signal, self.width, self.vocabulary, packed=self.packed)

    @property
    def layout(self) -> ShardLayout:
        return layout_of(self.signal, self.width, self.vocabulary, packed=self.packed)

    @property
    def content(self) -> dict[str, Any]:
        """All fields except the versions."""
        return {key: value for key, value in self._fields.items() if key != "versions"}

    @property
    def _fields(self) -> dict[str, Any]:
        """Caches of texts have no field for media, as before there were media."""
        fields = {_STORED.get(key, key): value for key, value in asdict(self).items()}
        return {key: value for key, value in fields.items() if value is not None or key not in _STORED.values()}

    @property
    def identity(self) -> str:
        """A hash of the content. The header of each shard contains it, so that shards of other caches are refused."""
        return json_hash(self.content)

    def summary(self, folder: Path) -> str:
        """Describe a complete cache in two lines, for a terminal."""
        size = sum((folder / shard_name(number)).stat().st_size for number in range(self.shards))
        packed = ", packed" * self.packed
        return escaped(
            f"{folder}: {self.signal}{packed} of {self.teacher} for {self.documents:,} documents\n"
            f"{self.rows:,} tokens, {size / max(self.rows, 1):,.1f} bytes each, {size / 2**20:,.1f} MiB in "
            f"{self.shards:,} shard{'s' * (self.shards != 1)}",
            lines=True,
        )

    def differences(self, other: "Manifest") -> list[tuple[str, Any, Any]]:
        """For each field of `content` that differs: its name, its value here and its value in `other`."""
        ours, others = self.content, other.content
        return [
            (name, ours.get(name), others.get(name)) for name in ours | others if ours.get(name) != others.get(name)
        ]

    def to_json(self) -> str:
        return json.dumps(self._fields, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, path: object) -> "Manifest":
        """Raises ValueError with the path if the text has another format than that of `to_json`."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.get("format") != FORMAT:
                raise ValueError(f"its format is {fields.get('format')}, expected {FORMAT}")
            fields |= {key: fields.pop(name) for key, name in _STORED.items() if name in fields}
            return cls(**{**fields, "signal": SignalSpec(**fields["signal"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not the description of a cache: {error}") from error


def document_id(tokens: np.ndarray, media: DocumentMedia | None = None) -> bytes:
    """The id of a document: a hash of its token ids and of the identity of its media."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").data).digest()
    if media is not None:
        digest = hashlib.sha256(MEDIA.encode() + digest + media.identity).digest()
    return digest[:ID_BYTES]


def documents_hash(documents: Iterable[tuple[bytes, range]]) -> str:
    """A hash of the ids and row ranges of documents, in the given order."""
    digest = hashlib.sha256()
    for document, rows in documents:
        digest.update(document)
        digest.update(np.array([rows.start, rows.stop], dtype="<i8").tobytes())
    return digest.hexdigest()


def target_rows(targets: np.ndarray) -> range:
    """The range from the first to the last row that predicts a target; row t predicts token t + 1.

    targets: [tokens] bool
    """
    predicting = np.flatnonzero(targets[1:])
    return range(int(predicting[0]), int(predicting[-1]) + 1) if len(predicting) else range(0)


def shard_tensors(documents: Sequence[tuple[bytes, range]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a shard. documents: ids and stored rows. tensors: those of the signal for these rows"""
    offsets = np.concatenate([[0], np.cumsum([len(rows) for _, rows in documents])]).astype(np.int64)
    ids = b"".join(document for document, _ in documents)
    return {
        "document": torch.frombuffer(bytearray(ids), dtype=torch.uint8).view(len(documents), ID_BYTES),
        "first_row": torch.tensor([rows.start for _, rows in documents], dtype=torch.int32),
        "offsets": torch.from_numpy(offsets),
        **tensors,
    }


def shard_name(number: int) -> str:
    return f"{SHARDS}/{number:05d}.safetensors"


def shard_identity(manifest: Manifest, number: int) -> str:
    """The value of `CACHE_KEY` in a shard's header."""
    return f"{manifest.identity} {number}"


def record_name(number: int) -> str:
    """The name of the file with a shard's hash."""
    return f"{SHARDS}/{number:05d}.json"
