"""Variable-length attention under every layout trains as sdpa does, by the reference on the CPU."""

import json
from pathlib import Path

import pytest
from kit.ranks import run_ranks
from kit.runs import write_run
from kit.varlen_reference import use_reference


def metrics(folder: Path, attention: str, layout: str) -> list[tuple[float, float]]:
    """Return the losses and gradient norms of three steps of micro-batches of two rows."""
    write_run(folder)
    of_models = [f"{section}.attention={attention}" for section in ("student", "teacher")]
    run_ranks(2, "distill", folder / "run.yaml", layout, *of_models, "train.steps=3", hook=use_reference)
    lines = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    keys = ("loss/total_nats_per_token", "train/gradient_norm")
    return [tuple(line[key] for key in keys) for line in lines if keys[0] in line]


@pytest.fixture(scope="module")
def of_sdpa(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return metrics(tmp_path_factory.mktemp("sdpa"), "sdpa", "parallel.fsdp=2")


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["fsdp", "context", "pipeline", "tensor"])
def test_steps_equal_those_of_sdpa(tmp_path: Path, of_sdpa: list[tuple[float, float]], degree: str) -> None:
    for result, expected in zip(metrics(tmp_path, "varlen", f"parallel.{degree}=2"), of_sdpa, strict=True):
        assert result == pytest.approx(expected, rel=1e-5)
