"""A full disk, or a folder that is moved, removed or read-only, gives one line at the next write; nothing is lost."""

import errno
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kit import slow
from kit.loading_memory import read_manifest
from kit.on_policy_runs import write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import Command, contents, run, save_model, write_run
from kit.serving import Server
from kit.signal_hooks import at_step

from stillhouse.checkpoint import save as checkpoint
from stillhouse.data import load_tokenizer
from stillhouse.models import Decoder
from stillhouse.output.disk import explained_write_errors
from stillhouse.parallel import single_process_runner
from stillhouse.rollout.publish import publish, version_folder

PUBLISHED = 100_000  # too little for one version of the weights
BYTES = 2_000_000  # size of the small disk: enough for one checkpoint of these runs, but not for two


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system with little space."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk, and return the file that does it."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(itertools.repeat(bytes(1024)))
    return path


def skip_space_check() -> None:
    """Skip the check of free space, as if another process filled the disk while the checkpoint is written."""
    checkpoint.require_space = lambda *_: None


def ended(folder: Path, out: Path, processes: int, hook: Callable[[], None] | None = None) -> tuple[list[int], str]:
    """Return the exit codes of a run, and rank 0's errors."""
    arguments = ["distill", folder / "run.yaml", f"out={out}"]
    if processes == 1:
        command = Command(*arguments, hook=hook)
        return [command.wait()], command.err
    ranks = Ranks(processes, *arguments, hook=hook)
    return ranks.wait(), ranks[0].err


@pytest.mark.parametrize(
    ("processes", "hook"),
    [(1, None), *(slow(*case) for case in ((1, skip_space_check), (2, skip_space_check), (2, None)))],
)
def test_a_full_disk(tmp_path: Path, disk: Path, processes: int, hook: Callable[[], None] | None) -> None:
    write_run(tmp_path, **{"checkpoint.every": 2, "checkpoint.keep": 9})
    out = disk / "out"
    folder = out / "checkpoints"
    codes, err = ended(tmp_path, out, processes, hook)
    assert set(codes) == {1}
    unfinished = folder / "step-00000004.partial"
    path = folder / "step-00000004" if hook is skip_space_check else folder
    figures = r"([\d,]+) bytes are free on its disk and ([\d,]+) bytes are needed; all complete files are intact"
    match = re.fullmatch(rf"error: {path} cannot be written: {figures}.*\n", err)
    assert match is not None, err
    free, needed = (int(group.replace(",", "")) for group in match.groups())
    written = contents(folder / "step-00000002")
    size = sum(len(content) for name, content in written.items() if name.endswith(".safetensors"))
    assert free < BYTES
    assert 0.95 * size < needed <= size
    assert unfinished.exists() == (hook is skip_space_check)
    run("verify", out)

    # the incomplete checkpoint is removed before a new one is written; then the disk is too small again
    codes, err = ended(tmp_path, out, processes)
    assert set(codes) == {1}
    assert err.startswith(f"error: {folder} cannot be written: ")
    assert not unfinished.exists()

    # without any space, not even the file that names the writing process can be written
    filler = fill(disk)
    codes, err = ended(tmp_path, out, processes)
    assert set(codes) == {1}
    assert err.startswith(f"error: {out / '.writer'} cannot be written: ")
    filler.unlink()
    subprocess.run(["mount", "-o", f"remount,size={8 * BYTES}", str(disk)], check=True)
    codes, err = ended(tmp_path, out, processes)
    assert set(codes) == {0}, err
    assert ended(tmp_path, tmp_path / "undisturbed", processes)[0] == codes
    assert contents(out / "model") == contents(tmp_path / "undisturbed" / "model")


@pytest.mark.parametrize(("command", "processes"), [("check", 1), slow("distill", 1), slow("distill", 2)])
def test_a_disk_without_room_for_one_checkpoint_is_refused_at_the_start(
    tmp_path: Path, disk: Path, command: str, processes: int
) -> None:
    write_run(tmp_path, **{"checkpoint.every": 0})
    subprocess.run(["mount", "-o", f"remount,size={BYTES // 4}", str(disk)], check=True)
    ranks = Ranks(processes, command, tmp_path / "run.yaml", f"out={disk}/out")
    assert set(ranks.wait()) == {1}
    figures = r"([\d,]+) bytes are free on its disk and ([\d,]+) bytes are needed"
    match = re.search(rf"{disk}/out/checkpoints cannot be written: {figures}", ranks[0].err)
    assert match is not None, ranks[0].err
    assert not (disk / "out" / "metrics.jsonl").exists()
    # the optimizer's state, which does not exist yet, is counted as that of a checkpoint
    run("distill", tmp_path / "run.yaml", "train.steps=1")
    (written,) = (tmp_path / "out" / "checkpoints").iterdir()
    size = sum(len(content) for name, content in contents(written).items() if name.endswith(".safetensors"))
    assert 0.95 * size < int(match[2].replace(",", "")) <= size


def test_a_full_disk_under_the_log(tmp_path: Path, disk: Path) -> None:
    write_run(tmp_path, **{"checkpoint.every": 0, "train.steps": 400})
    failed = Command("distill", tmp_path / "run.yaml", f"out={disk}/out", hook=fill_at, hook_arguments=(3, str(disk)))
    assert failed.wait() == 1
    assert failed.err.startswith(f"error: {disk}/out/metrics.jsonl cannot be written: ")
    assert failed.err.count("\n") == 1


def fill_at(step: int, disk: str) -> None:
    at_step(step, lambda: fill(Path(disk)), before=True)


def break_at(step: int, fault: str, out: str) -> None:
    def fail() -> None:
        if fault == "moved":
            os.rename(out, Path(out).with_name("moved"))
        elif fault == "removed":
            shutil.rmtree(out)
        else:
            os.chmod(out, 0o555)
            if os.geteuid() == 0:  # as a user whose permissions are checked
                os.seteuid(65534)

    at_step(step, fail, before=True)


@pytest.mark.parametrize("fault", ["moved", "removed", "read-only"])
def test_a_folder_that_is_gone_stops_the_run_at_the_next_write(tmp_path: Path, fault: str) -> None:
    write_run(tmp_path, **{"checkpoint.every": 2, "train.steps": 1000, "eval.every": 0})
    out = tmp_path / "out"
    failed = Command("distill", tmp_path / "run.yaml", hook=break_at, hook_arguments=(5, fault, str(out)))
    assert failed.wait() == 1
    reason = os.strerror(errno.EACCES if fault == "read-only" else errno.ENOENT)
    assert failed.err.startswith(f"error: {out}/metrics.jsonl cannot be written: {reason}; ")
    # the user of the read-only case may not remove the parent's files, so the process prints more lines
    if fault != "read-only":
        assert failed.err.count("\n") == 1
    if fault == "removed":
        assert not out.exists()
        return
    left = tmp_path / "moved" if fault == "moved" else out
    left.chmod(0o755)
    assert json.loads((left / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
    run("verify", left)


def test_a_full_disk_under_the_report(tmp_path: Path, disk: Path) -> None:
    """The run is complete, but its report is missing."""
    write_run(tmp_path)
    run("distill", tmp_path / "run.yaml", f"out={disk}/out", "checkpoint.every=0")
    (disk / "out" / "report.html").unlink()
    fill(disk)
    failed = run("report", disk / "out", code=1)
    assert failed.err.startswith(f"error: {disk}/out/report.html cannot be written: No space left on device; the run")
    run("verify", disk / "out")


def test_a_disk_that_is_full_at_any_file_of_published_weights(tmp_path: Path, disk: Path) -> None:
    """Each library reports it in its own way. When there is room again, the same version is published."""
    model = save_model(tmp_path / "student")
    tokenizer, runner = load_tokenizer(str(model)), single_process_runner(Decoder.from_pretrained(model), None)
    page = os.sysconf("SC_PAGE_SIZE")
    first = -(-(model / "model.safetensors").stat().st_size // page)
    final = version_folder(disk / "weights", 1)
    sizes = iter([1, first // 2, *range(first - 1, first + 12)])
    failures = []
    while not final.exists():
        subprocess.run(["mount", "-o", f"remount,size={next(sizes) * page}", str(disk)], check=True)
        with suppress(ValueError), explained_write_errors(disk / "weights"):
            try:
                publish(runner, disk / "weights", 1, tokenizer=tokenizer)
            except Exception as error:
                failures.append(error)
                raise
    assert len(failures) > 5
    assert {type(failure) for failure in failures} == {OSError}
    assert read_manifest(final).version == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=1", "fsdp=2", "pipeline=2"])
def test_a_full_disk_under_published_weights(tmp_path: Path, disk: Path, layout: str) -> None:
    """Under pipeline parallelism each rank writes a file, and one of them fails first: both must end."""
    processes = int(layout[-1])
    settings = {"rollout.weights": str(disk), "rollout.engine": "stillhouse", "rollout.url": "http://x"}
    write_on_policy_run(tmp_path, **settings)
    subprocess.run(["mount", "-o", f"remount,size={PUBLISHED}", str(disk)], check=True)
    with Server(tmp_path / "student", "--generate") as server:
        arguments = ("distill", tmp_path / "run.yaml", f"rollout.url={server.url}", f"parallel.{layout}")
        failed = Ranks(processes, *arguments)
        assert failed.wait() == [1] * processes, failed.texts
        assert re.fullmatch(
            rf"error: {disk}/\w+ cannot be written: [\d,]+ bytes are free on its disk; .*\n", failed[0].err
        ), failed[0].err
        assert all(command.err.count("\n") == 1 for command in failed)
        subprocess.run(["mount", "-o", f"remount,size={8 * BYTES}", str(disk)], check=True)
        run_ranks(processes, *arguments)
