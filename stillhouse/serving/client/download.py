"""Fetches a teacher's configuration, tokenizer and output head from `stillhouse serve`, once per machine and teacher.

The files are kept in `~/.cache/stillhouse/teachers`, or in `$STILLHOUSE_CACHE/teachers`. Every file is compared with
its hash, even if an earlier run has fetched it.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from stillhouse.hashing import folder_hashes
from stillhouse.serving.client.apis.server_api import ServerInfo
from stillhouse.serving.client.pool import ServerPool
from stillhouse.serving.wire import HEAD_FILE

#: allowed file names: not a path, not a file with code, and not a format that a loader would unpickle
_ALLOWED = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.(json|txt|model|jinja|safetensors)")

#: the most files of a teacher, and the most bytes of one that is not its head, such as a large tokenizer
MOST_FILES, MOST_FILE_BYTES = 100, 256 * 2**20


def download_teacher(pool: ServerPool, info: ServerInfo) -> Path:
    """Return the folder of the teacher's files. Raises ValueError if a file does not have the hash in `info`."""
    if len(info.files) > MOST_FILES:
        raise ValueError(
            f"{info.url} offers {len(info.files):,} files: expected configuration, tokenizer and head only"
        )
    for name in info.files:
        if not _ALLOWED.fullmatch(name):
            raise ValueError(f"{info.url} offers a file {name!r}: expected configuration, tokenizer and head only")
    if "config.json" not in info.files or HEAD_FILE not in info.files:
        raise ValueError(f"{info.url} offers {sorted(info.files)}: expected config.json and {HEAD_FILE} among them")
    table = json.dumps(sorted(info.files.items())).encode()
    root = Path(os.environ.get("STILLHOUSE_CACHE", "~/.cache/stillhouse")).expanduser()
    folder = root / "teachers" / hashlib.sha256(table).hexdigest()[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir() or folder_hashes(folder) != dict(info.files):
            _fetch(pool, info, folder)
    return folder


def _fetch(pool: ServerPool, info: ServerInfo, folder: Path) -> None:
    # a head in float64, and its bias
    most_bytes = MOST_FILE_BYTES + 8 * (info.vocabulary or 0) * ((info.width or 0) + 1)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        for name, digest in info.files.items():
            path = "/v1/head" if name == HEAD_FILE else f"/v1/files/{name}"
            answer = pool.asker(info.url, most_bytes=most_bytes)(path, None)
            if answer.status != 200 or hashlib.sha256(answer.content).hexdigest() != digest:
                raise ValueError(
                    f"{info.url}{path} answers {answer.status} with {len(answer.content):,} bytes that do not "
                    "have the hash in /v1/info: are there several teachers behind one address?"
                )
            (Path(unfinished) / name).write_bytes(answer.content)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(unfinished, folder)
