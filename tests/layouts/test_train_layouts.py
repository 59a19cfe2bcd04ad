"""Complete runs in several processes give the model of one process, can resume under any layout, and report errors.

A fork server starts most of these processes, because it imports torch and transformers only once. torchrun starts
those whose end depends on it: an error that all ranks find, the end of torchrun, and a restart after a rank is lost.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.documents import LINE, vanished, vanishing, with_odd_line
from kit.layout_runs import LIMIT, assert_same_model, distill
from kit.ranks import TORCHRUN, Ranks, run_ranks, under_torchrun
from kit.runs import metrics, save_model, wait_for, write_run
from transformers import LlamaConfig

from stillhouse.config import ConfigError, StudentConfig, TeacherConfig
from stillhouse.libraries import FEATURES, is_supported
from stillhouse.parallel import Degrees, Layout
from stillhouse.run.preflight import require_tensor_degrees


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, run.yaml, and a complete run in one process with all its checkpoints."""
    folder = tmp_path_factory.mktemp("layouts")
    write_run(folder, family="llama", tied=True, **{"train.steps": 7, "checkpoint.every": 1, "checkpoint.keep": 9})
    distill(folder, "one process", 1)
    return folder


#: steps and evaluations of one sequence
SHORT = ["train.tokens_per_step=32", "train.micro_batch_tokens=32", "eval.micro_batch_tokens=32"]


@pytest.fixture(scope="module")
def short_run(workspace: Path) -> Path:
    """A run in one process with steps of one sequence."""
    distill(workspace, "one process, short", 1, *SHORT)
    return workspace / "one process, short"


def last_record(run: Path, key: str) -> dict[str, Any]:
    """Return the last record of a run's log that has a figure of this key."""
    return [record for record in metrics(run) if key in record][-1]


@pytest.mark.slow
def test_checkpoints_move_between_layouts(workspace: Path) -> None:
    """From one process over every axis to one process again. Each run resumes from the previous run's checkpoint."""
    before = workspace / "one process"
    for step, axis in enumerate(("fsdp", "tensor", "pipeline", "context", "replicate", ""), start=1):
        out, layout = workspace / (axis or "again"), [f"parallel.{axis}=2"] if axis else []
        resume = f"checkpoint.resume={before / 'checkpoints' / f'step-{step:08d}'}"
        run = distill(workspace, out.name, 2 if axis else 1, resume, *layout)
        assert run.out.count("resuming from") == 1
        assert_same_model(workspace / "one process", out)
        before = out


@pytest.mark.slow
def test_steps_of_one_sequence_leave_a_process_without_one(workspace: Path, short_run: Path) -> None:
    distill(workspace, "two", 2, *SHORT, "parallel.fsdp=2")
    assert_same_model(short_run, workspace / "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [["parallel.pipeline=2", "teacher.parallel.context=2"], ["parallel.tensor=2", "teacher.parallel.pipeline=2"]],
    ids=" ".join,
)
def test_a_teacher_in_a_layout_of_its_own(workspace: Path, short_run: Path, layouts: list[str]) -> None:
    """Sequences have different lengths, and the run evaluates. In steps of one sequence, some ranks have none."""
    for reference, overrides in ((workspace / "one process", []), (short_run, SHORT)):
        out = workspace / f"separate {len(overrides)} {' '.join(layouts)}"
        run = distill(workspace, out.name, 2, *overrides, *layouts)
        (line,) = (line for line in run.out.splitlines() if line.startswith("layout: "))
        assert re.fullmatch(r"layout: (fsdp|pipeline|tensor) 2.*; teacher: (tensor|context|pipeline) 2.*", line)
        assert_same_model(reference, out)
        expected, separate = (last_record(run_folder, "eval/forward_kl") for run_folder in (reference, out))
        assert separate["eval/forward_kl"] == pytest.approx(expected["eval/forward_kl"], rel=1e-4)


@pytest.mark.skipif(not is_supported("expert parallelism"), reason="expert parallelism needs a later transformers")
@pytest.mark.slow
def test_experts_in_a_run(tmp_path: Path) -> None:
    """Experts are read one by one from the files, split over the ranks, balanced, and written one by one.

    `stillhouse parity` compares the gradients of every layout.
    """
    write_run(tmp_path, family="qwen3_moe", **{"objective.router_aux_loss": 0.1, "checkpoint.every": 3})
    layouts = {"expert": ["parallel.fsdp=2", "parallel.expert=2"], "tensor": ["parallel.tensor=2"]}
    distill(tmp_path, "one process", 1)
    for out, overrides in layouts.items():
        resume = tmp_path / "one process" / "checkpoints" / "step-00000003"
        distill(tmp_path, out, 2, *overrides, f"checkpoint.resume={resume}")
        assert_same_model(tmp_path / "one process", tmp_path / out)
        last, expected = (last_record(tmp_path / name, "loss/router_aux") for name in (out, "one process"))
        assert last["loss/router_aux"] == pytest.approx(expected["loss/router_aux"], rel=1e-4)
    compare_layouts(tmp_path / "run.yaml")


def compare_layouts(run_yaml: Path) -> None:
    """Run the command `parity` on a student of two layers with experts."""
    ranks = run_ranks(2, "parity", run_yaml, "parallel.gather_dtype=bfloat16", "train.precision=bf16")
    left_out, header, *rows = ranks[0].out.splitlines()
    # the verdicts below show that no step rounds its weights
    assert (
        left_out == "not compared: parallel.gather_dtype=bfloat16 (all steps are in float32, without these settings)"
    )
    assert header.split() == ["layout", "loss", "gradient", "verdict"]
    compared = (row for row in rows if re.search(r"e[+-]\d\d  ", row))  # other lines name a phase or a reason
    verdicts = {row[:28].strip(): row.split()[-1] for row in compared}
    layouts = {"fsdp 2", "fsdp 2 × expert 2", "replicate 2", "tensor 2", "context 2", "pipeline 2, 1f1b"}
    assert layouts <= verdicts.keys()
    assert set(verdicts.values()) == {"same"}
    assert sum("expected at most one stage per layer" in row for row in rows) == 3


REFUSED = {
    "parallel.pipeline=2 parallel.schedule=zbv": "4 pipeline stages for a student of 2 layers",
    "parallel.tensor=4": "parallel: tensor 4 needs 4 processes, but torchrun started 2",
    "teacher.parallel.tensor=4": "teacher.parallel: tensor 4 needs 4 processes, but torchrun started 2",
    "parallel.expert=3": "parallel.expert: got 3, with fsdp × context × tensor = 2 and tensor = 1",
    "parallel.expert=2": "expert=2 for model type 'llama' and 'qwen3', which has no experts"
    if is_supported("expert parallelism")
    else f"expert parallelism needs {' '.join(FEATURES['expert parallelism'][:2])} or later",
}


def test_a_tensor_degree_is_compared_with_the_configuration_alone(tmp_path: Path) -> None:
    """The folder has no weights and no tokenizer."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24, "intermediate_size": 12}
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    student, teacher = StudentConfig(model=str(tmp_path)), TeacherConfig(model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"^parallel: tensor=2 does not divide the model's num_key_value_heads=3 "):
        require_tensor_degrees(student, {}, {}, Layout(Degrees(tensor=2)))
    own = {"teacher": Layout(Degrees(tensor=6))}
    with pytest.raises(ConfigError, match=r"^teacher.parallel: tensor=6 does not divide the model's num_key_value_h"):
        require_tensor_degrees(student, {"teacher": teacher}, own, Layout(Degrees(tensor=3)))
    require_tensor_degrees(student, {"teacher": teacher}, {}, Layout(Degrees(tensor=3)))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", REFUSED)
def test_an_impossible_layout_is_refused_by_all_ranks(workspace: Path, overrides: str) -> None:
    arguments = ("distill", workspace / "run.yaml", f"out={workspace / 'refused'}", *overrides.split())
    ranks = Ranks(2, *arguments)
    assert all(ranks.wait()), ranks.texts
    for rank, start in zip(ranks, ("error: ", "error on rank 1: "), strict=True):
        assert rank.err.startswith(start)
        assert REFUSED[overrides] in rank.err
    if overrides == "parallel.tensor=4":  # torchrun ends the other rank before it prints its error
        run = under_torchrun(*arguments)
        assert run.returncode != 0
        assert sum(line.startswith("error") for line in run.stderr.splitlines()) == 1, run.stderr
    assert not (workspace / "refused").exists()


@pytest.fixture(scope="module")
def failing_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Students and data of two runs that fail: one on an infinite or NaN loss, one on such a gradient."""
    folder = tmp_path_factory.mktemp("failing")
    with_odd_line(folder)
    for name, change in (("loss", vanished), ("gradient", vanishing)):
        save_model(folder / name, tied=False, seed=1, change=change)
    odd = {"data.train": str(folder / "odd.jsonl"), "data.eval": 0}
    write_run(folder, **odd, **{"train.steps": 8, "checkpoint.every": 0})
    return folder


@pytest.mark.parametrize(
    ("what", "layout"),
    [
        ("loss", "fsdp=2"),
        *(slow("loss", layout) for layout in ("context=2", "pipeline=2")),
        *(slow("gradient", layout) for layout in ("tensor=2", "pipeline=2")),
    ],
)
def test_a_value_that_is_not_finite_is_found_as_in_one_process(failing_runs: Path, what: str, layout: str) -> None:
    """The error names the same term or parameter, and the same line of the data."""
    errors = []
    keys = [f"parallel.{key}" for key in layout.split()]
    for processes, out, overrides in ((1, f"{what} one process", []), (2, f"{what} {layout}", keys)):
        student = f"student.model={failing_runs / what}"
        error = distill(failing_runs, out, processes, student, *overrides, code=1).err
        assert error.count("No weight was changed by this step") == 1
        errors += re.findall(rf"step (\d+): the {what} is not finite .*?: (.*?)\. No weight was changed", error)
        shutil.rmtree(failing_runs / out)
    assert len(errors) == 2
    assert errors[0] == errors[1]
    assert f"on {failing_runs}/odd.jsonl:{LINE}" in errors[0][1]


@pytest.mark.slow
def test_a_job_whose_torchrun_is_killed_ends(workspace: Path) -> None:
    """Its processes do not train on without torchrun, and the same command continues at once."""
    out, printed = workspace / "orphans", workspace / "orphans.err"
    job = start(workspace, out.name, "train.steps=100000", errors=printed)
    ranks: list[int] = []
    try:
        ranks = ranks_after_first_checkpoint(job, out)
        job.kill()
        job.wait()
        wait_for(lambda: not any(map(running, ranks)), 10)
    finally:
        job.kill()
        for rank in filter(running, ranks):
            os.kill(rank, signal.SIGKILL)
    assert printed.read_text() == (
        f"error: torchrun (process {job.pid}), which started this process, has ended; the same command continues "
        "the run from its last checkpoint\n"
    )
    again = Ranks(2, "distill", workspace / "run.yaml", f"out={out}", "train.steps=100000")
    wait_for(lambda: "resuming from" in again[0].out, LIMIT)
    again.send(signal.SIGKILL)
    again.wait()


def running(pid: int) -> bool:
    """Whether a process runs; one that has ended may still be listed until its new parent has noticed its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_job_that_torchrun_restarts_continues(workspace: Path) -> None:
    """It resumes from its last checkpoint and ends with the model of an undisturbed job. Rank 0, the writer, dies."""
    quiet, disturbed = workspace / "quiet", workspace / "disturbed"
    overrides = ["parallel.pipeline=2", "train.steps=20", "checkpoint.every=5", "checkpoint.keep=1"]
    distill(workspace, quiet.name, 2, *overrides)
    job = start(workspace, disturbed.name, *overrides, launcher=["--max-restarts", "1"])
    try:
        ranks = ranks_after_first_checkpoint(job, disturbed)
        os.kill(ranks[0], signal.SIGKILL)
        assert job.wait(timeout=LIMIT) == 0
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    finally:
        job.kill()
    results = []
    for run in (disturbed, quiet):
        names = {path.name for path in (run / "checkpoints").iterdir()}
        results.append(((run / "model" / "model.safetensors").read_bytes(), names))
        steps = [record["step"] for record in metrics(run) if "train/learning_rate" in record]
        assert steps == list(range(1, 21))
    assert results[0] == results[1]


def start(
    folder: Path, out: str, *overrides: str, launcher: Sequence[str] = (), errors: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start two processes with torchrun. Do not wait for their end. errors: the file for their stderr."""
    command = [*TORCHRUN, *launcher, "-m", "stillhouse", "distill", folder / "run.yaml", f"out={folder / out}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(errors or os.devnull, "wb") as stderr:
        return subprocess.Popen([*command, *overrides], env=environment, stdout=subprocess.DEVNULL, stderr=stderr)


def ranks_after_first_checkpoint(job: subprocess.Popen[bytes], run: Path) -> list[int]:
    """Return the process ids of a job's ranks, in the order of the ranks."""
    deadline = time.monotonic() + LIMIT
    while not any(run.glob("checkpoints/step-????????/state.json")):
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.05)
    ranks = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    assert len(ranks) == 2
    return ranks
