"""Reads a published version of the student's weights (see `publish.py`) without trusting its files.

Other users may be able to write to this folder. So a file is opened only if the manifest names it and it is a regular
file in the folder itself: links are not followed, and pipes do not block. The number of bytes that are read is
limited. A file's content is used only if it has the hash that the manifest gives for it.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from stillhouse.display import escaped

MANIFEST = "manifest.json"
VERSION_PREFIX = "version-"
#: the maximum bytes of a manifest, and of all files without tensors together, such as the tokenizer's files
MANIFEST_BYTES, OTHER_BYTES = 64 * 2**20, 512 * 2**20
_PIECE = 2**20
_AGAIN = "publish the weights again"


class AdapterBase(BaseModel):
    """The model on which an adapter was trained.

    fingerprint: the hash of the model's files (`model_fingerprint`).
    dtype: the dtype of the model's weights in the run.
    quantize: the quantization of the model's linear layers, or None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    fingerprint: str
    dtype: str
    quantize: str | None


class WeightsManifest(BaseModel):
    """The content of manifest.json.

    version: the number of optimizer steps after which the weights were published.
    run: the identity of the run that published the weights; empty if the run has no identity.
    kind: whether the tensors are a model, or only an adapter.
    dtypes: the dtypes of the tensors, as safetensors names them.
    tensors: for each tensor, the name of the file that contains it.
    files: the sha256 of each file except the manifest.
    complete: always true; a manifest without this field was not written to its end.
    base: the model on which a published adapter was trained.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: int
    run: str
    kind: Literal["model", "adapter"]
    dtypes: list[str]
    tensors: dict[str, str]
    files: dict[str, str]
    complete: Literal[True]
    base: AdapterBase | None = None


class NoVersionError(ValueError):
    """A path has no complete version of the weights. The message describes the problem."""


class PublishedFolder:
    """A published folder that is being read.

    sha256: the hash of the manifest. Because the manifest contains the hashes of all files, two folders with the same
        hash contain the same version of the same run.
    """

    def __init__(self, path: Path, descriptor: int):
        self.path, self._descriptor = path, descriptor
        names = set(os.listdir(descriptor))
        if MANIFEST not in names:
            raise NoVersionError(f"{path} is no complete version of the weights: it has no {MANIFEST}")
        try:
            with self._opened(MANIFEST, MANIFEST_BYTES) as file:
                content = file.read(MANIFEST_BYTES)
            self.manifest = WeightsManifest.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise NoVersionError(f"{path / MANIFEST} is damaged: {first['msg']}") from error
        except ValueError as error:
            raise NoVersionError(str(error)) from error
        self.sha256 = hashlib.sha256(content).hexdigest()
        numbered = re.fullmatch(rf"{VERSION_PREFIX}(\d+)", self.path.name)
        if numbered is not None and int(numbered[1]) != self.manifest.version:
            raise ValueError(
                f"{self.path} holds version {self.manifest.version}, which is not the version in its name: {_AGAIN}"
            )
        manifest = self.manifest
        for name in [*manifest.files, *manifest.tensors.values()]:
            shown = escaped(name)[:200]
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise ValueError(f"{self.path / MANIFEST} names '{shown}': expected a file of this folder; {_AGAIN}")
            if name not in names:
                raise ValueError(f"{self.path} lacks the file {shown}, which its {MANIFEST} names: {_AGAIN}")
        unknown = {name for name in names if name.endswith(".safetensors")} - manifest.files.keys()
        if unknown or not set(manifest.tensors.values()) <= manifest.files.keys():
            raise ValueError(f"{self.path} has other files with tensors than its {MANIFEST} names: {_AGAIN}")

    def read(self, name: str, most_bytes: int) -> bytes:
        """Read a file that the manifest names. Raises ValueError if the file's hash differs from the manifest, or if
        the file has more than `most_bytes` bytes.
        """
        with self._opened(name, most_bytes) as file:
            content = file.read(os.fstat(file.fileno()).st_size)
        self._require_hash(name, hashlib.sha256(content).hexdigest())
        return content

    def compare(self, name: str, most_bytes: int) -> int:
        """Check a file as `read` does, without keeping its content in memory, and return the file's size."""
        digest, size = hashlib.sha256(), 0
        with self._opened(name, most_bytes) as file:
            while size <= most_bytes and (piece := file.read(_PIECE)):
                digest.update(piece)
                size += len(piece)
        self._require_hash(name, digest.hexdigest())
        return size

    @contextmanager
    def _opened(self, name: str, most_bytes: int) -> Iterator[IO[bytes]]:
        """Open a regular file directly in the folder. Raises ValueError for other files, and does not open them."""
        path = self.path / escaped(name)[:200]
        try:
            # the file type is also checked before opening, because opening a device may already have an effect
            _require_regular(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False), path, most_bytes)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, dir_fd=self._descriptor), "rb") as file:
                _require_regular(os.fstat(file.fileno()), path, most_bytes)
                yield file
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}; {_AGAIN}") from error

    def _require_hash(self, name: str, sha256: str) -> None:
        if sha256 != self.manifest.files[name]:
            raise ValueError(f"{self.path / escaped(name)[:200]} does not have its published content: {_AGAIN}")


@contextmanager
def published_folder(path: Path) -> Iterator[PublishedFolder]:
    """Open a folder of published weights for reading. Raises ValueError if the manifest and the file names show that
    the folder is incomplete or was changed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        shown = escaped(str(path))[:200]
        raise NoVersionError(f"{shown} is no complete version of the weights: {error.strerror}") from error
    try:
        yield PublishedFolder(path, descriptor)
    finally:
        os.close(descriptor)


def _require_regular(status: os.stat_result, path: Path, most_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is a link, a folder, a pipe or a device: expected a regular file; {_AGAIN}")
    if status.st_size > most_bytes:
        raise ValueError(f"{path} has {status.st_size:,} bytes: expected at most {most_bytes:,}; {_AGAIN}")
