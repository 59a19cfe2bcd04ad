"""`stillhouse plan` of vision-language models: the memory of tower and projector, frozen and trained."""

from pathlib import Path
from typing import Any

import pytest
from kit.image_models import write_image_model
from kit.plan_jobs import real_step
from kit.shard_ranks import pool_of_meshes

from stillhouse.config import load_config
from stillhouse.models.trained_parts import train_parts
from stillhouse.parallel import empty_decoder
from stillhouse.tools.plan.layout_plan import DryRuns, Machine, planned_job
from stillhouse.tools.plan.rank_counts import RankCounts

pytestmark = pytest.mark.slow


def config_of(model: Path, *overrides: str, **student: Any) -> Any:
    settings = {
        "student": {"model": str(model), "dtype": "float32", **student},
        "data": {"train": "x", "max_tokens": 64},
        "objective": {"loss": "cross_entropy", "chunk_tokens": 32},
        "train": {"tokens_per_step": 2048, "micro_batch_tokens": 256, "steps": 2, "precision": "fp32"},
        "out": str(model / "out"),
    }
    return load_config(None, overrides, settings=settings)


def counts(*jobs: dict[str, Any]) -> list[RankCounts]:
    with DryRuns() as runs:
        return runs.counts(jobs)


def planned(model: Path, *overrides: str, **student: Any) -> dict[str, Any]:
    return planned_job(config_of(model, *overrides, **student), Machine(1, 8, "h100"), 32)


def test_bytes_are_those_of_all_parts_and_of_the_trained_ones(tmp_path: Path) -> None:
    """Also of a family whose class for texts has no tower, and with few layers instead of all."""
    models = [write_image_model(family, tmp_path / family) for family in ("qwen3_vl", "gemma4")]
    cases = [(models[0], ["language", "projector", "vision"], False), (models[1], ["language"], True)]
    jobs = [
        planned(model, *(["data.image_pixels=4096"] if images else []), train=parts) for model, parts, images in cases
    ]
    *ranks, estimated = counts(*jobs, jobs[0] | {"kind": "estimated"})
    for (model, parts, images), rank in zip(cases, ranks, strict=True):
        decoder, sizes = empty_decoder(model, images=images), {True: 0, False: 0}
        train_parts(decoder, parts)
        for weight in decoder.parameters():
            sizes[weight.requires_grad] += weight.numel() * weight.element_size()
        assert rank.peak["student weights"] == pytest.approx(sum(sizes.values()), rel=0.02), (model, parts)
        assert rank.peak["optimizer"] == pytest.approx(2 * sizes[True], rel=0.02), (model, parts)
        assert rank.peak["gradients"] == pytest.approx(sizes[True], rel=0.02), (model, parts)
    assert estimated.memory == pytest.approx(ranks[0].memory, rel=0.05)
    assert estimated.kernels == ranks[0].kernels


def test_a_real_step_holds_the_same_bytes(tmp_path: Path) -> None:
    parts = ["language", "projector", "vision"]
    job = planned_job(
        config_of(write_image_model("qwen3_vl", tmp_path), "parallel.fsdp=2", train=parts, attention="sdpa"),
        Machine(2, 8, "h100"),
        32,
    )
    ranks = pool_of_meshes(2).call(real_step, job, limit=300)
    for real, planned in zip(ranks, counts(*(job | {"rank": rank} for rank in range(2))), strict=True):
        assert planned.memory == pytest.approx(sum(real.peak.values()), rel=0.1)
