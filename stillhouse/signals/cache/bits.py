"""Packs unsigned integers of 1 to 41 bits into a string of bits, the most significant bit first."""

from typing import TypeVar

import numpy as np

Count = TypeVar("Count", int, np.ndarray)
#: an integer of this many bits extends over at most `_REACH` bytes, also if it begins at the last bit of a byte
WIDEST = 41
_REACH = 6


def bits_for(values: int) -> int:
    """The number of bits of an integer in [0, values); at least 1."""
    return max(1, (values - 1).bit_length())


def bytes_for(numbers: Count, width: int) -> Count:
    """The number of bytes for `numbers` integers of `width` bits; elementwise for an array."""
    return -(-numbers * width // 8)


def write_bits(values: np.ndarray, positions: np.ndarray, width: int, size: int) -> np.ndarray:
    """Return a string of `size` bytes, uint8, with each value at its position.

    values: integers, 0 ≤ value < 2^width
    positions: the first bit of each value; the values must not overlap
    """
    _require_width(width)
    shifts = (8 * _REACH - width - (positions & 7)).astype(np.uint64)
    shifted = values.astype(np.uint64) << shifts
    string = np.zeros(size + _REACH, dtype=np.uint8)
    for at in range(_REACH):
        part = (shifted >> np.uint64(8 * (_REACH - 1 - at))).astype(np.uint8)
        np.bitwise_or.at(string, (positions >> 3) + at, part)
    return string[:size]


def read_bits(string: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
    """The values at these positions of a string that `write_bits` returned, uint64."""
    _require_width(width)
    padded = np.concatenate([string, np.zeros(_REACH, dtype=np.uint8)])
    values = np.zeros(positions.shape, dtype=np.uint64)
    for at in range(_REACH):
        values = (values << np.uint64(8)) | padded[(positions >> 3) + at].astype(np.uint64)
    shifts = (8 * _REACH - width - (positions & 7)).astype(np.uint64)
    return (values >> shifts) & np.uint64((1 << width) - 1)


def pack_rows(values: np.ndarray, width: int) -> np.ndarray:
    """Pack each row of integers [N, K] into a separate string: [N, ceil(K·width / 8)] uint8."""
    rows, numbers = values.shape
    stride = bytes_for(numbers, width)
    return write_bits(values, _places(rows, numbers, width), width, rows * stride).reshape(rows, stride)


def unpack_rows(strings: np.ndarray, numbers: int, width: int) -> np.ndarray:
    """The inverse of `pack_rows`; numbers: K."""
    return read_bits(strings.reshape(-1), _places(len(strings), numbers, width), width)


def _places(rows: int, numbers: int, width: int) -> np.ndarray:
    starts = np.arange(rows, dtype=np.int64)[:, None] * (8 * bytes_for(numbers, width))
    return starts + np.arange(numbers, dtype=np.int64) * width


def _require_width(width: int) -> None:
    if not 1 <= width <= WIDEST:
        raise ValueError(f"integers of {width} bits: expected 1 to {WIDEST}")
