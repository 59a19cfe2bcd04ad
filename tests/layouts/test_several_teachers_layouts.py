"""Several teachers under layouts, and runs with them that are resumed: the gradients and the model of one process."""

from pathlib import Path

import pytest
import torch
from kit.layout_runs import assert_same_weights
from kit.ranks import run_ranks
from kit.runs import metrics, run, write_run
from kit.teacher_gradients import write_subject_teachers
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from stillhouse.parallel import SCHEMES

AVERAGE = {"student": "ema", "ema_decay": 0.5}
LIVE = {"student": "live", "prefix": "{answer} {answer} "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_subject_teachers(tmp_path_factory.mktemp("layouts"), tied=True)


def write(folder: Path, out: str, **settings: object) -> Path:
    """Write a run's configuration; returns its path."""
    name = folder / f"{out}.yaml"
    write_run(folder, cached=True, **{"data.eval": 0.2, "checkpoint.every": 2, "checkpoint.keep": 9, **settings})
    (folder / "run.yaml").rename(name)
    return name


@pytest.mark.slow
@pytest.mark.parametrize("how", ["distributions", "route"])
def test_gradients_under_every_layout(folder: Path, how: str) -> None:
    """One teacher has a prefix, and without a route the student is its own teacher, too. The student has four layers,
    so that all schedules are possible.
    """
    teachers = {
        "teachers.math": {"model": str(folder / "math"), "prefix": "{answer}! "},
        "teachers.code": {"model": str(folder / "code"), "weight": 2.0},
    }
    settings = {"teachers.route": "subject"} if how == "route" else {"teachers.sum": how, "teachers.self": LIVE}
    settings |= {"student.model": str(deep_student(folder)), "train.steps": 2}
    config = write(folder, f"parity {how}", **teachers, **settings)
    ranks = run_ranks(2, "parity", config)
    rows = [line for line in ranks[0].out.splitlines() if line.split(" ")[0] in AXES]
    same = {line.split("  ")[0] for line in rows if line.endswith("  same")}
    schedules = {f"pipeline 2, {schedule}" for schedule in SCHEMES}
    assert same == {"fsdp 2", "replicate 2", "tensor 2", "context 2", *schedules}
    assert len(rows) == len(same)


def deep_student(folder: Path) -> Path:
    if not (folder / "deep").exists():
        config = LlamaConfig.from_pretrained(folder / "student", num_hidden_layers=4)
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder / "deep")
        for path in (folder / "student").glob("tokenizer*"):
            (folder / "deep" / path.name).write_bytes(path.read_bytes())
    return folder / "deep"


AXES = ("fsdp", "replicate", "tensor", "context", "pipeline")


@pytest.fixture(scope="module")
def averaged(folder: Path) -> Path:
    """A complete run of one process whose teacher is the student's average."""
    config = write(folder, "averaged", **{"teachers.slow": AVERAGE, "teachers.math": {"model": str(folder / "math")}})
    run("distill", config, f"out={folder / 'averaged'}")
    return folder / "averaged"


def test_a_run_with_an_average_is_resumed_exactly(folder: Path, averaged: Path) -> None:
    step = averaged / "checkpoints" / "step-00000002"
    stored = [name for path in (step / "resume").glob("*.safetensors") for name in load_file(path)]
    assert any(name.startswith("average.") for name in stored)
    run("distill", folder / "averaged.yaml", f"out={folder / 'resumed'}", f"checkpoint.resume={step}")
    assert_same_weights(folder / "resumed", averaged, 0.0)


def test_a_checkpoint_without_the_average_is_refused(folder: Path, averaged: Path) -> None:
    """The weights of a run without an average cannot continue one with it."""
    plain = write(folder, "plain", **{"teachers.math": {"model": str(folder / "math")}})
    run("distill", plain, f"out={folder / 'plain'}")
    step = folder / "plain" / "checkpoints" / "step-00000002"
    out = f"out={folder / 'from plain'}"
    refused = run("distill", folder / "averaged.yaml", out, f"checkpoint.resume={step}", code=1)
    assert "'average." in refused.err
    assert "absent in the checkpoint" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "of_teacher"), [("fsdp=2", "context=2"), ("tensor=2", "fsdp=2"), ("pipeline=2", "")]
)
def test_the_model_of_one_process_with_an_average(folder: Path, averaged: Path, layout: str, of_teacher: str) -> None:
    """of_teacher: the layout of the other teacher, if it has one of its own."""
    out = folder / f"averaged {layout}"
    teacher_layout = [f"teachers.math.parallel.{of_teacher}"] if of_teacher else []
    run_ranks(2, "distill", folder / "averaged.yaml", f"out={out}", f"parallel.{layout}", *teacher_layout)
    assert_same_weights(out, averaged, 1e-4)
    for one, other in zip(metrics(out), metrics(averaged), strict=True):
        for key in ("loss/total_nats_per_token", "eval/forward_kl/slow", "eval/forward_kl/math", "eval/forward_kl"):
            assert one.get(key) == pytest.approx(other.get(key), rel=1e-4, abs=1e-7), key
    resumed = folder / f"resumed {layout}"
    step = averaged / "checkpoints" / "step-00000004"
    resume = f"checkpoint.resume={step}"
    run_ranks(2, "distill", folder / "averaged.yaml", f"out={resumed}", resume, f"parallel.{layout}")
    assert_same_weights(resumed, averaged, 1e-4)


def test_the_first_lines_name_every_teacher(folder: Path) -> None:
    teachers = {"math": {"model": str(folder / "math"), "weight": 3.0}, "slow": AVERAGE, "self": LIVE}
    config = write(folder, "words", **{f"teachers.{name}": teacher for name, teacher in teachers.items()})
    checked = run("check", config, f"out={folder / 'words'}")
    (first,) = (line for line in checked.out.splitlines() if line.startswith("  teacher: "))
    for part in ("0.6 × math: ", "0.2 × slow: the student's average (decay 0.5)", "0.2 × self: the student ("):
        assert part in first, first
