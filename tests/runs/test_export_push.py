"""`stillhouse export --push` uploads the exported folder to a hub over HTTP, here a server on loopback."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from artefacts.write_artefacts import ARTEFACTS
from huggingface_hub import constants
from kit.runs import ROOT, contents, run
from kit.stub_hub import TOKEN, StubHub

import stillhouse


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint, in the working directory; the hub's settings are those of a user without a login."""
    shutil.copytree(ARTEFACTS / stillhouse.__version__, tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return tmp_path / "files" / "run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with StubHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


def test_the_repository_has_the_exported_files(hub: StubHub) -> None:
    ended = run("export", "run", "--out", "exported", "--push", "me/student")
    assert hub.repositories == {"me/student": contents(Path("exported"))}
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= hub.repositories["me/student"].keys()
    assert hub.private == {"me/student"}
    assert hub.messages == ["stillhouse: exported step 2"]
    assert ended.out == f"exported step 2 to exported\npushed: {hub.url}/me/student/commit/{'0' * 40}\n"
    assert TOKEN not in ended.out + ended.err


def test_a_repository_that_exists_gets_the_new_files(hub: StubHub) -> None:
    hub.repositories["me/student"] = {"notes.txt": b"kept"}
    run("export", "run", "--out", "exported", "--no-card", "--push", "me/student")
    assert hub.repositories == {"me/student": contents(Path("exported")) | {"notes.txt": b"kept"}}
    assert not hub.private


@pytest.mark.parametrize(("token", "name"), [("hf_wrong", "me/student"), (TOKEN, "no name")])
def test_what_the_hub_refuses_is_found_before_the_export(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, token: str, name: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    ended = run("export", "run", "--out", "exported", "--push", name, code=1)
    assert ended.err.startswith(f"error: --push {name}: the hub did not accept the repository: ")
    assert len(ended.err.splitlines()) == 1
    assert not Path("exported").exists()


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubHub() as hub:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    ended = run("export", "run", "--out", "exported", "--push", "me/student", code=1)
    assert ended.err.startswith("error: --push me/student: the hub did not accept the repository: ")


def test_a_failed_upload_leaves_the_folder_and_says_how_to_repeat_it(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fails = ("/objects/batch",)
    ended = run("export", "run", "--out", "exported", "--push", "me/student", code=1)
    assert "exported is complete; upload it with `hf upload me/student exported`" in ended.err
    assert (Path("exported") / "model.safetensors").exists()
    assert hub.repositories == {"me/student": {}}


@pytest.mark.slow
def test_the_environment_names_the_hub(hub: StubHub, tmp_path: Path) -> None:
    """In a process of its own, as a user gives the command."""
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "stillhouse", "export", "run", "--out", "exported", "--push", "me/student"]
    ended = subprocess.run(
        command,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert hub.repositories == {"me/student": contents(Path("exported"))}
