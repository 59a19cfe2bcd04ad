"""The files of a cache of teacher signals.

    caches/qwen3-8b/
        cache.json                  a description of the cache and of the teacher (`CacheManifest`)
        teacher/                    the teacher's configuration and tokenizer; with hidden states, its output head
        shards/00000.safetensors    the signals of some documents
        shards/00000.json           the shard's hash, written after the shard
        index.json                  hashes of all files except shards/*.json; written last, marks a complete cache

A shard is one safetensors file. For D documents with N rows in total, its tensors are:

    document        [D, 16] uint8       the document's id (`document_id`)
    first_row       [D] int32           the first row of the document that is stored
    offsets         [D+1] int64         the rows of document d are offsets[d]:offsets[d+1] of the following tensors
    hidden, ids, …  [N, …]              the signal (`SignalSpec.tensors`)

Version 0.1.0 could pack ids without loss into few bits. This version reads packed ids, but does not write them. For K
ids or M draws per row and a vocabulary of V, the packed tensors are:

    ids             [N, ·] uint8        "top_k": each id in ceil(log2 V) bits; with a label, id + 1 in
                                        ceil(log2(V + 1)) bits, because an id may be -1
    distinct        [N] uint8           "sampled": the number of distinct ids of a row
    pairs           [·] uint8           pairs (id, its count - 1), one after the other; the pairs of each row begin at
                                        a new byte
    pair_offsets    [D+1] int64         the pairs of document d are the bytes pair_offsets[d]:pair_offsets[d+1]

A cache stores the rows of a document from the first row to the last row that predict a target. A document is found by
a hash of its tokens and media. So a cache does not depend on the order, packing or number of epochs of a run.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.media import MEDIA, DocumentMedia
from stillhouse.display import escaped
from stillhouse.hashing import json_hash
from stillhouse.signals.signal_spec import SignalSpec, TensorForms

FORMAT = 2
MANIFEST, INDEX, TEACHER, SHARDS = "cache.json", "index.json", "teacher", "shards"
ID_BYTES = 16
CACHE_KEY = "cache"
#: fields of `CacheManifest` that have another name in cache.json, and this name
_STORED = {"media": MEDIA, "teacher_media": f"teacher_{MEDIA}"}
#: an integer of at most `_WIDEST` bits lies within `_REACH` bytes, even if it begins at the last bit of a byte
_WIDEST, _REACH = 41, 6


@dataclass(frozen=True)
class CacheManifest:
    """A description of a cache's content and of the teacher that computed it.

    teacher_hash, tokenizer_hash: hashes of the teacher's files and of the teacher's tokenizer
    vocabulary, width: the number of rows of the teacher's head, and the teacher's width
    documents_hash: a hash of the ids and row ranges of all documents
    versions: the versions of the libraries
    packed: whether ids and counts are stored with the smallest possible number of bits; refused for hidden states
    media: `MediaProcessor.pixels_identity`, which identifies how tensors were made of media; None without media
    teacher_media: a hash of the teacher's processor of media; None if the teacher has no separate processor
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
        if self.packed and self.signal.kind == "hidden":
            raise ValueError("hidden states have no packed form: expected top_k or sampled")

    @property
    def forms(self) -> TensorForms:
        """For each tensor of the signal in a shard: its shape without the first dim, and its dtype."""
        plain = self.signal.tensors(self.width)
        if not self.packed:
            return plain
        if self.signal.kind == "sampled":
            return {"distinct": ((), torch.uint8), "pairs": ((), torch.uint8), "pair_offsets": ((), torch.int64)}
        (entries,), _ = plain["ids"]
        return plain | {"ids": ((-(-entries * self.packed_bits // 8),), torch.uint8)}

    @property
    def packed_bits(self) -> int:
        """The number of bits of a packed id, or of a packed pair of an id and its count."""
        if self.signal.kind == "sampled":
            return bits_for(self.vocabulary) + bits_for(self.signal.entries)
        return bits_for(self.vocabulary + self.signal.with_label)

    def fields(self, *removed: str) -> dict[str, Any]:
        """The fields in the file. Caches of texts have no fields for media, like the caches of earlier versions."""
        fields = {_STORED.get(key, key): value for key, value in asdict(self).items() if key not in removed}
        return {key: value for key, value in fields.items() if value is not None or key not in _STORED.values()}

    @property
    def identity(self) -> str:
        """A hash of all fields except the versions. The header of each shard contains it."""
        return json_hash(self.fields("versions"))

    def summary(self, folder: Path) -> str:
        """Describe a complete cache in two lines, for a terminal."""
        size = sum((folder / shard_name(number)).stat().st_size for number in range(self.shards))
        packed, several = ", packed" * self.packed, "s" * (self.shards != 1)
        return escaped(
            f"{folder}: {self.signal}{packed} of {self.teacher} for {self.documents:,} documents\n"
            f"{self.rows:,} tokens, {size / max(self.rows, 1):,.1f} bytes each, {size / 2**20:,.1f} MiB in "
            f"{self.shards:,} shard{several}",
            lines=True,
        )

    def differences(self, other: "CacheManifest") -> list[tuple[str, Any, Any]]:
        """Return the name, this value and the value of `other` for each different field, except the versions."""
        ours, others = self.fields("versions"), other.fields("versions")
        return [
            (name, ours.get(name), others.get(name)) for name in ours | others if ours.get(name) != others.get(name)
        ]

    def to_json(self) -> str:
        return json.dumps(self.fields(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, path: object) -> "CacheManifest":
        """Read the text of `to_json`. Raises ValueError with the path for another text."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.get("format") != FORMAT:
                raise ValueError(f"its format is {fields.get('format')}, expected {FORMAT}")
            fields |= {key: fields.pop(name) for key, name in _STORED.items() if name in fields}
            return cls(signal=SignalSpec(**fields.pop("signal")), **fields)
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
    """The range from the first to the last row that predicts a target; row t predicts token t + 1."""
    predicting = np.flatnonzero(targets[1:])
    return range(int(predicting[0]), int(predicting[-1]) + 1) if len(predicting) else range(0)


def shard_tensors(documents: Sequence[tuple[bytes, range]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a shard. documents: ids and stored rows. tensors: the signal's tensors for these rows"""
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


def record_name(number: int) -> str:
    return f"{SHARDS}/{number:05d}.json"


class StoredDocument(NamedTuple):
    """The document `number` of a shard. rows: its stored rows, which begin at row `start` of the shard's tensors"""

    shard: int
    number: int
    start: int
    rows: range

    def has(self, rows: range) -> bool:
        return self.rows.start <= rows.start and rows.stop <= self.rows.stop


def read_rows(manifest: CacheManifest, file: Any, stored: StoredDocument, rows: range) -> dict[str, Tensor]:
    """Return the signal's tensors for some rows of a document. Raises ValueError for inconsistent tensors."""
    first, last = rows.start - stored.rows.start, rows.stop - stored.rows.start
    if manifest.packed and manifest.signal.kind == "sampled":
        return _packed_draws(manifest, file, stored, first, last)
    tensors = {name: _rows(file, name, stored.start + first, last - first) for name in manifest.forms}
    if manifest.packed:
        (entries,), _ = manifest.signal.tensors(0)["ids"]
        strings, bits = tensors["ids"].numpy(), manifest.packed_bits
        starts = 8 * strings.shape[1] * np.arange(len(strings), dtype=np.int64)
        ids = _read_bits(strings.reshape(-1), starts[:, None] + bits * np.arange(entries, dtype=np.int64), bits)
        tensors["ids"] = torch.from_numpy((ids - manifest.signal.with_label).astype(np.int32))
    return tensors


def _packed_draws(
    manifest: CacheManifest, file: Any, stored: StoredDocument, first: int, last: int
) -> dict[str, Tensor]:
    entries, bits, count_bits = manifest.signal.entries, manifest.packed_bits, bits_for(manifest.signal.entries)
    distinct = _rows(file, "distinct", stored.start, last).numpy().astype(np.int64)
    if distinct.size and distinct.max() > entries:
        raise ValueError(f"'distinct' has {distinct.max()} ids in a row of {entries} draws")
    starts = np.concatenate([[0], np.cumsum(-(-distinct * bits // 8))])
    low, high = int(starts[first]), int(starts[last])
    offset, stop = (int(place) for place in file.get_slice("pair_offsets")[stored.number : stored.number + 2])
    if not 0 <= offset <= offset + high <= stop:
        raise ValueError(f"'pair_offsets' of document {stored.number} does not fit 'distinct'")
    string = file.get_slice("pairs")[offset + low : offset + high].numpy()
    if len(string) != high - low:
        raise ValueError("'pairs' ends before the last row")
    distinct = distinct[first:]
    before = np.concatenate([[0], np.cumsum(distinct)])
    place = np.arange(before[-1]) - np.repeat(before[:-1], distinct)
    values = _read_bits(string, np.repeat(8 * (starts[first:last] - low), distinct) + place * bits, bits)
    ids = np.full((len(distinct), entries), -1, dtype=np.int32)
    counts = np.zeros((len(distinct), entries), dtype=np.uint8)
    present = np.arange(entries) < distinct[:, None]
    ids[present] = values >> count_bits
    counts[present] = (values & ((1 << count_bits) - 1)) + 1
    return {"ids": torch.from_numpy(ids), "counts": torch.from_numpy(counts)}


def _rows(file: Any, name: str, start: int, count: int) -> Tensor:
    rows: Tensor = file.get_slice(name)[start : start + count]
    if len(rows) != count:
        raise ValueError(f"'{name}' ends before the last row")
    return rows


def bits_for(values: int) -> int:
    """The number of bits of an integer in [0, values); at least 1."""
    return max(1, (values - 1).bit_length())


def _read_bits(string: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
    """The integers of `width` bits at these positions of a string, int64; the most significant bit is first."""
    if not 1 <= width <= _WIDEST:
        raise ValueError(f"integers of {width} bits: expected 1 to {_WIDEST}")
    padded = np.concatenate([string, np.zeros(_REACH, dtype=np.uint8)])
    values = np.zeros(positions.shape, dtype=np.uint64)
    for at in range(_REACH):
        values = (values << np.uint64(8)) | padded[(positions >> 3) + at].astype(np.uint64)
    shifts = (8 * _REACH - width - (positions & 7)).astype(np.uint64)
    return ((values >> shifts) & np.uint64((1 << width) - 1)).astype(np.int64)
