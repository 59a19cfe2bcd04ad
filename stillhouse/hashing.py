"""Hashes of files and of values, as hexadecimal text."""

import hashlib
import json
from pathlib import Path
from typing import Any


def file_hash(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file directly in a folder, by name; "" for entries that are not files."""
    return {path.name: file_hash(path) if path.is_file() else "" for path in sorted(folder.iterdir())}


def json_hash(content: Any) -> str:
    """Return the sha256 of a value of JSON types. The order of a dict's keys has no effect."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
