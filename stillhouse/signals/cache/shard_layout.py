"""The layout of a signal's tensors in a shard: unchanged, or packed without loss into few bits.

Packed tensors of a shard, for D documents with N rows in total, K ids or M draws per row, vocabulary V:

    ids             [N, ·] uint8        "top_k": each id in ceil(log2 V) bits; with a label, id + 1 in
                                        ceil(log2(V + 1)) bits, because an id may be -1
    distinct        [N] uint8           "sampled": the number of distinct ids of a row
    pairs           [·] uint8           pairs (id, its count - 1), one after the other; the pairs of each row begin at
                                        a new byte
    pair_offsets    [D+1] int64         the pairs of document d are the bytes pair_offsets[d]:pair_offsets[d+1]
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stillhouse.signals.cache.bits import (
    bits_for,
    bytes_for,
    pack_rows,
    read_bits,
    unpack_rows,
    write_bits,
)
from stillhouse.signals.signal_spec import SignalSpec

TensorForms = dict[str, tuple[tuple[int, ...], torch.dtype]]


class StoredRows(NamedTuple):
    """Some rows of a document in a shard.

    document: the document's number in the shard
    start: the document's first row in the shard
    rows: the requested rows, counted from `start`
    """

    document: int
    start: int
    rows: range

    @property
    def slice(self) -> slice:
        return slice(self.start + self.rows.start, self.start + self.rows.stop)


class ShardLayout(ABC):
    """The layout of a signal's tensors in a shard. file: an opened safetensors file"""

    @property
    def bytes_per_token(self) -> int:
        """The number of bytes of a row; for packed draws, the maximum number."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.forms().values())

    @abstractmethod
    def forms(self) -> TensorForms:
        """For each tensor of a shard: its shape without the first dim, and its dtype."""

    @abstractmethod
    def pack(self, tensors: Mapping[str, Tensor], offsets: np.ndarray) -> dict[str, Tensor]:
        """Convert the tensors of the signal to the tensors of a shard.

        offsets: [D+1], the first row of each document, then the total number of rows
        """

    @abstractmethod
    def read(self, file: Any, part: StoredRows) -> dict[str, Tensor]:
        """Return the signal's tensors. Raises ValueError if the shard's tensors are inconsistent."""


def layout_of(spec: SignalSpec, width: int, vocabulary: int, *, packed: bool) -> ShardLayout:
    """The layout of a signal. Raises ValueError for hidden states with `packed`.

    width: the teacher's width
    vocabulary: V, the rows of the teacher's head
    """
    if not packed:
        return Plain(spec, width)
    if spec.kind == "hidden":
        raise ValueError("hidden states have no packed form: expected --packed with top_k or sampled")
    return PackedDraws(spec, vocabulary) if spec.kind == "sampled" else PackedIds(spec, vocabulary)


@dataclass(frozen=True)
class Plain(ShardLayout):
    spec: SignalSpec
    width: int

    def forms(self) -> TensorForms:
        return self.spec.tensors(self.width)

    def pack(self, tensors: Mapping[str, Tensor], offsets: np.ndarray) -> dict[str, Tensor]:
        return dict(tensors)

    def read(self, file: Any, part: StoredRows) -> dict[str, Tensor]:
        return {name: _rows(file, name, part) for name in self.forms()}


@dataclass(frozen=True)
class PackedIds(ShardLayout):
    """The packed layout of "top_k"; only the ids are packed."""

    spec: SignalSpec
    vocabulary: int

    @property
    def _least(self) -> int:
        return -1 if self.spec.with_label else 0

    @property
    def _bits(self) -> int:
        return bits_for(self.vocabulary - self._least)

    def forms(self) -> TensorForms:
        plain = self.spec.tensors(0)
        (entries,), _ = plain["ids"]
        return plain | {"ids": ((bytes_for(entries, self._bits),), torch.uint8)}

    def pack(self, tensors: Mapping[str, Tensor], offsets: np.ndarray) -> dict[str, Tensor]:
        ids = tensors["ids"]
        _require_range(ids, self._least, self.vocabulary)
        strings = pack_rows(ids.numpy() - self._least, self._bits)
        return {**tensors, "ids": torch.from_numpy(strings)}

    def read(self, file: Any, part: StoredRows) -> dict[str, Tensor]:
        tensors = {name: _rows(file, name, part) for name in self.forms()}
        (entries,), _ = self.spec.tensors(0)["ids"]
        ids = unpack_rows(tensors["ids"].numpy(), entries, self._bits).astype(np.int64) + self._least
        return tensors | {"ids": torch.from_numpy(ids.astype(np.int32))}


@dataclass(frozen=True)
class PackedDraws(ShardLayout):
    """The packed layout of "sampled": each row has a pair (id, count) for each distinct id."""

    spec: SignalSpec
    vocabulary: int

    @property
    def bytes_per_token(self) -> int:
        return 1 + bytes_for(self.spec.entries, self._bits)

    @property
    def _count_bits(self) -> int:
        return bits_for(self.spec.entries)

    @property
    def _bits(self) -> int:
        return bits_for(self.vocabulary) + self._count_bits

    def forms(self) -> TensorForms:
        return {"distinct": ((), torch.uint8), "pairs": ((), torch.uint8), "pair_offsets": ((), torch.int64)}

    def pack(self, tensors: Mapping[str, Tensor], offsets: np.ndarray) -> dict[str, Tensor]:
        ids, counts = tensors["ids"].numpy(), tensors["counts"].numpy()
        present = ids >= 0
        distinct = present.sum(1)
        _require_range(tensors["ids"], -1, self.vocabulary)
        if (present != (np.arange(self.spec.entries) < distinct[:, None])).any() or (present != (counts > 0)).any():
            raise ValueError("the ids and counts of a row have gaps: expected its different ids first, then -1 and 0")
        starts = np.concatenate([[0], np.cumsum(bytes_for(distinct, self._bits))])
        # the counts of a row sum to the number of draws, so no valid count is larger than this number
        values = (ids.astype(np.int64) << self._count_bits) | (
            np.minimum(counts, self.spec.entries).astype(np.int64) - 1
        )
        pairs = write_bits(values[present], self._positions(starts[:-1], distinct), self._bits, int(starts[-1]))
        return {
            "distinct": torch.from_numpy(distinct.astype(np.uint8)),
            "pairs": torch.from_numpy(pairs),
            "pair_offsets": torch.from_numpy(starts[offsets].astype(np.int64)),
        }

    def read(self, file: Any, part: StoredRows) -> dict[str, Tensor]:
        until = StoredRows(part.document, part.start, range(part.rows.stop))
        distinct = _rows(file, "distinct", until).numpy().astype(np.int64)
        if distinct.size and distinct.max() > self.spec.entries:
            raise ValueError(f"'distinct' has {distinct.max()} ids in a row of {self.spec.entries} draws")
        starts = np.concatenate([[0], np.cumsum(bytes_for(distinct, self._bits))])
        first, stop = (int(offset) for offset in file.get_slice("pair_offsets")[part.document : part.document + 2])
        low, high = int(starts[part.rows.start]), int(starts[part.rows.stop])
        if not 0 <= first <= first + high <= stop:
            raise ValueError(f"'pair_offsets' of document {part.document} does not fit 'distinct'")
        string = file.get_slice("pairs")[first + low : first + high].numpy()
        if len(string) != high - low:
            raise ValueError("'pairs' ends before the last row")
        distinct = distinct[part.rows.start :]
        positions = self._positions(starts[part.rows.start : part.rows.stop] - low, distinct)
        values = read_bits(string, positions, self._bits).astype(np.int64)
        ids = np.full((len(distinct), self.spec.entries), -1, dtype=np.int32)
        counts = np.zeros((len(distinct), self.spec.entries), dtype=np.uint8)
        present = np.arange(self.spec.entries) < distinct[:, None]
        ids[present] = values >> self._count_bits
        counts[present] = (values & ((1 << self._count_bits) - 1)) + 1
        return {"ids": torch.from_numpy(ids), "counts": torch.from_numpy(counts)}

    def _positions(self, starts: np.ndarray, distinct: np.ndarray) -> np.ndarray:
        """The position of every pair, in bits. starts: the position of each row's first pair, in bytes"""
        before = np.concatenate([[0], np.cumsum(distinct)])
        place = np.arange(before[-1]) - np.repeat(before[:-1], distinct)
        return np.repeat(8 * starts, distinct) + place * self._bits


def _rows(file: Any, name: str, part: StoredRows) -> Tensor:
    rows: Tensor = file.get_slice(name)[part.slice]
    if len(rows) != len(part.rows):
        raise ValueError(f"'{name}' ends before the last row")
    return rows


def _require_range(ids: Tensor, least: int, vocabulary: int) -> None:
    if ids.numel() and not (int(ids.min()) >= least and int(ids.max()) < vocabulary):
        raise ValueError(f"ids from {int(ids.min())} to {int(ids.max())}: expected {least} to {vocabulary - 1}")
