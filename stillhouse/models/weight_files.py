"""Finds the weight files of a model's folder, in the same way as transformers, and hashes them.

Other safetensors files in a folder are not read: shards of an earlier download, a file that was replaced by an index,
or variants such as model.fp16.safetensors.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import safe_open
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from stillhouse.display import escaped
from stillhouse.hashing import file_hash
from stillhouse.libraries import reading

SAFETENSORS, INDEX = ".safetensors", ".safetensors.index.json"
EXPECTED = "expected the name of a safetensors file of the same folder; nothing else is read"
#: files up to this total size are hashed completely
WHOLE_BYTES = 2**30
#: for larger files: the number of evenly spaced samples of each tensor, and the number of bytes of a sample
_SAMPLES, _SAMPLE_BYTES = 32, 4096
_NUMBERS = range(_SAMPLES)


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the weight files of a model's folder, sorted by name. The files need not exist.

    `transformers_weights` in config.json, if present, names the weight file or an index of several weight files.
    Without this key, the weight file is model.safetensors if it exists; otherwise, the weight files are those in
    model.safetensors.index.json. Raises ValueError for names that are not those of safetensors files in the folder.
    """
    return [Path(folder) / name for name in sorted(set(_placed(Path(folder)).values()))]


def tensor_files(folder: str | os.PathLike[str], *, partial: bool = False) -> dict[str, Path]:
    """Return the file of each tensor in a model's folder, by the tensor's name; {} for a folder without weights.

    partial: whether files of the index can be missing. The tensors of a missing file are those that the index lists.
    Raises ValueError, naming the file, for a file that is missing or damaged, and for a file without a tensor that
    the index places there.
    """
    tensors_of, files = defaultdict[str, set[str]](set), dict[str, Path]()
    for tensor, name in _placed(Path(folder)).items():
        tensors_of[name] |= {tensor} - {""}
    for name, tensors in sorted(tensors_of.items()):
        path = Path(folder) / name
        if partial and not path.is_file():
            files |= dict.fromkeys(tensors, path)
            continue
        if not path.is_file():
            raise ValueError(
                f"{path} is missing, but {CONFIG_NAME} or the index of this folder names it: expected this file"
            )
        with reading(f"{path} is not a readable safetensors file"), safe_open(path, framework="pt") as file:
            stored = set(file.keys())
        if absent := sorted(tensors - stored):
            raise ValueError(
                f"{path} has no tensor {escaped(absent[0])!r}, which the index of this folder places there: expected "
                "the files for which the index was written"
            )
        files |= dict.fromkeys(stored, path)
    return files


def read_tensor(path: Path, name: str) -> Tensor:
    """Return a tensor of a file. Raises ValueError, naming the file, if the tensor cannot be read."""
    with reading(f"{path}: its weights cannot be read"), safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def require_index(index: str, content: dict[str, Any]) -> dict[str, str]:
    """Return the file of each tensor in an index.

    content: the content of the index, or {} if there is no index.

    Raises ValueError for files that are not safetensors files in the index's folder.
    """
    if content and not isinstance(content.get("metadata"), dict):
        raise ValueError(f"{index} has no object 'metadata', which transformers needs: expected at least {{}}")
    files = content.get("weight_map", None if content else {})
    if not isinstance(files, dict):
        raise ValueError(f"{index}: weight_map: expected an object that maps tensors to files")
    for file in files.values():
        if not isinstance(file, str) or not file.endswith(SAFETENSORS) or os.path.basename(file) != file:
            raise ValueError(f"{index} names the file {file!r:.80}: {EXPECTED}")
    return files


def named_weights(folder: str, config: dict[str, Any]) -> str | None:
    """Return the file that `transformers_weights` names, if any. Raises ValueError for a file outside the folder."""
    name = config.get("transformers_weights")
    if name is None:
        return None
    if not isinstance(name, str) or not name.endswith((SAFETENSORS, INDEX)) or os.path.basename(name) != name:
        raise ValueError(f"{folder}/{CONFIG_NAME}: transformers_weights is {name!r:.80}: {EXPECTED}")
    return name


def json_object(name: str | os.PathLike[str], file: str, revision: str | None = None) -> dict[str, Any]:
    """Return the object in a JSON file of a folder or hub id, or {} if the file is not found.

    Raises ValueError for a file that is not a JSON object.
    """
    what = f"model '{escaped(os.fspath(name))}' cannot be read: its {file}"
    try:
        path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # the name does not exist or cannot be reached
        return {}
    if path is None:
        return {}
    with reading(f"{what} is not JSON"), open(path, encoding="utf-8") as text:
        content = json.load(text)
    if not isinstance(content, dict):
        raise ValueError(f"{what} holds a {type(content).__name__}, expected a JSON object")
    return content


def _placed(folder: Path) -> dict[str, str]:
    """Return the file of each tensor in the index, or {"": file} for a single file without an index."""
    shown = escaped(os.fspath(folder))
    name = named_weights(shown, json_object(folder, CONFIG_NAME))
    if name is None:
        name = SAFE_WEIGHTS_NAME if (folder / SAFE_WEIGHTS_NAME).is_file() else SAFE_WEIGHTS_INDEX_NAME
    if not name.endswith(INDEX) or (name != SAFE_WEIGHTS_INDEX_NAME and not (folder / name).is_file()):
        return {"": name}
    return require_index(f"{shown}/{name}", json_object(folder, name))


def model_fingerprint(folder: str | os.PathLike[str]) -> str:
    """Return a sha256 of a model folder's configuration, its weights and the code that the configuration names.

    If the files exceed `WHOLE_BYTES` in total, the hash covers safetensors files only by their sizes, their headers
    and samples of each tensor, so it may miss a change of a few rows of a large matrix. Raises ValueError for a
    safetensors file with an unreadable header.
    """
    root, digest = Path(folder), hashlib.sha256()
    config = root / "config.json"
    patterns = ["config.json", "*.safetensors.index.json"]
    if config.is_file() and b"auto_map" in config.read_bytes():
        patterns.append("*.py")
    weights = (path for path in weight_files(root) if path.is_file())  # loaders refuse missing files
    paths = sorted({path for pattern in patterns for path in root.glob(pattern)}.union(weights))
    is_small = sum(path.stat().st_size for path in paths) <= WHOLE_BYTES
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        if is_small or path.suffix != ".safetensors":
            digest.update(bytes.fromhex(file_hash(path)))
        else:
            with path.open("rb") as file:
                for start, stop in _ranges(path, file):
                    last = max(start, stop - _SAMPLE_BYTES)
                    for place in sorted({start + (last - start) * number // (_SAMPLES - 1) for number in _NUMBERS}):
                        file.seek(place)
                        digest.update(file.read(min(_SAMPLE_BYTES, stop - place)))
    return digest.hexdigest()


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
    # the header is divided into ranges of this length, because their samples cover all of their bytes
    step = _SAMPLES * _SAMPLE_BYTES
    yield from ((first, min(first + step, header_stop)) for first in range(0, header_stop, step))
    yield from ranges
