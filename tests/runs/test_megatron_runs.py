"""Runs of `stillhouse distill` on Megatron-Core equal those of torch, and either engine resumes the other."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.families import FAMILIES
from kit.layout_runs import weights
from kit.megatron_runs import assert_near_losses, assert_parity, assert_same, kill, megatron, save_student
from kit.runs import contents, run, write_run
from kit.signal_hooks import kill_at
from safetensors.torch import load_file

from stillhouse.config.engine_capabilities import capabilities
from stillhouse.tools.parity import layouts

pytest.importorskip("megatron.core")


STEPS = {"train.steps": 4, "checkpoint.every": 2}
MTP = {"student.mtp": {"depths": 2}}


def write(folder: Path, family: str, **settings: Any) -> Path:
    if family not in FAMILIES:
        save_student(folder, family)
    write_run(folder, family=family, **STEPS | settings)
    run("distill", folder / "run.yaml", f"out={folder / 'torch'}")
    return folder / "torch"


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", ["parallel.tensor=2"]),
        slow("llama", []),
        slow("gemma2", ["parallel.pipeline=2"]),
        slow("deepseek_v3", ["parallel.tensor=2", "parallel.sequence=true"]),
        slow("qwen3_moe", ["parallel.fsdp=2", "parallel.expert=2"]),
    ],
)
def test_steps_and_the_model_are_those_of_the_other_engine(tmp_path: Path, family: str, layout: list[str]) -> None:
    other = write(tmp_path, family)
    out = megatron(tmp_path, "megatron", 2 if layout else 1, *layout)
    assert_same(out, other)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), [("qwen3", {}), ("llama", MTP)])
def test_a_killed_run_resumes_under_another_layout_and_with_the_other_engine(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    undisturbed = write(tmp_path, family, **settings)
    moved = shutil.copytree(kill(tmp_path, "parallel.tensor=2"), tmp_path / "moved")
    assert_same(megatron(tmp_path, "killed", 2, "parallel.pipeline=2"), undisturbed)
    assert "resuming from" in run("distill", tmp_path / "run.yaml", f"out={moved}").out
    assert_same(moved, undisturbed)


@pytest.mark.slow
def test_mtp_layers_of_a_checkpoint_are_trained_on(tmp_path: Path) -> None:
    model = write(tmp_path, "llama", **MTP) / "model"
    other = tmp_path / "other"
    run("distill", tmp_path / "run.yaml", f"out={other}", f"student.model={model}")
    out = megatron(tmp_path, "megatron", 2, "parallel.context=2", f"student.model={model}")
    assert_same(out, other)
    assert any(".eh_proj." in name for name in weights(out))


@pytest.mark.slow
def test_a_run_of_the_other_engine_resumes_on_megatron_core_to_the_same_model(tmp_path: Path) -> None:
    undisturbed = write(tmp_path, "qwen3", **{"data.packing": "rows"})
    kill_at(3, tmp_path / "killed", tmp_path / "run.yaml", f"out={tmp_path / 'killed'}")
    out = megatron(tmp_path, "killed", 2, "parallel.tensor=2", "parallel.sequence=true")
    assert_same(out, undisturbed)


@pytest.mark.slow
def test_a_killed_run_equals_an_undisturbed_one_to_the_bit(tmp_path: Path) -> None:
    """Each rank has half of the optimizer's float32 weights and moments. In float32, `test_chaos.py` kills runs."""
    write_run(tmp_path, family="qwen3", **STEPS)
    arguments = ["parallel.fsdp=2", "train.precision=bf16", "train.activation_checkpointing=true"]
    undisturbed, killed = megatron(tmp_path, "undisturbed", 2, *arguments), kill(tmp_path, *arguments)
    megatron(tmp_path, "killed", 2, *arguments)
    assert contents(killed / "model") == contents(undisturbed / "model")


@pytest.mark.slow
def test_a_run_in_bfloat16_resumes_with_the_other_engine_from_float32_weights(tmp_path: Path) -> None:
    """Both engines continue from the same float32 weights and moments, and each computes in bfloat16."""
    write_run(tmp_path, family="qwen3", **STEPS | {"train.precision": "bf16"})
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'torch'}")
    killed = kill(tmp_path, "parallel.fsdp=2")
    assert "resuming from" in run("distill", tmp_path / "run.yaml", f"out={killed}").out
    assert_near_losses(killed, tmp_path / "torch")
    stored = {path.name: load_file(path) for path in (killed / "model").glob("*.safetensors")}
    assert all(tensor.dtype == torch.float32 for tensors in stored.values() for tensor in tensors.values())


@pytest.mark.slow
def test_parity_compares_the_layouts_of_megatron_core(tmp_path: Path) -> None:
    write_run(tmp_path, family="qwen3_moe")
    layouts = {"fsdp 2", "fsdp 2 × expert 2", "tensor 2, sequence", "context 2", "pipeline 2, 1f1b"}
    assert {line.split("  ")[0] for line in assert_parity(tmp_path)} >= layouts


def test_parity_compares_every_pair_of_axes() -> None:
    """`test_megatron_engine.py` has their gradients."""
    assert {str(layout) for layout in layouts(capabilities("megatron"), 4)} >= {
        *("fsdp 4", "fsdp 2 × tensor 2", "fsdp 2 × tensor 2, sequence", "fsdp 2 × context 2"),
        *("context 2 × tensor 2", "context 2 × tensor 2, sequence", "pipeline 2 × fsdp 2, 1f1b"),
        *("pipeline 2 × context 2, 1f1b", "pipeline 2 × tensor 2, 1f1b", "pipeline 2 × tensor 2, 1f1b, sequence"),
    }


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, family="qwen3", **{"parallel.engine": "megatron"})
    refused = run("distill", tmp_path / "run.yaml", code=1)
    assert "parallel.engine: megatron on cpu: Megatron-Core needs CUDA devices; expected a machine" in refused.err
