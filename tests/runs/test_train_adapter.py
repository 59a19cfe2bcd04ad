"""Runs that train a LoRA: peft and transformers can load their results, and wrong settings are refused."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.layout_runs import distill
from kit.runs import (
    assert_same_run,
    contents,
    forward_backward,
    metrics,
    refused,
    refused_runs,
    run,
    save_model,
    session_of,
    write_run,
)
from kit.signal_hooks import kill_at
from kit.teacher_gradients import named_gradients
from kit.tensors import assert_equal_tensors
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillhouse.checkpoint.checkpoint_folder import verified
from stillhouse.checkpoint.resume import candidates
from stillhouse.checkpoint.save import load_checkpoint
from stillhouse.config import load_config
from stillhouse.config.read_config import dotted_values
from stillhouse.output.folder import RunFolder
from stillhouse.run.run import prepare

LORA: dict[str, Any] = {"student.adapter": {"r": 4, "alpha": 8}, "train.learning_rate": 1e-2}
OWN_BASE = {"objective.loss": "0.3*cross_entropy + 0.7*reverse_kl"}
IDS = torch.arange(3, 35)[None]


def teacher_is_base(folder: Path, **settings: Any) -> dict[str, Any]:
    """The settings of a run whose teacher is the student without its adapter."""
    return LORA | OWN_BASE | {"teacher.model": str(folder / "student")} | settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run with all its checkpoints."""
    folder = tmp_path_factory.mktemp("adapter")
    write_run(folder, tied=True, **LORA, **{"checkpoint.every": 2, "checkpoint.keep": 9})
    ended = run("distill", folder / "run.yaml")
    assert "adapter: LoRA r 4, alpha 8 on 14 modules, 5.76 k of " in ended.out
    return folder


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(IDS).logits


def test_the_adapter_is_peft_s_and_the_model_is_base_and_adapter(trained: Path) -> None:
    out = trained / "out"
    base = AutoModelForCausalLM.from_pretrained(trained / "student")
    before = logits(base)
    expected = logits(PeftModel.from_pretrained(base, out / "adapter"))
    assert (expected - before).abs().max() > 0.1
    merged = logits(AutoModelForCausalLM.from_pretrained(out / "model"))
    assert (merged - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert logits(AutoPeftModelForCausalLM.from_pretrained(out / "adapter")).equal(expected)
    names = (out / "model" / "config.json", trained / "student" / "config.json")
    assert len({path.read_text() for path in names}) == 1
    last = sorted((out / "checkpoints").iterdir())[-1]
    assert contents(last / "student") == contents(out / "adapter")


def test_a_checkpoint_holds_the_adapter_alone(trained: Path) -> None:
    for checkpoint in (trained / "out" / "checkpoints").iterdir():
        stored = {name for path in checkpoint.glob("resume/*.safetensors") for name in load_file(path)}
        assert stored
        assert all(".lora_" in name or name.startswith("random.") for name in stored)
        assert not [path for path in checkpoint.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]
    config = json.loads((trained / "out" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(trained / "student")
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (4, 8, True)


@pytest.mark.parametrize("teacher", [slow("another"), "own base"])
def test_killed_and_resumed_is_the_same_to_the_bit(tmp_path: Path, teacher: str) -> None:
    settings = LORA if teacher == "another" else teacher_is_base(tmp_path)
    adapter = settings["student.adapter"] | {"dropout": 0.1}
    write_run(tmp_path, **settings | {"student.adapter": adapter, "train.steps": 10, "checkpoint.every": 4})
    run("distill", tmp_path / "run.yaml")
    killed = [tmp_path / "run.yaml", f"out={tmp_path / 'killed'}"]
    kill_at(6, tmp_path / "killed", *killed)
    assert "resuming from" in run("distill", *killed).out
    assert_same_run(tmp_path / "killed", tmp_path / "out")
    assert contents(tmp_path / "killed" / "adapter") == contents(tmp_path / "out" / "adapter")
    assert (tmp_path / "killed" / "tokens.json").read_bytes() == (tmp_path / "out" / "tokens.json").read_bytes()


def test_a_lost_final_model_is_merged_again(trained: Path, tmp_path: Path) -> None:
    out = shutil.copytree(trained / "out", tmp_path / "out")
    shutil.rmtree(out / "model")
    run("distill", trained / "run.yaml", f"out={out}")
    assert contents(out / "model") == contents(trained / "out" / "model")


def test_another_adapter_is_another_run(trained: Path, tmp_path: Path) -> None:
    other = load_config(trained / "run.yaml", ["student.adapter.alpha=16"])
    with pytest.raises(ValueError, match=r"contains another run, with a different student\.adapter"):
        candidates(RunFolder(trained / "out"), "auto", dotted_values(other))
    checkpoint = verified(sorted((trained / "out" / "checkpoints").iterdir())[-1])
    for adapter in ({"r": 8}, None):
        session = session_of(tmp_path, **{"student.model": str(trained / "student"), "student.adapter": adapter})
        with pytest.raises(ValueError, match="does not fit this student"):
            load_checkpoint(checkpoint, session.models.engine)


@pytest.mark.parametrize("attention", [None, "eager"])
def test_a_base_that_teaches_is_in_memory_once(tmp_path: Path, attention: str | None) -> None:
    """A teacher with another attention implementation is another model and has separate weights."""
    other = {} if attention is None else {"teacher.attention": attention}
    session = session_of(tmp_path, **teacher_is_base(tmp_path, **other))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "student").num_parameters()
    decoders = filter(None, (session.models.student, session.models.teacher))
    weights = [weight for decoder in decoders for weight in decoder.parameters()]
    sizes = {weight.untyped_storage().data_ptr(): weight.numel() for weight in weights}
    assert session.models.student.lora is not None
    assert sum(sizes.values()) == base * (1 if attention is None else 2) + session.models.student.lora.trained
    assert (session.models.teacher is None) == (attention is None)


def test_a_base_that_teaches_equals_a_copy_of_it(tmp_path: Path) -> None:
    """The gradients and held-out metrics of a trained adapter are equal. Only the student has dropout."""
    save_model(tmp_path / "student", "llama", seed=1)
    steps: list[tuple[bool, dict[str, Tensor], float]] = []
    for attention in (None, "sdpa"):  # for these models null means sdpa, but an explicit sdpa loads a second model
        settings = teacher_is_base(tmp_path, **{"teacher.attention": attention, "train.precision": "fp32"})
        session = session_of(tmp_path, **settings)
        for name, parameter in session.models.student.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)), std=0.1)
        loss = forward_backward(session).sums["loss"]
        steps.append((session.models.teacher is None, named_gradients(session.models.student), loss))
    assert [is_base for is_base, _, _ in steps] == [True, False]
    (_, one, loss), (_, two, other) = steps
    assert loss == other
    assert_equal_tensors(one, two)
    assert all("lora" in name and gradient.any() for name, gradient in one.items())


def test_a_fresh_adapter_agrees_with_its_base(tmp_path: Path) -> None:
    write_run(tmp_path, **teacher_is_base(tmp_path))
    ended = run("distill", tmp_path / "run.yaml")
    assert "; the teacher is the same model without the adapter, so only one model is in memory" in ended.out
    checked = run("check", tmp_path / "run.yaml", f"out={tmp_path / 'other'}").out
    assert re.search("LoRA r 4, alpha 8 on 14 modules, 5.76 k of .*only one model is in memory", checked)
    first = next(line for line in metrics(tmp_path / "out") if line["step"] == 0)
    assert first["eval/forward_kl"] == pytest.approx(0, abs=1e-9)
    assert first["eval/agreement"] == 1
    assert metrics(tmp_path / "out")[-1]["eval/forward_kl"] > 1e-4
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["documents"]


def test_only_the_adapter_moves(tmp_path: Path) -> None:
    write_run(tmp_path, **LORA, **{"train.weight_decay": 0.1, "train.precision": "bf16", "student.dtype": "bfloat16"})
    ended = run("distill", tmp_path / "run.yaml", "train.activation_checkpointing=true")
    assert "model: " in ended.out
    matrices = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert {matrice.dtype for matrice in matrices.values()} == {torch.float32}
    assert all(bool(matrice.any()) for matrice in matrices.values())
    model = load_file(tmp_path / "out" / "model" / "model.safetensors")
    before = load_file(tmp_path / "student" / "model.safetensors")
    assert model.keys() == before.keys()
    for name, weight in model.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, before[name].bfloat16()) == (not name.endswith("proj.weight")), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("teacher", "layout"), [("another", "tensor=2"), ("own base", "fsdp=2"), ("own base", "pipeline=2")]
)
def test_every_layout_gives_the_adapter_of_one_process(tmp_path: Path, teacher: str, layout: str) -> None:
    """A run under a layout, from the start or from a checkpoint of one process, gives the same adapter."""
    settings = LORA if teacher == "another" else teacher_is_base(tmp_path)
    write_run(tmp_path, tied=True, **settings, **{"checkpoint.every": 3, "checkpoint.keep": 9})
    middle = tmp_path / "one process" / "checkpoints" / "step-00000003"
    for out, processes, overrides in (
        ("one process", 1, []),
        ("from the start", 2, [f"parallel.{layout}"]),
        ("resumed", 2, [f"parallel.{layout}", f"checkpoint.resume={middle}"]),
    ):
        distill(tmp_path, out, processes, *overrides)
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        expected = load_file(tmp_path / "one process" / name)
        for out in ("from the start", "resumed"):
            tensors = load_file(tmp_path / out / name)
            assert tensors.keys() == expected.keys()
            for key, tensor in expected.items():
                assert (tensors[key] - tensor).norm() <= 1e-4 * tensor.norm(), (out, key)
    outs = ("from the start", "resumed", "one process")
    assert len({(tmp_path / out / "adapter" / "adapter_config.json").read_text() for out in outs}) == 1


@pytest.mark.slow
def test_a_stage_without_an_adapter_ends_with_one_error(tmp_path: Path) -> None:
    write_run(tmp_path, **LORA)
    targets = "student.adapter.targets=[layers.0.mlp.up_proj]"
    ended = distill(tmp_path, "refused", 2, "parallel.pipeline=2", targets, code=2)
    assert "parallel: no parameter is trained on stage 2 of 2, layers 1 to 1 of the student" in ended.err
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(("targets", "key", "text"), refused_runs("targets of an adapter"))
def test_targets_that_cannot_have_an_adapter(tmp_path: Path, targets: list[str], key: str, text: str) -> None:
    with refused(key, text):
        prepare(write_run(tmp_path, tied=True, **{"student.adapter": {"targets": targets}}), announce=False)


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it could not be found
    config = write_run(tmp_path, **LORA)
    with refused("student.adapter", "student.adapter: peft is not installed; pip install 'stillhouse[lora]'"):
        prepare(config, announce=False)
