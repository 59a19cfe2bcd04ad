"""A hash of a model's files: of their full content, or of samples if the weights are large."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stillhouse.hashing import file_hash
from stillhouse.models.weight_files import weight_files

#: files up to this total size are hashed completely
WHOLE_BYTES = 2**30
#: for larger weights: the number of evenly spaced samples of each tensor, and the bytes of a sample
_SAMPLES, _SAMPLE_BYTES = 32, 4096


def model_fingerprint(folder: str | os.PathLike[str]) -> str:
    """Return a sha256 of a model folder's configuration, its weights and the code that the configuration names.

    Other safetensors files in the folder (see `weight_files`) do not change it.

    If the files exceed `WHOLE_BYTES` in total, the hash covers only the sizes and headers of the safetensors files
    and samples of each tensor. It then still detects another model, or the same model after more training, but may
    miss a change of a few rows of a large matrix. Raises ValueError for a safetensors file with an unreadable header.
    """
    root, digest = Path(folder), hashlib.sha256()
    config = root / "config.json"
    patterns = ["config.json", "*.safetensors.index.json"]
    if config.is_file() and b"auto_map" in config.read_bytes():
        patterns.append("*.py")
    weights = (path for path in weight_files(root) if path.is_file())  # whoever reads them refuses a missing file
    paths = sorted({path for pattern in patterns for path in root.glob(pattern)}.union(weights))
    is_small = sum(path.stat().st_size for path in paths) <= WHOLE_BYTES
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        if is_small or path.suffix != ".safetensors":
            digest.update(bytes.fromhex(file_hash(path)))
        else:
            with path.open("rb") as file:
                _add_samples(digest, path, file)
    return digest.hexdigest()


def _add_samples(digest: Any, path: Path, file: BinaryIO) -> None:
    for start, stop in _ranges(path, file):
        for place in _places(start, stop):
            file.seek(place)
            digest.update(file.read(min(_SAMPLE_BYTES, stop - place)))


def _ranges(path: Path, file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges (start, stop) of a file's header and of each of its tensors."""
    size = path.stat().st_size
    header_stop = 8 + int.from_bytes(file.read(8), "little")
    try:
        if header_stop > size:
            raise ValueError(f"a header of {header_stop:,} bytes in a file of {size:,}")
        header: dict[str, Any] = json.loads(file.read(header_stop - 8))
        tensors = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        ranges = [(header_stop + start, header_stop + stop) for start, stop in tensors]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    file.seek(0)
    yield from _pieces(0, header_stop)
    yield from ranges


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split a range into pieces so short that the samples of each piece cover it completely."""
    step = _SAMPLES * _SAMPLE_BYTES
    return ((first, min(first + step, stop)) for first in range(start, stop, step))


def _places(start: int, stop: int) -> list[int]:
    """Return the start positions of the samples of a range."""
    last = max(start, stop - _SAMPLE_BYTES)
    return sorted({start + (last - start) * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
