"""DistillKit's compressed log-probabilities: Parquet files with one document per row.

    input_ids               list of N ids
    compressed_logprobs     list of N - 1 lists of bytes: row t is the teacher's distribution of token t + 1
    bytepacked_indices      list of N - 1 lists of bytes

DistillKit's `DistributionQuantizationConfig` defines the meaning of the bytes. It is not in the Parquet files; newer
versions write it to compression_config.yaml in the same folder. Only the exact form (exact_k = k) is supported: a row
has K log-probabilities in `exact_dtype`, little-endian, in descending order; with `delta_encoding`, it has the first
log-probability and K - 1 differences. Each id has ceil(log2 d) bits, the most significant bit first. Forms that
approximate log-probabilities (by a polynomial or by quantized residuals) are refused.

N tokens, K ids per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from stillhouse.libraries import reading
from stillhouse.objective.signals import TAIL_FLOOR
from stillhouse.signals.cache.bits import bytes_for, pack_rows, unpack_rows
from stillhouse.signals.signal_checks import MASS_TOLERANCE
from stillhouse.signals.signal_spec import DTYPES

CONFIGURATION = "compression_config.yaml"
COLUMNS = ("input_ids", "compressed_logprobs", "bytepacked_indices")
SCHEMA = pa.schema(
    [pa.field(COLUMNS[0], pa.list_(pa.uint64()))]
    + [pa.field(name, pa.list_(pa.list_(pa.uint8()))) for name in COLUMNS[1:]]
)
#: documents per row group in the Parquet files that this module writes
GROUP = 64


@dataclass(frozen=True)
class Compression:
    """The keys of DistillKit's configuration that the exact form uses; see the module's docstring.

    d: the size of the vocabulary
    k: ids per row
    """

    d: int
    k: int
    exact_dtype: str
    delta_encoding: bool

    @classmethod
    def of(cls, keys: Any, source: object) -> "Compression":
        """Raises ValueError with the source and the key if this is not a configuration of the exact form."""
        if not isinstance(keys, dict):
            raise ValueError(f"{source}: expected the keys of DistillKit's compression configuration")
        numbers: dict[str, int] = {}
        for key in ("d", "k", "exact_k"):
            value = keys.get(key)
            if type(value) is not int or value < 1:
                raise ValueError(f"{source}: {key} is {value!r}: expected a positive number")
            numbers[key] = value
        for key in ("polynomial_terms", "residual_bins"):
            if keys.get(key):
                raise ValueError(
                    f"{source}: {key} approximates log-probabilities: expected the exact form, exact_k = k"
                )
        if numbers["exact_k"] != numbers["k"]:
            raise ValueError(f"{source}: exact_k is {numbers['exact_k']} of k = {numbers['k']}: expected all exact")
        dtype, delta = keys.get("exact_dtype", "float32"), keys.get("delta_encoding", True)
        if dtype not in DTYPES or type(delta) is not bool:
            raise ValueError(
                f"{source}: exact_dtype {dtype!r}, delta_encoding {delta!r}: expected {', '.join(DTYPES)}"
            )
        return cls(numbers["d"], numbers["k"], dtype, delta)

    def as_dict(self) -> dict[str, Any]:
        return {
            "d": self.d,
            "k": self.k,
            "exact_k": self.k,
            "exact_dtype": self.exact_dtype,
            "polynomial_terms": None,
            "residual_bins": [],
            "delta_encoding": self.delta_encoding,
        }

    @property
    def id_bits(self) -> int:
        """The number of bits of an id, computed in float32 as in DistillKit."""
        return max(1, int(np.ceil(np.log2(np.float32(self.d)))))

    @property
    def row_bytes(self) -> tuple[int, int]:
        """The number of bytes of a row in the column of log-probabilities, and in the column of ids."""
        return self.k * DTYPES[self.exact_dtype].itemsize, bytes_for(self.k, self.id_bits)


class DistillkitFiles:
    """The Parquet files of a folder, or a single file. Raises ValueError with the file's name for another format."""

    def __init__(self, source: Path, compression: Compression):
        self.compression = compression
        paths = [source] if source.is_file() else sorted(source.glob("*.parquet"), key=_by_number)
        if not paths:
            raise ValueError(f"{source} has no Parquet files")
        #: for every document: the file, the row group, and the row in the group
        self._places: list[tuple[Path, int, int]] = []
        self._group: tuple[tuple[Path, int], pa.Table] | None = None
        for path in paths:
            with reading(f"{path} is not a Parquet file with {', '.join(COLUMNS)}"):
                file = pq.ParquetFile(path)
                missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
                if missing:
                    raise ValueError(f"it has no column {missing[0]}")
                groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            self._places += [(path, number, at) for number, rows in enumerate(groups) for at in range(rows)]

    def __len__(self) -> int:
        return len(self._places)

    def where(self, document: int) -> str:
        path, group, at = self._places[document]
        return f"{path} row group {group} row {at}"

    def tokens(self) -> Iterator[np.ndarray]:
        """Yield the ids of each document, int64, with one row group in memory at a time."""
        for document, (path, group, at) in enumerate(self._places):
            if at == 0:
                with reading(f"{path} is damaged"):
                    column = pq.ParquetFile(path).read_row_group(group, columns=[COLUMNS[0]])[COLUMNS[0]]
            with reading(f"{self.where(document)}: 'input_ids' is no list of ids"):
                yield np.array(column[at].values.cast(pa.int64()).to_numpy(zero_copy_only=False), dtype=np.int64)

    def signal(self, document: int, rows: int, vocabulary: int) -> dict[str, Tensor]:
        """The tensors of "top_k" for the first `rows` rows. Raises ValueError if a row is not a distribution."""
        path, group, at = self._places[document]
        if self._group is None or self._group[0] != (path, group):
            with reading(f"{path} is damaged"):
                self._group = (path, group), pq.ParquetFile(path).read_row_group(group, columns=list(COLUMNS[1:]))
        table, where = self._group[1], self.where(document)
        parts = []
        for name, size in zip(COLUMNS[1:], self.compression.row_bytes, strict=True):
            with reading(f"{where}: '{name}' is no list of rows of {size} bytes each"):
                parts.append(_bytes(table[name][at].values, size))
        if len(parts[0]) != len(parts[1]) or len(parts[0]) not in (rows, rows + 1):
            raise ValueError(
                f"{where}: {len(parts[0])} and {len(parts[1])} rows of {rows + 1} tokens: expected {rows} of both"
            )
        return _checked(where, self.compression, vocabulary, parts[0][:rows], parts[1][:rows])


def write_parquet(
    path: Path, compression: Compression, documents: Iterator[tuple[np.ndarray, dict[str, Tensor]]]
) -> None:
    """Write a Parquet file without `delta_encoding`.

    documents: for each document, the token ids and the tensors of the signal "top_k" without the last row
    """
    with pq.ParquetWriter(path, SCHEMA) as writer:
        group: list[dict[str, Any]] = []
        for tokens, tensors in documents:
            log_probs = tensors["log_probs"].to(DTYPES[compression.exact_dtype]).contiguous()
            ids = pack_rows(tensors["ids"].numpy(), compression.id_bits)
            columns = tokens.astype(np.uint64), list(log_probs.view(torch.uint8).numpy()), list(ids)
            group.append(dict(zip(COLUMNS, columns, strict=True)))
            if len(group) == GROUP:
                writer.write_table(pa.Table.from_pylist(group, schema=SCHEMA))
                group = []
        if group:
            writer.write_table(pa.Table.from_pylist(group, schema=SCHEMA))


def _checked(
    where: str, compression: Compression, vocabulary: int, log_prob_bytes: np.ndarray, id_bytes: np.ndarray
) -> dict[str, Tensor]:
    dtype = DTYPES[compression.exact_dtype]
    log_probs = torch.from_numpy(log_prob_bytes).view(dtype)
    if compression.delta_encoding:
        log_probs = log_probs.float().cumsum(1).to(dtype)
    ids = torch.from_numpy(unpack_rows(id_bytes, compression.k, compression.id_bits).astype(np.int32))
    tolerance = MASS_TOLERANCE[compression.exact_dtype]
    mass_N = log_probs.double().exp().sum(1)
    ordered = ids.sort(1).values
    problems = {
        f"an id that is not in the vocabulary of {vocabulary}": (ids >= min(vocabulary, compression.d)).any(1),
        "an id twice": (ordered[:, 1:] == ordered[:, :-1]).any(1),
        "a log-probability that is NaN or positive": ~(log_probs <= 0).all(1),
        "fewer entries than k": log_probs.isneginf().any(1),
        "log-probabilities that do not descend": (log_probs[:, 1:] > log_probs[:, :-1]).any(1),
        "more mass than 1": mass_N > 1 + tolerance,
    }
    for problem, is_wrong_N in problems.items():
        if is_wrong_N.any():
            raise ValueError(
                f"{where}: the distribution of token {int(is_wrong_N.nonzero()[0, 0]) + 1} has {problem}; "
                "is this the configuration that the file was written with?"
            )
    tail_N = (1 - mass_N).clamp(min=TAIL_FLOOR).log().float()
    return {"ids": ids, "log_probs": log_probs, "tail_log_prob": tail_N}


def _bytes(rows: pa.ListArray, size: int) -> np.ndarray:
    """Convert to an array [rows, size]."""
    lengths = rows.value_lengths()
    if rows.null_count or (len(rows) and {length.as_py() for length in lengths.unique()} != {size}):
        raise ValueError(f"its rows have {lengths.unique().to_pylist()[:5]} bytes")
    flat = rows.flatten()
    if flat.null_count or flat.type != pa.uint8():
        raise ValueError(f"its values are {flat.type}, {flat.null_count} of them null")
    return np.array(flat.to_numpy(zero_copy_only=False)).reshape(len(rows), size)


def _by_number(path: Path) -> tuple[int, str]:
    digits = "".join(character for character in path.stem if character.isdigit())
    return (int(digits) if digits else -1, path.name)
