"""Every signal of a teacher: runs on Megatron-Core equal those of the other engine.

Compared are each step's losses, held-out metrics and gradient norm, and the exported weights.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.layout_runs import assert_same_weights
from kit.megatron_runs import assert_same, assert_same_runs, megatron
from kit.runs import run, write_run
from kit.serving import Server
from kit.teacher_gradients import SUBJECTS, write_subject_teachers
from kit.two_tokenizers import GOLD, write_pair

from stillhouse.signals.signal_spec import SignalKind
from stillhouse.tools.write_cache import write_cache

pytest.importorskip("megatron.core")


def write(folder: Path, **settings: Any) -> None:
    write_run(folder, **{"train.steps": 3, "checkpoint.every": 0} | settings)


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
        slow("sampled", "qwen3_moe", ["parallel.fsdp=2"]),
        ("hidden", "qwen3", ["parallel.tensor=2"]),
        slow("hidden", "llama", ["parallel.pipeline=2"]),
        slow("hidden", "llama", ["parallel.context=2"]),
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
        ("top_k", "qwen3_moe", ["parallel.fsdp=2", "parallel.expert=2"]),
        ("chosen", "qwen3", ["parallel.tensor=2"]),
        ("hidden", "qwen3_moe", ["parallel.pipeline=2"]),
    ],
)
def test_signals_of_a_server(tmp_path: Path, server: str, signal: str, family: str, layout: list[str]) -> None:
    served = {"teacher.url": server, "teacher.signal": signal, "teacher.top_k": 9}
    write(tmp_path, family=family, cached=True, **served, **{"objective.loss": "0.3*cross_entropy + 0.7*forward_kl"})
    assert_same_runs(tmp_path, *layout)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run with two teachers of different widths."""
    return write_subject_teachers(tmp_path_factory.mktemp("several"), tied=True)


ROUTE = {"teachers.route": "subject"}
PREFIXED = {"prefix": "{answer}! "}
ITSELF = {"teachers.slow": {"student": "ema", "ema_decay": 0.5}, "teachers.self": {"student": "live", **PREFIXED}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sources", "settings", "layout"),
    [
        ("models", ROUTE, ["parallel.tensor=2", "parallel.sequence=true"]),
        ("models", ITSELF, ["parallel.context=2", *(f"teachers.{name}.parallel.fsdp=2" for name in SUBJECTS)]),
        ("stores", ROUTE, ["parallel.pipeline=2"]),
        ("stores", {"teachers.sum": "distributions"}, ["parallel.tensor=2", "parallel.sequence=true"]),
    ],
)
def test_several_teachers(
    tmp_path: Path, several: Path, sources: str, settings: dict[str, Any], layout: list[str]
) -> None:
    folder = shutil.copytree(several, tmp_path, dirs_exist_ok=True)
    weighted = {"weight": 2.0, **({} if sources == "stores" else PREFIXED)}
    teachers = {"teachers.math": {"model": str(folder / "math")}, "teachers.code": {"model": str(folder / "code")}}
    run_settings = {"cached": True, "data.eval": 0.2, **settings}
    if sources != "stores":
        write(folder, **run_settings, **teachers | {"teachers.code": teachers["teachers.code"] | weighted})
        assert_same_runs(folder, *layout)
        return
    write_cache(write_run(folder, **{"teacher.model": str(folder / "math"), "data.eval": 0.2}), folder / "cache")
    with Server(folder / "code") as server:
        stores = {"teachers.math": {"cache": str(folder / "cache")}, "teachers.code": {"url": server.url} | weighted}
        write(folder, **run_settings, **stores)
        assert_same_runs(folder, *layout)


@pytest.mark.slow
def test_a_run_with_an_average_of_the_other_engine_resumes(tmp_path: Path, several: Path) -> None:
    folder = shutil.copytree(several, tmp_path, dirs_exist_ok=True)
    settings = {"checkpoint.every": 2, "train.steps": 4, "data.eval": 0.2}
    write(folder, cached=True, **settings, **{"teachers.slow": {"student": "ema", "ema_decay": 0.5}})
    run("distill", folder / "run.yaml", f"out={folder / 'torch'}")
    step = folder / "torch" / "checkpoints" / "step-00000002"
    out = megatron(folder, "megatron", 2, "parallel.pipeline=2", f"checkpoint.resume={step}")
    assert_same_weights(out, folder / "torch")


@pytest.mark.slow
def test_a_teacher_with_its_own_layout(tmp_path: Path) -> None:
    write(tmp_path)
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'torch'}")
    out = megatron(tmp_path, "megatron", 2, "parallel.pipeline=2", "teacher.parallel.tensor=2")
    assert_same(out, tmp_path / "torch")


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer(tmp_path: Path) -> None:
    write_pair(tmp_path)
    write(tmp_path, **{"data.max_tokens": 64, "train.micro_batch_tokens": 128, "train.tokens_per_step": 256} | GOLD)
    assert_same_runs(tmp_path, "parallel.tensor=2")
