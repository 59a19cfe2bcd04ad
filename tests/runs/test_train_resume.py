"""A run that was killed and started again by the same command equals a run that was never interrupted."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.causal_families import build as build_causal
from kit.layout_runs import distill
from kit.runs import assert_same_run, contents, evaluations, losses, run, write_run, write_texts
from kit.signal_hooks import kill_at
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.checkpoint.resume import DECAY, RunIdentity, candidates, require_unchanged_sources
from stillhouse.config import load_config
from stillhouse.config.read_config import dotted_values
from stillhouse.output.folder import RunFolder
from stillhouse.output.progress import Progress

MODEL = "model/model.safetensors"
CASES = {
    "llama tied": ("llama", True, {}),
    "gpt2 with dropout": ("gpt2", True, {}),
    "gpt2 untied, bf16, recomputed": (
        "gpt2",
        False,
        {"train.precision": "bf16", "train.activation_checkpointing": True, "train.weight_decay": 0.1},
    ),
    "qwen3 untied, no evaluation": ("qwen3", False, {"data.eval": 0}),
}


#: those in which random numbers have to continue, too
QUICK = "gpt2 with dropout"


@pytest.mark.parametrize("case", [QUICK, *(slow(case) for case in CASES if case != QUICK)])
def test_killed_and_resumed_is_the_same_to_the_bit(tmp_path: Path, case: str) -> None:
    family, tied, settings = CASES[case]
    write_run(tmp_path, family=family, tied=tied, **{"train.steps": 20, "checkpoint.every": 4}, **settings)
    assert_resumes(tmp_path)
    if "data.eval" not in settings:
        assert (tmp_path / "killed/tokens.json").read_bytes() == (tmp_path / "out/tokens.json").read_bytes()


def write_rows_run(folder: Path, **settings: Any) -> None:
    """Write a run whose student has linear attention, so that its documents lie in rows of their own."""
    tokenizer = toy_tokenizer()
    build_causal("qwen3_5_text", seed=1, vocab_size=len(tokenizer)).save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "student")
    write_run(folder, **settings)


@pytest.mark.slow
def test_a_student_with_documents_in_rows_resumes_to_the_bit(tmp_path: Path) -> None:
    write_rows_run(tmp_path, **{"train.steps": 20, "checkpoint.every": 4})
    assert "documents of student: one per row" in assert_resumes(tmp_path)


@pytest.mark.slow
def test_a_student_with_documents_in_rows_resumes_to_the_bit_under_fsdp(tmp_path: Path) -> None:
    write_rows_run(tmp_path, **{"train.steps": 6, "checkpoint.every": 3, "data.eval": 0, "parallel.fsdp": 2})
    distill(tmp_path, "out", 2)
    resumed = distill(tmp_path, "resumed", 2, f"checkpoint.resume={tmp_path / 'out/checkpoints/step-00000003'}")
    assert resumed.out.count("resuming from") == 1
    assert (tmp_path / "resumed" / MODEL).read_bytes() == (tmp_path / "out" / MODEL).read_bytes()
    assert losses(tmp_path / "resumed") == losses(tmp_path / "out")[-3:]


def assert_resumes(folder: Path) -> str:
    """Run a configuration, run it again with a kill at step 10, and compare; return what the resumed run prints."""
    undisturbed, killed = folder / "out", folder / "killed"
    run("distill", folder / "run.yaml")
    again = [folder / "run.yaml", f"out={killed}"]
    kill_at(10, killed, *again)
    resumed = run("distill", *again)
    assert f"resuming from {killed}/checkpoints/step-00000008\n" in resumed.out
    assert_same_run(killed, undisturbed)
    assert [row[0] for row in losses(killed)] == list(range(1, 21))
    return resumed.out


def killed_run(folder: Path) -> Path:
    """Write a run of 12 steps that was killed at step 5, after its checkpoint at step 4."""
    write_run(folder, **{"train.steps": 12, "checkpoint.every": 4})
    kill_at(5, folder / "out", folder / "run.yaml")
    return folder


@pytest.fixture
def half(tmp_path: Path) -> Path:
    return killed_run(tmp_path)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, for tests in which nothing may change it."""
    return killed_run(tmp_path_factory.mktemp("killed"))


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    write_run(tmp_path, **{"checkpoint.every": 0, "train.steps": 20})
    kill_at(3, tmp_path / "out", tmp_path / "run.yaml")
    started = run("distill", tmp_path / "run.yaml")
    assert "resuming" not in started.out
    assert [row[0] for row in losses(tmp_path / "out")] == list(range(1, 21))
    assert [row[0] for row in evaluations(tmp_path / "out")] == [0, 20]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000020"]


def test_keys_that_change_no_weight_may_change(half: Path) -> None:
    free = [
        *("eval.every=3", "checkpoint.every=5", "checkpoint.keep=7", "checkpoint.best=eval/agreement"),
        *("train.micro_batch_tokens=128", "train.activation_checkpointing=true", "train.timeout=60"),
        *("objective.chunk_tokens=16", "device=auto", "track=[tensorboard]"),
    ]
    resumed = run("distill", half / "run.yaml", *free)
    assert "resuming from" in resumed.out
    assert [row[0] for row in losses(half / "out")] == list(range(1, 13))
    assert [row[0] for row in evaluations(half / "out")][-3:] == [9, 10, 12]
    assert "every: 3" in (half / "out" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("train.learning_rate", ["train.learning_rate=2e-5"]),
        ("train.steps", ["train.steps=13"]),
        ("seed", ["seed=1"]),
        ("objective.loss", ["objective.loss=forward_kl"]),
        ("teacher.model", ["teacher=null", "objective.loss=cross_entropy"]),
        ("data.max_tokens", ["data.max_tokens=16"]),
    ],
)
def test_keys_that_change_weights_may_not_change(refusing: Path, key: str, changes: list[str]) -> None:
    config = load_config(refusing / "run.yaml", changes)
    with pytest.raises(ValueError, match=f"contains another run, with a different [^;]*{re.escape(key)}"):
        candidates(RunFolder(refusing / "out"), "auto", dotted_values(config))


def test_a_changed_processor_of_images_is_named() -> None:
    """The hashes of the documents change with it, too. Earlier versions did not write the hashes of processors."""
    before = {"train": "a", "processor/student": "b", "processor/teacher": "c"}
    for now, named in (
        (before | {"train": "d", "processor/teacher": "e"}, "teacher.model"),
        ({"train": "d", "processor/student": "b"}, "teacher.model"),
        ({"train": "d", "processor/student": "e"}, "student.model and teacher.model"),
    ):
        identity = RunIdentity("", now, {})
        with pytest.raises(
            ValueError, match=f"^{named}: the files of the processor of images have changed since step"
        ):
            require_unchanged_sources(Path("step"), Progress(data=before), identity)
        with pytest.raises(ValueError, match=r"^data\.train: the documents have changed"):
            require_unchanged_sources(Path("step"), Progress(data={"train": "a"}), identity)
    require_unchanged_sources(Path("step"), Progress(data={"train": "a"}), RunIdentity("", before, {}))


def test_a_run_whose_weight_decay_reached_other_weights_is_named() -> None:
    """Earlier versions applied weight decay to the stacked biases of experts, and did not write the key."""
    now = RunIdentity("", {"train": "a", DECAY: "experts.down_proj_bias"}, {})
    with pytest.raises(ValueError, match=r"^train.weight_decay: step was written by a version that .*down_proj_bias"):
        require_unchanged_sources(Path("step"), Progress(data={"train": "a"}), now)
    with pytest.raises(ValueError, match=r"^train.weight_decay: step was written by a version that"):
        require_unchanged_sources(Path("step"), Progress(data=now.data), RunIdentity("", {"train": "a"}, {}))
    require_unchanged_sources(Path("step"), Progress(data=now.data), now)
    require_unchanged_sources(Path("step"), Progress(data={"train": "a"}), RunIdentity("", {"train": "a"}, {}))


def test_other_data_under_the_same_name_are_noticed(half: Path) -> None:
    before = contents(half / "out")
    for which in ("train", "eval"):
        text = (half / f"{which}.jsonl").read_bytes()
        write_texts(half / f"{which}.jsonl", 40, seed=9)
        failed = run("distill", half / "run.yaml", code=1)
        assert f"error: data.{which}: the documents have changed since {half}/out/checkpoints/step-" in failed.err
        assert contents(half / "out") == before
        (half / f"{which}.jsonl").write_bytes(text)


@pytest.mark.slow
def test_resume_never_and_resume_from_a_path(half: Path) -> None:
    out, newest = half / "out", sorted((half / "out" / "checkpoints").iterdir())[-1]
    before = contents(out)
    failed = run("distill", half / "run.yaml", "checkpoint.resume=never", code=1)
    assert f"{out} is not empty and checkpoint.resume is never" in failed.err
    for path in (half, half / "nowhere", out):
        failed = run("distill", half / "run.yaml", f"checkpoint.resume={path}", code=2)
        assert f"error: checkpoint.resume: {path} is not a checkpoint" in failed.err
    assert contents(out) == before
    elsewhere = half / "elsewhere"
    taken_on = run("distill", half / "run.yaml", f"checkpoint.resume={newest}", f"out={elsewhere}")
    assert f"resuming from {newest}" in taken_on.out
    resumed = run("distill", half / "run.yaml", f"checkpoint.resume={newest}")
    assert f"resuming from {newest}" in resumed.out
    assert contents(elsewhere / "model") == contents(out / "model")
    assert losses(elsewhere) == [row for row in losses(out) if row[0] > int(newest.name[5:])]
    fresh = run("distill", half / "run.yaml", "checkpoint.resume=never", f"out={half}/fresh")
    assert "resuming" not in fresh.out
    assert contents(half / "fresh" / "model") == contents(out / "model")


@pytest.mark.slow
def test_a_run_that_started_from_a_path_is_continued_by_the_same_command(half: Path) -> None:
    """The run resumes from its newest checkpoint, as torchrun's --max-restarts needs; another path is refused."""
    start = sorted((half / "out" / "checkpoints").iterdir())[0]
    newest = half / "elsewhere" / "checkpoints" / start.name
    resume = f"checkpoint.resume={start}"
    run("distill", half / "run.yaml", resume, f"out={half}/undisturbed", "train.steps=30")
    other = [half / "run.yaml", f"out={half}/other", "train.steps=30"]
    for at in (10, 21):
        kill_at(at, half / "other", *other, resume)
    shutil.copytree(half / "out", half / "elsewhere")
    before = contents(half / "other")
    failed = run("distill", *other, f"checkpoint.resume={newest}", code=2)
    latest = half / "other" / "checkpoints" / "step-00000020"
    problem = f"got {newest}, but out already contains this run's own checkpoint {latest}"
    assert f"error: checkpoint.resume: {problem}" in failed.err
    assert contents(half / "other") == before
    resumed = run("distill", *other, resume)
    assert f"resuming from {latest}" in resumed.out
    assert_same_run(half / "other", half / "undisturbed")


def test_a_path_to_a_checkpoint_after_the_end_of_the_run(refusing: Path) -> None:
    newest = sorted((refusing / "out" / "checkpoints").iterdir())[-1]
    short = f"checkpoint.resume={newest}", f"out={refusing}/short", "train.steps=2"
    assert "this run ends at step 2" in run("distill", refusing / "run.yaml", *short, code=1).err


def test_a_complete_run_is_left_as_it_is_and_gets_its_model_again(tmp_path: Path) -> None:
    """Its model is missing if it was killed after its last step."""
    write_run(tmp_path)
    run("distill", tmp_path / "run.yaml")
    before: dict[str, Any] = contents(tmp_path / "out")
    again = run("distill", tmp_path / "run.yaml", "eval.every=2")
    assert f"{tmp_path}/out contains this run, which is complete: {tmp_path}/out/model" in again.out
    after = contents(tmp_path / "out")
    for files in (before, after):
        files.pop("report.html")  # the report is written again from the same metrics
    assert after == before
    shutil.rmtree(tmp_path / "out" / "model")
    (tmp_path / "out" / "model.partial").mkdir()
    (tmp_path / "out" / "model.partial" / "junk").write_text("half")
    assert "resuming from" in run("distill", tmp_path / "run.yaml").out
    resumed = contents(tmp_path / "out")
    assert {name for name in before if resumed[name] != before[name]} <= {"environment.json"}
    assert not (tmp_path / "out" / "model.partial").exists()
