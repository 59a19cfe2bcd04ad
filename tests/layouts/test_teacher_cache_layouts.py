"""Runs from a cache under layouts, and caches that several processes write: the model of one process."""

import shutil
from pathlib import Path

import pytest
from kit.layout_runs import assert_same_weights
from kit.ranks import run_ranks
from kit.runs import Command, contents, run, write_run

from stillhouse.signals.signal_spec import SignalKind
from stillhouse.tools.write_cache import write_cache

LIMIT = 180
SHARD_BYTES = 5000
LOSS = {"objective.loss": "0.3*cross_entropy + 0.7*forward_kl"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache of hidden states, one of top-k ids, and for each a run from it in one process."""
    folder = tmp_path_factory.mktemp("cached")
    signals: tuple[SignalKind, ...] = ("hidden", "top_k")
    for signal in signals:
        write_cache(write_run(folder, **LOSS), folder / f"cache {signal}", signal, top_k=9)
        cached = {"teacher.cache": str(folder / f"cache {signal}"), "out": str(folder / f"one {signal}")}
        write_run(folder, cached=True, **LOSS, **cached)
        shutil.copy(folder / "run.yaml", folder / f"{signal}.yaml")
        run("distill", folder / f"{signal}.yaml")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal", "layout"), [("hidden", "tensor=2"), ("hidden", "pipeline=2"), ("top_k", "context=2")]
)
def test_the_model_of_one_process(workspace: Path, signal: str, layout: str) -> None:
    out = workspace / f"{signal} {layout}"
    run_ranks(2, "distill", workspace / f"{signal}.yaml", f"out={out}", f"parallel.{layout}")
    assert_same_weights(out, workspace / f"one {signal}")


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["hidden", "sampled"])
def test_two_processes_write_the_cache_of_one(workspace: Path, signal: SignalKind) -> None:
    config = write_run(workspace, **{"objective.loss": "forward_kl"})
    options = ("--signal", signal, "--top-k", "50")
    one, two = workspace / f"one {signal} shards", workspace / f"two {signal} shards"
    run_ranks(2, "cache", workspace / "run.yaml", "--out", two, *options, hook=small_shards)
    write_cache(config, one, signal, top_k=50, shard_bytes=SHARD_BYTES)
    assert len(list((one / "shards").glob("*.safetensors"))) > 3
    assert contents(two) == contents(one)


def small_shards() -> None:
    from stillhouse.tools import write_cache as writer

    writer.SHARD_BYTES = SHARD_BYTES


@pytest.mark.slow
def test_a_writer_that_is_killed_continues(workspace: Path) -> None:
    """Whatever it was doing: a kill at ten instants of one cache."""
    config = write_run(workspace, **LOSS)
    out, kills = workspace / "killed", 0
    for instant in [*range(1, 21, 2), 1000]:
        command = Command("cache", workspace / "run.yaml", "--out", out, hook=kill_at, hook_arguments=(instant,))
        code = command.wait(LIMIT)
        assert code in (0, -9), command.err
        kills += code == -9
    assert code == 0
    write_cache(config, workspace / "whole", "hidden", shard_bytes=SHARD_BYTES)
    assert kills >= 7
    assert contents(out) == contents(workspace / "whole")


def kill_at(instant: int) -> None:
    """Kill this process at its `instant`-th call that makes something of the cache visible or durable."""
    import os
    import signal

    from stillhouse.output import disk
    from stillhouse.tools import write_cache as writer

    writer.SHARD_BYTES = SHARD_BYTES
    calls = 0

    def counted(holder: object, name: str) -> None:
        original = getattr(holder, name)

        def wrapped(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == instant:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(holder, name, wrapped)

    counted(disk, "flush")
    counted(writer, "flush")
    counted(writer, "save_file")
    counted(writer, "save_teacher")
