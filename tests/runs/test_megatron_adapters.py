"""Runs of `stillhouse distill` that train a LoRA on Megatron-Core equal those of torch; its base is the teacher."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.megatron_runs import (
    LIMIT,
    assert_near_losses,
    assert_parity,
    assert_same,
    assert_same_steps,
    kill,
    megatron,
    without_cuda,
)
from kit.ranks import Ranks
from kit.runs import contents, run, write_run
from kit.tensors import assert_near
from safetensors.torch import load_file

pytest.importorskip("megatron.core")

STEPS = {"train.steps": 4, "checkpoint.every": 2, "train.learning_rate": 1e-2}
BF16 = ["train.precision=bf16", "student.dtype=bfloat16"]


def write(folder: Path, family: str, *, is_base: bool = True, **settings: Any) -> None:
    teacher = {"teacher.model": str(folder / "student")} if is_base else {}
    adapter = {"student.adapter": {"r": 4, "alpha": 8}}
    write_run(folder, family=family, **STEPS | adapter | teacher | settings)


def of_torch(folder: Path, *overrides: str) -> Path:
    run("distill", folder / "run.yaml", f"out={folder / 'torch'}", *overrides)
    return folder / "torch"


def assert_same_adapters(one: Path, other: Path, tolerance: float = 1e-4) -> None:
    """Compare the matrices by their names in peft's file, and peft's configuration to the byte."""
    adapters = [load_file(out / "adapter" / "adapter_model.safetensors") for out in (one, other)]
    assert_near(*adapters, tolerance)
    (dtype,) = {matrix.dtype for adapter in adapters for matrix in adapter.values()}
    assert dtype.itemsize == 4
    files = [contents(out / "adapter") for out in (one, other)]
    for of_one in files:
        del of_one["adapter_model.safetensors"]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("family", "layout", "is_base"),
    [
        ("qwen3", ["parallel.tensor=2"], True),
        slow("qwen3", ["parallel.fsdp=2"], False),
        slow("llama", ["parallel.pipeline=2"], True),
    ],
)
def test_steps_and_the_adapter_are_those_of_the_other_engine(
    tmp_path: Path, family: str, layout: list[str], is_base: bool
) -> None:
    write(tmp_path, family, is_base=is_base)
    out, other = megatron(tmp_path, "megatron", 2, *layout), of_torch(tmp_path)
    assert_same(out, other)  # the weights are those of the base with the adapter merged in
    assert_same_adapters(out, other)
    last = sorted((out / "checkpoints").iterdir())[-1]
    stored = {name for path in last.glob("resume/*.safetensors") for name in load_file(path)}
    assert stored
    assert all(".lora_" in name or name.startswith("random.") for name in stored)
    assert contents(last / "student") == contents(out / "adapter")


@pytest.mark.slow
def test_a_killed_run_resumes_under_another_layout_and_with_the_other_engine(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    undisturbed = of_torch(tmp_path)
    moved = shutil.copytree(kill(tmp_path, "parallel.tensor=2"), tmp_path / "moved")
    out = megatron(tmp_path, "killed", 2, "parallel.pipeline=2")
    assert "resuming from" in run("distill", tmp_path / "run.yaml", f"out={moved}").out
    for resumed in (out, moved):
        assert_same_steps(resumed, undisturbed)
        assert_same_adapters(resumed, undisturbed)


@pytest.mark.slow
def test_a_killed_run_equals_an_undisturbed_one_to_the_bit(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    arguments = ["parallel.fsdp=2", *BF16, "train.activation_checkpointing=true"]
    undisturbed, killed = megatron(tmp_path, "undisturbed", 2, *arguments), kill(tmp_path, *arguments)
    megatron(tmp_path, "killed", 2, *arguments)
    for folder in ("adapter", "model"):
        assert contents(killed / folder) == contents(undisturbed / folder)


@pytest.mark.slow
def test_a_base_in_bfloat16_has_an_adapter_in_float32(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", is_base=False)
    out, other = megatron(tmp_path, "megatron", 2, "parallel.fsdp=2", *BF16), of_torch(tmp_path, *BF16)
    assert_same_adapters(out, other, tolerance=0.2)
    assert_near_losses(out, other)


@pytest.mark.slow
def test_parity_compares_the_gradients_of_a_drawn_adapter(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    assert len(assert_parity(tmp_path)) == 5


def test_a_stage_without_an_adapter_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", **{"student.adapter": {"targets": ["layers.0.mlp.up_proj"]}})
    command = ("distill", tmp_path / "run.yaml", "parallel.engine=megatron", "parallel.pipeline=2")
    ranks = Ranks(2, *command, hook=without_cuda)
    assert ranks.wait(LIMIT) == [2, 2], ranks.texts
    assert "no parameter is trained in layers 1 to 1 of the student" in ranks.err
