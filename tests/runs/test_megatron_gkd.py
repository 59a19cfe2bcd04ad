"""examples/megatron_gkd.sh: one command starts both servers and the run of examples/megatron_gkd.yaml.

The models are small, and all processes are on the CPU (`cuda_is_cpu.py`).
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import free_port
from kit.runs import ROOT, wait_for

from stillhouse.config import load_config

pytest.importorskip("megatron.core")

#: Python imports it at its start, and ranks then run without CUDA
RANKS_WITHOUT_CUDA = """
import os
if "RANK" in os.environ:
    from kit.megatron_runs import without_cuda
    without_cuda()
"""


def test_the_configuration_is_the_recipe_of_its_page() -> None:
    config = load_config(ROOT / "examples" / "megatron_gkd.yaml")
    assert config.rollout is not None
    assert config.teacher is not None
    assert (config.parallel.engine, config.rollout.schedule, config.teacher.signal) == (
        "megatron",
        "one_step_off",
        "top_k",
    )


@pytest.mark.slow
def test_the_command_trains_and_ends_its_servers(tmp_path: Path) -> None:
    write_on_policy_run(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(RANKS_WITHOUT_CUDA)
    ports = {"WRITER_PORT": str(free_port()), "TEACHER_PORT": str(free_port())}
    models = {"STUDENT": str(tmp_path / "student"), "TEACHER": str(tmp_path / "teacher"), "TRAINER_GPUS": "0,1"}
    small = [
        *(f"data.train={tmp_path / 'train.jsonl'}", "data.max_tokens=37", f"out={tmp_path / 'out'}", "device=cpu"),
        *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=11"),
        *("train.epochs=null", "train.steps=3", "parallel.pipeline=1", "seed=3"),
    ]
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    python = {"PATH": commands, "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", ROOT / "examples" / "megatron_gkd.sh", ROOT / "examples" / "megatron_gkd.yaml", *small],
        env=os.environ | ports | models | python,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # notices of Megatron-Core at its import, which other tests' ranks have from their fork server
    assert not [line for line in ended.stderr.splitlines() if "/megatron/" in line or "DEPRECATED" in line], (
        ended.stderr
    )
    assert [line["rollout/staleness_max"] for line in rollout_figures(tmp_path / "out")] == [0, 1, 1]
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    wait_for(lambda: not any(answers(int(port)) for port in ports.values()), 20)


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
