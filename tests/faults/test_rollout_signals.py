"""On-policy runs that wait for servers end with a checkpoint, if there is something to save: after a signal, and if a
server does not load weights within `train.timeout`.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import wait_for
from kit.serving import Server
from kit.stub_servers import stub_server
from kit.stub_vllm import Vllm

from stillhouse.rollout.rollout import Rollout

#: seconds after which a run must have ended: SECONDS_TO_STOP, and some for the checkpoint
SOON = 20.0
PATIENCE = 90


def stop_before(step: int, pid: int, marker: str) -> None:
    """Stop a server right before a step (from 0) asks for completions."""
    take = Rollout.take

    def taking(rollout: Rollout, at: int, *others: Any) -> Any:
        if at == step and os.environ["RANK"] == "0":
            os.kill(pid, signal.SIGSTOP)
            Path(marker).touch()
        return take(rollout, at, *others)

    Rollout.take = taking  # type: ignore[method-assign]


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


@pytest.mark.slow
def test_a_server_that_never_loads_weights_ends_all_ranks(tmp_path: Path) -> None:
    out, path = tmp_path / "out", "/collective_rpc"
    settings = {"checkpoint.every": 0, "parallel.fsdp": 2, "train.timeout": 15, "rollout.engine": "vllm"}
    write_on_policy_run(tmp_path, **settings, **{"rollout.url": "http://x"})
    with stub_server(Vllm, tmp_path / "student", processed=True) as server:
        write_on_policy_run(tmp_path, **settings, **{"rollout.url": server.url})
        ending = threading.Event()
        # the first update succeeds, the second one never ends
        server.before[path] = lambda: server.before.update({path: lambda: ending.wait() and None})
        ranks = Ranks(2, "distill", tmp_path / "run.yaml")
        codes = ranks.wait(PATIENCE)
        ending.set()
    assert codes == [1, 1], ranks.texts
    assert f"{server.url} has not loaded version 1 of the weights within 15 s (train.timeout)" in ranks[0].err
    assert f"the run has stopped after a checkpoint: {out / 'checkpoints' / 'step-00000001'}" in ranks[0].err
    assert "Traceback" not in ranks.err
