"""Ranks with different settings, files or folders are refused before the first step."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.damaged_checkpoints import interrupted
from kit.ranks import Ranks
from kit.runs import Command, contents, run, save_model, wait_for, write_run, write_texts

from stillhouse.output import folder as run_folder
from stillhouse.run import agreement


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agree")
    write_run(folder)
    return folder


def in_folders(ranks_in: list[str]) -> None:
    """Give each rank another working directory, as on machines with separate disks."""
    agreement._SECONDS_TO_SEE = 0.5
    os.chdir(ranks_in[int(os.environ["RANK"])])


def in_separate_folders(here: Path, tmp_path: Path, *arguments: Any) -> Ranks:
    """Start two ranks in different working directories, so that one relative path names two folders."""
    folders = [tmp_path / "machine 0", tmp_path / "machine 1"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return Ranks(2, *arguments, hook=in_folders, hook_arguments=([str(folder) for folder in folders],))


def test_an_out_that_the_ranks_do_not_share(here: Path, tmp_path: Path) -> None:
    ranks = in_separate_folders(here, tmp_path, "distill", here / "run.yaml", "out=runs/a", "parallel.fsdp=2")
    assert ranks.wait() == [1, 1]
    assert ranks[0].err.startswith("error: out: runs/a is not one folder for all ranks: rank 0 on ")
    assert "expected a folder on a file system that all machines share\n" in ranks[0].err
    assert contents(tmp_path) == {}


def test_a_run_that_is_complete_on_one_machine_only(here: Path, tmp_path: Path) -> None:
    run("distill", here / "run.yaml", f"out={tmp_path}/machine 0/runs/a")
    before = contents(tmp_path)
    ranks = in_separate_folders(here, tmp_path, "distill", here / "run.yaml", "out=runs/a")
    assert ranks.wait() == [1, 1]
    assert "runs/a is not one folder for all ranks" in ranks[0].err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("override", ["train.learning_rate=0.002", "teacher.model=other"])
def test_a_rank_with_another_configuration(here: Path, tmp_path: Path, override: str) -> None:
    command = ["distill", here / "run.yaml", f"out={tmp_path}/out"]
    ranks = Ranks(2, *command, by_rank=[[], [override]])
    key = override.partition("=")[0]
    assert ranks.wait() == [2, 2]
    assert ranks[0].err.startswith(f"error: {key}: rank 0 has ")
    assert "every rank must be started with the same command and the same file\n" in ranks[0].err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "which",
    ["data.train", "student", *(slow(which) for which in ("teacher", "tokenizer", "the ids that end a completion"))],
)
def test_a_rank_with_other_files_under_the_same_name(here: Path, tmp_path: Path, which: str) -> None:
    """Each rank reads its own copy, as on machines with separate disks."""
    folders = [tmp_path / "machine 0", tmp_path / "machine 1"]
    for folder in folders:
        for name in ("student", "teacher"):
            shutil.copytree(here / name, folder / name)
        for name in ("train.jsonl", "eval.jsonl"):
            shutil.copy(here / name, folder / name)
    if which == "data.train":
        write_texts(folders[1] / "train.jsonl", 40, seed=5)
    elif which == "tokenizer":
        for name in ("student", "teacher"):
            path = folders[1] / name / "tokenizer.json"
            path.write_text(path.read_text().replace('"trim_offsets": true', '"trim_offsets": false'))
    elif which == "the ids that end a completion":
        path = folders[1] / "student" / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 9]}))
    else:
        shutil.rmtree(folders[1] / which)
        save_model(folders[1] / which, "qwen3" if which == "teacher" else "llama", seed=9)
    local = ["eval.samples=1", *(f"{name}.model={name}" for name in ("student", "teacher"))]
    local += [f"data.{name}={name}.jsonl" for name in ("train", "eval")]
    ranks = in_separate_folders(here, tmp_path, "distill", here / "run.yaml", f"out={tmp_path}/out", *local)
    assert ranks.wait() == [1, 1], ranks.texts
    named = ranks[0].err.partition("error: ")[2].partition(":")[0].partition(" (")[0]
    assert named == which
    assert "rank 1 and rank 0 read different files under the same name" in ranks[0].err
    assert not (tmp_path / "out").exists()


def report_older_version() -> None:
    run_folder.transformers.__version__ = "5.0.0"


def test_unlike_versions_are_a_warning(here: Path, tmp_path: Path) -> None:
    command = ["distill", here / "run.yaml", f"out={tmp_path}/out"]
    ranks = Ranks(2, *command, hook=report_older_version, hook_rank=1)
    assert ranks.wait() == [0, 0]
    assert "warning: rank 1 runs transformers 5.0.0 and rank 0 runs transformers 5." in ranks[0].out


def hold_before_lock(go: str, reached: str) -> None:
    """Let the process create the file `reached` just before it locks the folder, and wait for the file `go`."""
    from stillhouse.run import run as module

    original = module.folder_lock

    def waiting(folder: Any) -> Any:
        Path(reached).touch()
        wait_for(Path(go).exists)
        return original(folder)

    module.folder_lock = waiting


@pytest.mark.parametrize("ends", ["complete", "killed"])
def test_a_second_run_that_loaded_while_the_first_one_worked(complete_run: Path, tmp_path: Path, ends: str) -> None:
    """The second run starts while the folder is free, and gets the lock after the first one has ended or died."""
    out, go, reached = tmp_path / "out", tmp_path / "go", tmp_path / "reached"
    arguments = [complete_run / "run.yaml", f"out={out}"]
    hook: dict[str, Any] = {"hook": hold_before_lock, "hook_arguments": (str(go), str(reached))}
    other = Command("distill", *arguments, "train.learning_rate=0.5", **hook)
    wait_for(reached.exists)
    if ends == "complete":
        run("distill", *arguments)
    else:
        interrupted(complete_run, tmp_path)
    before = contents(out)
    go.touch()
    assert other.wait() == 1
    assert f"error: out: {out} contains another run, with a different train.learning_rate" in other.err
    assert contents(out) == before | {".lock": b""}


def test_the_same_run_started_twice(complete_run: Path, tmp_path: Path) -> None:
    """The second run resumes from the first run's last checkpoint, or does nothing if the first is complete."""
    out, go = tmp_path / "out", tmp_path / "go"
    arguments = [complete_run / "run.yaml", f"out={out}"]
    reached = [tmp_path / "reached 0", tmp_path / "reached 1"]
    waiting = [
        Command("distill", *arguments, hook=hold_before_lock, hook_arguments=(str(go), str(path))) for path in reached
    ]
    # the folder is written only after both have seen it empty: they never read a half copied one
    wait_for(lambda: all(path.exists() for path in reached))
    interrupted(complete_run, tmp_path)
    go.touch()
    codes = sorted(command.wait() for command in waiting)
    assert codes in ([0, 0], [0, 1])
    assert any(f"resuming from {out}/checkpoints/step-00000004" in command.out for command in waiting)
    if codes == [0, 1]:
        assert any("is writing to" in command.err for command in waiting)
    assert contents(out / "model") == contents(complete_run / "out" / "model")
