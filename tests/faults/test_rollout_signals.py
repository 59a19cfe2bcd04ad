"""A signal ends an on-policy run that waits for servers: with a checkpoint, if there is something to save."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import wait_for
from kit.serving import Server

from stillhouse.loops.rollouts import Rollouts

#: seconds after which a run must have ended: SECONDS_TO_STOP, and some for the checkpoint
SOON = 20.0
PATIENCE = 90


def stop_before(step: int, pid: int, marker: str) -> None:
    """Stop a server right before a step (from 0) asks for completions."""
    ask = Rollouts.ask

    def asking(rollouts: Rollouts, at: int, *others: Any) -> None:
        if at == step and os.environ["RANK"] == "0":
            os.kill(pid, signal.SIGSTOP)
            Path(marker).touch()
        ask(rollouts, at, *others)

    Rollouts.ask = asking  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "which", "processes"), [(0, "writer", 1), (0, "teacher", 2), (3, "writer", 2), (3, "teacher", 1)]
)
def test_a_signal_ends_a_run_whose_server_does_not_answer(
    tmp_path: Path, which: str, after: int, processes: int
) -> None:
    """The server is stopped, not ended: its connections stay open, and nothing comes."""
    out = tmp_path / "out"
    settings = {"checkpoint.every": 0, "rollout.schedule": "one_step_off", "parallel.fsdp": processes}
    write_on_policy_run(tmp_path, **settings)
    with Server(tmp_path / "student", "--generate") as writer, Server(tmp_path / "teacher") as teacher:
        served = {"teacher.url": teacher.url, "teacher.timeout": PATIENCE}
        served |= {"rollout.engine": "stillhouse", "rollout.url": writer.url, "rollout.timeout": PATIENCE}
        write_on_policy_run(tmp_path, cached=True, **settings, **served)
        arguments = ("distill", tmp_path / "run.yaml")
        stopped, marker = {"writer": writer, "teacher": teacher}[which], tmp_path / "stopped"
        pid = stopped.first.process.pid
        ranks = Ranks(processes, *arguments, hook=stop_before, hook_arguments=(after, pid, str(marker)))
        wait_for(marker.exists)
        time.sleep(1)
        ranks.send(signal.SIGTERM)
        started = time.monotonic()
        codes = ranks.wait(SOON, grace=SOON)
        stopped.first.send(signal.SIGCONT)
        assert codes == [128 + signal.SIGTERM] * processes, ranks.texts
        assert time.monotonic() - started < SOON
        assert "Traceback" not in ranks.err
        where = f"after step {after}; checkpoint " if after else "before its first step was finished; "
        assert f"stopped by SIGTERM {where}" in ranks[0].err
        assert list((out / "checkpoints").glob("step-*")) == [out / "checkpoints" / f"step-{after:08d}"] * (after > 0)
        run_ranks(processes, *arguments)
    assert [line["step"] for line in rollout_figures(out)] == [1, 2, 3, 4, 5, 6]
