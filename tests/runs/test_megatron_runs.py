"""Runs of `stillhouse distill` on Megatron-Core equal those of the other engine, and either engine resumes the other.

megatron-core is the real one, on a CPU; every rank replaces the CUDA devices that it requests (`cuda_is_cpu.py`).
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.layout_runs import assert_same_weights
from kit.ranks import Ranks
from kit.runs import metrics, run, write_run

pytest.importorskip("megatron.core")

#: the context manager stays open until the process ends
_OPEN = ExitStack()
LIMIT = 240


def without_cuda() -> None:
    from kit.cuda_is_cpu import cuda_is_cpu

    _OPEN.enter_context(cuda_is_cpu())


def megatron(folder: Path, out: str, processes: int, *overrides: str) -> Path:
    """Run the configuration of a folder on Megatron-Core, and return the run's folder."""
    arguments = ("distill", folder / "run.yaml", f"out={folder / out}", "parallel.engine=megatron", *overrides)
    ranks = Ranks(processes, *arguments, hook=without_cuda)
    assert ranks.wait(LIMIT) == [0] * processes, ranks.texts
    return folder / out


def write(folder: Path, family: str, **settings: Any) -> Path:
    write_run(folder, family=family, **{"train.steps": 4, "checkpoint.every": 2, "data.packing": "rows"} | settings)
    run("distill", folder / "run.yaml", f"out={folder / 'torch'}")
    return folder / "torch"


def assert_same_steps(one: Path, other: Path) -> None:
    """Compare what the steps of two runs have logged."""
    for line, expected in zip(metrics(one), metrics(other), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", ["parallel.tensor=2"]),
        slow("llama", ["parallel.pipeline=2"]),
        slow("qwen3", ["parallel.fsdp=2"]),
        slow("qwen3_moe", ["parallel.fsdp=2", "parallel.expert=2"]),
    ],
)
def test_steps_and_the_model_are_those_of_the_other_engine(tmp_path: Path, family: str, layout: list[str]) -> None:
    other = write(tmp_path, family)
    out = megatron(tmp_path, "megatron", 2, *layout)
    assert_same_steps(out, other)
    assert_same_weights(out, other)
