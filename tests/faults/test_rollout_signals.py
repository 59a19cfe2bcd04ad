"""A signal ends an on-policy run that waits for servers: with a checkpoint, if there is something to save."""

import signal
import time
from pathlib import Path

import pytest
from ranks import Ranks
from runs import wait_for
from serving import Server
from test_on_policy import losses, write
from test_train_resume import last_step

#: seconds after which a run must have ended: SECONDS_TO_STOP, and some for the checkpoint
SOON = 20.0
PATIENCE = 90


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("which", ["writer", "teacher"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_signal_ends_a_run_whose_server_does_not_answer(
    tmp_path: Path, which: str, after: int, processes: int
) -> None:
    """The server is stopped, not ended: its connections stay open, and nothing comes."""
    out = tmp_path / "out"
    settings = {"checkpoint.every": 0, "rollout.schedule": "one_step_off", "parallel.fsdp": processes}
    write(tmp_path, **settings)
    with Server(tmp_path / "student", "--generate") as writer, Server(tmp_path / "teacher") as teacher:
        served = {"teacher.url": teacher.url, "teacher.timeout": PATIENCE}
        served |= {"rollout.engine": "stillhouse", "rollout.url": writer.url, "rollout.timeout": PATIENCE}
        write(tmp_path, cached=True, **settings, **served)
        arguments = ("distill", tmp_path / "run.yaml")
        ranks = Ranks(processes, *arguments)
        if after == 0:
            wait_for(lambda: (out / "metrics.jsonl").exists())  # the run begins
        else:
            wait_for(lambda: last_step(out) >= after)
        stopped = {"writer": writer, "teacher": teacher}[which]
        stopped.first.send(signal.SIGSTOP)
        time.sleep(1)
        ranks.send(signal.SIGTERM)
        started = time.monotonic()
        codes = ranks.wait(SOON, grace=SOON)
        stopped.first.send(signal.SIGCONT)
        assert codes == [128 + signal.SIGTERM] * processes, ranks.texts
        assert time.monotonic() - started < SOON
        assert "Traceback" not in ranks.err
        assert "stopped by SIGTERM" in ranks[0].err
        again = Ranks(processes, *arguments)
        assert again.wait(120) == [0] * processes, again.texts
    assert [line["step"] for line in losses(out)] == [1, 2, 3, 4, 5, 6]
