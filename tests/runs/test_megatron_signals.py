"""Every loss and every teacher's signal: runs on Megatron-Core equal those of the other engine.

Compared are each step's losses, held-out metrics and gradient norm, and the exported weights.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.megatron_runs import assert_same_runs
from kit.runs import write_run
from kit.serving import Server

from stillhouse.signals.signal_spec import SignalKind
from stillhouse.tools.write_cache import write_cache

pytest.importorskip("megatron.core")

LAYOUTS = {
    "llama": ["parallel.pipeline=2"],
    "qwen3": ["parallel.tensor=2"],
    "qwen3_moe": ["parallel.fsdp=2", "parallel.expert=2"],
}
#: `test_megatron_runs.py` has 0.3*cross_entropy + 0.7*jsd(0.5)
LOSSES = ("forward_kl", "reverse_kl", "jsd(0.1)", "forward_kl + reverse_kl", "0.5*cross_entropy + forward_kl")


def write(folder: Path, **settings: Any) -> None:
    write_run(folder, **{"train.steps": 3, "checkpoint.every": 0, "data.packing": "rows"} | settings)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "loss"), [*product(LAYOUTS, LOSSES)])
def test_losses(tmp_path: Path, family: str, loss: str) -> None:
    write(tmp_path, family=family, **{"objective.loss": loss})
    assert_same_runs(tmp_path, *LAYOUTS[family])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a teacher in the job, which caches are written from and servers serve."""
    folder = tmp_path_factory.mktemp("teacher")
    write(folder, **{"objective.loss": "forward_kl"})
    return folder


@pytest.fixture(scope="module")
def server(teacher: Path) -> Iterator[str]:
    with Server(teacher / "teacher") as started:
        yield started.url


@pytest.mark.parametrize(
    ("signal", "family", "layout"),
    [
        slow("top_k", "llama", ["parallel.tensor=2", "parallel.sequence=true"]),
        slow("top_k", "qwen3", ["parallel.pipeline=2"]),
        slow("sampled", "qwen3_moe", ["parallel.fsdp=2"]),
        ("hidden", "qwen3", ["parallel.tensor=2"]),
        slow("hidden", "llama", ["parallel.pipeline=2"]),
        slow("hidden", "qwen3_moe", ["parallel.fsdp=2", "parallel.expert=2"]),
    ],
)
def test_signals_of_a_cache(
    tmp_path: Path, teacher: Path, signal: SignalKind, family: str, layout: list[str]
) -> None:
    cache = teacher / f"cache {signal}"
    if not cache.exists():
        config = write_run(teacher, **{"objective.loss": "forward_kl"})
        write_cache(config, cache, signal, top_k=9)
    write(tmp_path, family=family, cached=True, **{"teacher.cache": str(cache), "objective.loss": "forward_kl"})
    assert_same_runs(tmp_path, *layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal", "family", "layout"),
    [
        ("top_k", "llama", ["parallel.pipeline=2"]),
        ("top_k", "qwen3_moe", ["parallel.fsdp=2", "parallel.expert=2"]),
        ("chosen", "qwen3", ["parallel.tensor=2"]),
        ("hidden", "qwen3", ["parallel.fsdp=2"]),
        ("hidden", "llama", ["parallel.tensor=2", "parallel.sequence=true"]),
        ("hidden", "qwen3_moe", ["parallel.pipeline=2"]),
    ],
)
def test_signals_of_a_server(tmp_path: Path, server: str, signal: str, family: str, layout: list[str]) -> None:
    served = {"teacher.url": server, "teacher.signal": signal, "teacher.top_k": 9}
    write(tmp_path, family=family, cached=True, **served, **{"objective.loss": "0.3*cross_entropy + 0.7*forward_kl"})
    assert_same_runs(tmp_path, *layout)
