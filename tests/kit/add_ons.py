"""Distributions with entry points, as pip installs them, in a folder of sys.path."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stillhouse import registry


def write_distribution(
    folder: Path, groups: Mapping[str, Mapping[str, str]], modules: Mapping[str, str], name: str = "add_on"
) -> None:
    """Write modules and the metadata of a distribution. groups: for each group, the objects by names of entries."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines: list[str] = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    for path, text in modules.items():
        (folder / path).write_text(text)


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Let this process see the distributions of a folder."""
    sys.path.insert(0, str(folder))
    try:
        _forget()
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if (folder / f"{name}.py").exists()]:
            del sys.modules[name]
        _forget()


def _forget() -> None:
    importlib.invalidate_caches()
    registry.registered.cache_clear()
    registry.load.cache_clear()
