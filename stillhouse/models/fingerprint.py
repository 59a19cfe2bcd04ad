"""A hash of a model's files that costs seconds whatever their size: all of the small ones, samples of the weights."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

#: of each tensor, how many samples of how many bytes are hashed: its beginning, its end, and places between
_SAMPLES, _SAMPLE_BYTES = 8, 4096
_SMALL = ("config.json", "generation_config.json", "adapter_config.json")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin")


def model_fingerprint(folder: str | os.PathLike[str]) -> str:
    """A sha256 over a model folder's configuration and weights.

    Of a safetensors file its size, its header and samples of each tensor count, of another file its size and samples
    of the whole. Two models that were trained differently differ in every sample; a file that lost a few bytes
    between samples may not. Raises ValueError for a safetensors file whose header cannot be read.
    """
    root, digest = Path(folder), hashlib.sha256()
    names = {path for pattern in (*_SMALL, *_WEIGHTS) for path in root.glob(pattern)}
    for path in sorted(names):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
            continue
        with path.open("rb") as file:
            for start, stop in _ranges(path, file, size):
                for place in _places(start, stop):
                    file.seek(place)
                    digest.update(file.read(min(_SAMPLE_BYTES, stop - place)))
    return digest.hexdigest()


def _ranges(path: Path, file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """The bytes of a file's header and of each of its tensors."""
    if path.suffix != ".safetensors":
        yield 0, size
        return
    header_stop = 8 + int.from_bytes(file.read(8), "little")
    try:
        if header_stop > size:
            raise ValueError(f"a header of {header_stop:,} bytes in a file of {size:,}")
        header: dict[str, Any] = json.loads(file.read(header_stop - 8))
        tensors = [each["data_offsets"] for name, each in header.items() if name != "__metadata__"]
        ranges = [(header_stop + start, header_stop + stop) for start, stop in tensors]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    file.seek(0)
    yield from _whole(0, header_stop)
    yield from ranges


def _whole(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges so short that samples cover all of them."""
    step = _SAMPLES * _SAMPLE_BYTES
    return ((each, min(each + step, stop)) for each in range(start, stop, step))


def _places(start: int, stop: int) -> list[int]:
    """Where the samples of a range begin."""
    last = max(start, stop - _SAMPLE_BYTES)
    return sorted({start + (last - start) * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
