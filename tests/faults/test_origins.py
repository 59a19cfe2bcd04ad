"""A checkpoint, base model or configuration of another machine or another run is refused."""

import os
import shutil
from pathlib import Path

from kit.damaged_checkpoints import BEFORE, NEWEST, interrupted, zeroed
from kit.ranks import Ranks
from kit.runs import Command, contents, metrics, run, save_model, write_run
from kit.signal_hooks import at_step

from stillhouse.output.log import NoLog


def lose_folder(folder: str, step: int, to: str) -> None:
    """After `step`, rank 1 no longer sees the run's folder, as if its file system were unmounted."""
    os.chdir(folder)
    at_step(step, lambda: os.chdir(to), logs=(NoLog,))


def test_a_folder_that_one_rank_loses(tmp_path: Path) -> None:
    """The rank writes its file of the next checkpoint to another folder, so the checkpoint is not accepted."""
    write_run(tmp_path, **{"checkpoint.every": 2})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    arguments = ["distill", tmp_path / "run.yaml", "out=runs/a", "parallel.fsdp=2"]
    work = tmp_path / "work"
    work.mkdir()
    ranks = Ranks(2, *arguments, hook=lose_folder, hook_arguments=(str(work), 3, str(elsewhere)))
    assert ranks.wait() == [1, 1], ranks.texts
    assert "step-00000004 cannot be written: the ranks no longer see the same folder" in ranks[0].err
    assert [path.name for path in (work / "runs/a/checkpoints").iterdir() if path.suffix == ""] == [BEFORE]


def test_a_checkpoint_that_is_another_one_on_each_machine(run_on_two: tuple[Path, str], tmp_path: Path) -> None:
    """The two checkpoints have the same name, and both are intact."""
    folder, override = run_on_two
    for machine, step in (("0", BEFORE), ("1", NEWEST)):
        source = folder / "out" / "checkpoints" / step
        shutil.copytree(source, tmp_path / machine / "given")
    arguments = ["distill", folder / "run.yaml", f"out={tmp_path}/out", override, "checkpoint.resume=given"]
    ranks = Ranks(2, *arguments, hook=in_own_folder, hook_arguments=(str(tmp_path),))
    assert ranks.wait() == [1, 1], ranks.texts
    assert "error: given is not the same for all ranks: they read different versions of state.json" in ranks[0].err


def in_own_folder(parent: str) -> None:
    os.chdir(Path(parent) / os.environ["RANK"])


def replace_base(step: int, folder: str) -> None:
    def replace() -> None:
        shutil.rmtree(folder)
        save_model(Path(folder), "llama", seed=7)

    at_step(step, replace)


def test_a_base_that_is_replaced_while_its_adapter_is_trained(tmp_path: Path) -> None:
    write_run(tmp_path, **{"student.adapter": {"r": 4}})
    failed = Command(
        "distill", tmp_path / "run.yaml", hook=replace_base, hook_arguments=(3, str(tmp_path / "student"))
    )
    assert failed.wait() == 1
    assert failed.err.startswith(f"error: student: the files of {tmp_path}/student have changed since this run was")
    assert not (tmp_path / "out" / "model").exists()


def test_a_checkpoint_on_another_disk(complete_run: Path, tmp_path: Path) -> None:
    """A checkpoint that was moved and linked still belongs to the run, and the run keeps its log."""
    out = interrupted(complete_run, tmp_path)
    (out / "checkpoints" / NEWEST).rename(tmp_path / "larger disk")
    (out / "checkpoints" / NEWEST).symlink_to(tmp_path / "larger disk", target_is_directory=True)
    run("distill", complete_run / "run.yaml", f"out={out}")
    assert contents(out / "model") == contents(complete_run / "out" / "model")
    assert len(metrics(out)) == len(metrics(complete_run / "out"))


def test_an_edited_configuration_is_another_run(complete_run: Path, tmp_path: Path) -> None:
    """The edited file is the run's config.yaml, so only the checkpoint can show the difference."""
    out = interrupted(complete_run, tmp_path)
    path = out / "config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.001", "learning_rate: 0.003"))
    refused = run("distill", path, f"out={out}", code=1)
    assert f"error: the configuration has changed since {out}/checkpoints/{NEWEST} was written" in refused.err


def test_a_run_whose_initial_checkpoint_is_gone_or_damaged(complete_run: Path, tmp_path: Path) -> None:
    """The run resumes from its own checkpoints, so it needs the first one no longer."""
    start = tmp_path / "start" / BEFORE
    shutil.copytree(complete_run / "out" / "checkpoints" / BEFORE, start)
    arguments = [complete_run / "run.yaml", f"checkpoint.resume={start}", f"out={tmp_path}/out", "checkpoint.keep=9"]
    run("distill", *arguments)
    shutil.rmtree(tmp_path / "out" / "model")
    shutil.rmtree(start)
    checkpoints = tmp_path / "out" / "checkpoints"
    assert f"resuming from {checkpoints}/step-00000006" in run("distill", *arguments).out
    shutil.rmtree(tmp_path / "out" / "model")
    zeroed(checkpoints / "step-00000006")
    resumed = run("distill", *arguments, f"checkpoint.resume={checkpoints}/step-00000006", "checkpoint.fallback=true")
    assert f"resuming from {checkpoints}/{NEWEST}" in resumed.out
    assert contents(tmp_path / "out" / "model") == contents(complete_run / "out" / "model")


def test_two_damaged_checkpoints_are_not_moved(complete_run: Path, tmp_path: Path) -> None:
    out = interrupted(complete_run, tmp_path)
    for name in (BEFORE, NEWEST):
        zeroed(out / "checkpoints" / name)
    before = contents(out)
    refused = run("distill", complete_run / "run.yaml", f"out={out}", "checkpoint.fallback=true", code=1)
    assert "there is no earlier checkpoint: choose another folder as out to start again" in refused.err
    assert contents(out) == before


def test_a_configuration_with_several_faults_is_one_line(complete_run: Path, tmp_path: Path) -> None:
    """The folder's config.yaml was cut, so that `best` names no metric and `out` is missing."""
    out = interrupted(complete_run, tmp_path)
    path = out / "config.yaml"
    text = path.read_text()
    path.write_text(text[: text.index("best: eval/cross_en") + len("best: eval/cross_en")])
    refused = run("distill", complete_run / "run.yaml", f"out={out}", code=1)
    assert refused.err.startswith(
        f"error: out: {out} does not contain a run of this version of stillhouse: {path} cannot be read as a "
        "configuration"
    )
    assert refused.err.count("\n") == 1
