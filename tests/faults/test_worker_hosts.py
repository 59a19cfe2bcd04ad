"""A job on two hosts, each a torchrun with one rank, whose rewards and environments run in workers on both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import HOST, free_port, run_ranks
from kit.runs import contents

pytestmark = pytest.mark.slow
#: one worker of the second host ends in the middle of its first call of each kind
CODE = """
import os, signal, time
from pathlib import Path

def _call(kind):
    folder = Path(os.environ["CALLS"])
    if os.environ["GROUP_RANK"] == "1":
        try:
            (folder / f"{kind} ended").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"{kind} {os.environ['GROUP_RANK']} {os.getppid()}").touch()
    time.sleep(0.05)

def length(prompt, completion, record):
    _call("reward")
    return float(len(completion))

class Remembers:
    def reset(self, prompt, record):
        self.turns, self.length = 0, len(prompt)

    def step(self, turn):
        self.turns, self.length = self.turns + 1, self.length + len(turn)
        if self.turns > 1:
            _call("turn")
        return None if self.turns == 3 else f" {self.length}!"

    def reward(self):
        return self.length
"""


def run_on_two_hosts(folder: Path, name: str, *arguments: str) -> list[list[str]]:
    """Run `folder/run.yaml`. Returns the words of the names of the files that the functions have written."""
    (calls := folder / "calls").mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CALLS": str(calls)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--master-addr", HOST, "--master-port", str(free_port())]
    command = ["-m", "stillhouse", "distill", str(folder / "run.yaml"), f"out={folder / name}", *arguments]
    agents = [
        subprocess.Popen(
            [*launcher, "--node-rank", str(number), *command],
            env=environment,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        errors = [agent.communicate(timeout=180)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], errors
    return [path.name.split() for path in calls.iterdir()]


def test_workers_on_two_hosts_give_the_run_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host_functions.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    settings = {
        "objective.loss": "policy_gradient + reverse_kl",
        "data.eval": 0,
        "rollout.reward": "host_functions:length + environment",
        "rollout.environment": "host_functions:Remembers",
        "rollout.stop": ["e", "a", "i"],
        "rollout.schedule": "one_step_off",
        "parallel.fsdp": 2,
        "train.steps": 3,
    }
    write_on_policy_run(tmp_path, **settings)
    host = {"GROUP_RANK": "0", "CALLS": str(tmp_path)}
    run_ranks(2, "distill", tmp_path / "run.yaml", f"out={tmp_path / 'without'}", environment=host)
    calls = run_on_two_hosts(tmp_path, "workers", "rollout.workers=2")
    assert {tuple(words) for words in calls if words[1] == "ended"} == {("reward", "ended"), ("turn", "ended")}
    for kind in ("reward", "turn"):
        # the group rank and the parent of the workers: one process on each host
        assert sorted(words[1] for words in calls if words[0] == kind and words[1] != "ended") == ["0", "1"]
    assert len({words[2] for words in calls if words[1] != "ended"}) == 2
    assert rollout_figures(tmp_path / "workers") == rollout_figures(tmp_path / "without")
    assert contents(tmp_path / "workers" / "model") == contents(tmp_path / "without" / "model")
