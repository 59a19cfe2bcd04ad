"""Runs with images that are killed and started again by the same command equal runs that were never interrupted."""

import signal
from pathlib import Path
from typing import Any

import pytest
from kit.image_runs import SETTINGS, write_image_run
from kit.ranks import Ranks, run_ranks
from kit.runs import assert_same_run, last_step, losses, run, write_run
from kit.signal_hooks import kill_at, signal_at

from stillhouse.config import RunConfig
from stillhouse.tools.write_cache import write_cache

STEPS, KILLED_AT, RESUMED_FROM = 5, 3, "step-00000002"
RUN = {"train.steps": STEPS, "checkpoint.every": 2, "eval.every": 2, "student.train": ["language", "projector"]}


def write(folder: Path, **settings: Any) -> RunConfig:
    return write_run(folder, **SETTINGS, **RUN, **settings)


def assert_resumed(text: str, killed: Path) -> None:
    assert text.count(f"resuming from {killed}/checkpoints/{RESUMED_FROM}\n") == 1
    assert_same_run(killed, killed.parent / "out")
    assert [row[0] for row in losses(killed)] == list(range(1, STEPS + 1))


def test_killed_and_resumed_is_the_same_to_the_bit(tmp_path: Path) -> None:
    write_image_run(tmp_path, "qwen3_vl")
    write(tmp_path)
    run("distill", tmp_path / "run.yaml")
    again = [tmp_path / "run.yaml", f"out={tmp_path / 'killed'}"]
    kill_at(KILLED_AT, tmp_path / "killed", *again)
    assert_resumed(run("distill", *again).out, tmp_path / "killed")


@pytest.mark.slow
def test_two_processes_with_a_cache_killed_and_resumed_are_the_same_to_the_bit(tmp_path: Path) -> None:
    write_image_run(tmp_path, "qwen3_vl")
    write_cache(write(tmp_path), tmp_path / "cache")
    write(tmp_path, cached=True, **{"teacher.cache": str(tmp_path / "cache"), "parallel.fsdp": 2})
    run_ranks(2, "distill", tmp_path / "run.yaml")
    again = ["distill", tmp_path / "run.yaml", f"out={tmp_path / 'killed'}"]
    killed = Ranks(2, *again, hook=signal_at, hook_arguments=(KILLED_AT, signal.SIGKILL), hook_rank=0)
    assert killed.wait(grace=2)[0] == -signal.SIGKILL, killed.texts
    assert last_step(tmp_path / "killed") == KILLED_AT
    resumed = run_ranks(2, *again)
    assert_resumed("".join(rank.out for rank in resumed), tmp_path / "killed")
