"""Reads a signal's tensors from a shard, which has them unchanged, or packed without loss into few bits.

Version 0.1.0 could pack them, and this version writes none of these. Packed tensors of a shard, for D documents with
N rows in total, K ids or M draws per row, vocabulary V:

    ids             [N, ·] uint8        "top_k": each id in ceil(log2 V) bits; with a label, id + 1 in
                                        ceil(log2(V + 1)) bits, because an id may be -1
    distinct        [N] uint8           "sampled": the number of distinct ids of a row
    pairs           [·] uint8           pairs (id, its count - 1), one after the other; the pairs of each row begin at
                                        a new byte
    pair_offsets    [D+1] int64         the pairs of document d are the bytes pair_offsets[d]:pair_offsets[d+1]
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from stillhouse.signals.signal_spec import SignalSpec

#: an integer of at most this many bits extends over `_REACH` bytes, also if it begins at the last bit of a byte
_WIDEST = 41
_REACH = 6

Count = TypeVar("Count", int, np.ndarray)
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
        raise ValueError("hidden states have no packed form: expected top_k or sampled")
    return PackedDraws(spec, vocabulary) if spec.kind == "sampled" else PackedIds(spec, vocabulary)


@dataclass(frozen=True)
class Plain(ShardLayout):
    spec: SignalSpec
    width: int

    def forms(self) -> TensorForms:
        return self.spec.tensors(self.width)

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


def bits_for(values: int) -> int:
    """The number of bits of an integer in [0, values); at least 1."""
    return max(1, (values - 1).bit_length())


def bytes_for(numbers: Count, width: int) -> Count:
    """The number of bytes for `numbers` integers of `width` bits; elementwise for an array."""
    return -(-numbers * width // 8)


def read_bits(string: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
    """The integers of `width` bits at these positions of a string, uint64; the most significant bit is first."""
    if not 1 <= width <= _WIDEST:
        raise ValueError(f"integers of {width} bits: expected 1 to {_WIDEST}")
    padded = np.concatenate([string, np.zeros(_REACH, dtype=np.uint8)])
    values = np.zeros(positions.shape, dtype=np.uint64)
    for at in range(_REACH):
        values = (values << np.uint64(8)) | padded[(positions >> 3) + at].astype(np.uint64)
    shifts = (8 * _REACH - width - (positions & 7)).astype(np.uint64)
    return (values >> shifts) & np.uint64((1 << width) - 1)


def unpack_rows(strings: np.ndarray, numbers: int, width: int) -> np.ndarray:
    """The integers [N, K] of N strings, each of which has K = `numbers` integers of `width` bits."""
    return read_bits(strings.reshape(-1), _places(len(strings), numbers, width), width)


def _places(rows: int, numbers: int, width: int) -> np.ndarray:
    starts = np.arange(rows, dtype=np.int64)[:, None] * (8 * bytes_for(numbers, width))
    return starts + np.arange(numbers, dtype=np.int64) * width
