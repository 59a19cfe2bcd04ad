"""On-policy runs of models with dropout, routers' noise or documents that are not simply packed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.causal_families import build as build_causal
from kit.families import build
from kit.layout_runs import distill
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import run
from kit.toy_tokenizer import toy_tokenizer
from transformers import AutoModelForCausalLM, FalconConfig, MixtralConfig, PersimmonConfig, PhimoeConfig

from stillhouse.config import ConfigError
from stillhouse.models import evaluating
from stillhouse.models.forward_modes import noise_of, remove_noise
from stillhouse.run.run import prepare

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = SHAPE | {"intermediate_size": 40, "num_local_experts": 4, "num_key_value_heads": 2}
#: what the first line of a warning says
TRAINED_WITHOUT = "warning: the student is trained without the dropout of its configuration"


def model_of(name: str) -> Any:
    if name in ("gpt2", "phi3"):
        return build(name, vocab_size=61)
    torch.manual_seed(0)
    if name == "mixtral":
        return AutoModelForCausalLM.from_config(
            MixtralConfig(**EXPERTS, router_jitter_noise=0.1, attention_dropout=0.2)
        )
    return AutoModelForCausalLM.from_config(PhimoeConfig(**EXPERTS, router_jitter_noise=0.3, input_jitter_noise=0.1))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("gpt2", ["attn_dropout", "drop", "dropout", "resid_dropout"]),
        ("phi3", ["resid_attn_dropout", "resid_mlp_dropout"]),
        ("mixtral", ["attention_dropout", "jitter_noise"]),
        ("phimoe", ["input_jitter_noise", "router_jitter_noise"]),
    ],
)
def test_train_mode_without_noise_is_eval_mode(name: str, names: list[str]) -> None:
    model = model_of(name)
    configuration = copy.deepcopy(model.config.to_dict())
    assert noise_of(model.eval()) == []
    ids_BS = torch.randint(3, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), evaluating(model):
        expected_BSV = model(ids_BS).logits
    model.train()
    with torch.no_grad():
        assert (model(ids_BS).logits - expected_BSV).abs().max() > 1e-3
    assert noise_of(model) == names
    assert remove_noise(model) == names
    assert noise_of(model) == []
    before = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(model(ids_BS).logits, expected_BSV)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.config.to_dict() == configuration


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (FalconConfig(**SHAPE, hidden_dropout=0.1), "hidden_dropout"),
        (
            PersimmonConfig(**SHAPE, intermediate_size=40, attention_dropout=0.1, hidden_dropout=0.2),
            "attention_dropout, hidden_dropout",
        ),
    ],
    ids=["falcon", "persimmon"],
)
@pytest.mark.parametrize("processes", [1, slow(2)])
def test_dropout_that_is_no_attribute_of_a_module_is_refused(
    tmp_path: Path, config: Any, keys: str, processes: int
) -> None:
    """These families read it from their configuration in each forward."""
    torch.manual_seed(0)
    tokenizer = toy_tokenizer()
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    write_on_policy_run(tmp_path, **{"objective.loss": "policy_gradient(teacher_kl=1)"})
    ended = distill(tmp_path, "out", processes, "train.steps=1", code=1)
    assert f"(model type '{config.model_type}') has noise in train mode that could not be removed" in ended.err
    assert f"expected 0.0 for {keys} in its config.json" in ended.err


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (1, {"objective.loss": "policy_gradient(teacher_kl=1, clip_high=0.3)"}),
        slow(1, {"objective.loss": "sampled_kl(k2)", "train.activation_checkpointing": True}),
        slow(2, {"objective.loss": "policy_gradient(teacher_kl=1)", "parallel.pipeline": 2}),
        slow(2, {"objective.loss": "policy_gradient(teacher_kl=1)", "parallel.tensor": 2}),
    ],
    ids=str,
)
def test_ratios_have_no_noise(tmp_path: Path, processes: int, settings: dict[str, Any]) -> None:
    write_on_policy_run(tmp_path, family="gpt2" if "parallel.tensor" not in settings else "phi3", **settings)
    arguments = ("distill", tmp_path / "run.yaml", "train.steps=3")
    shown = run(*arguments).out if processes == 1 else run_ranks(processes, *arguments).texts
    assert shown.count(TRAINED_WITHOUT) == 1
    assert all(line["rollout/log_ratio_max"] < 1e-4 for line in rollout_figures(tmp_path / "out"))
    saved = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert saved["resid_pdrop"] == 0.1  # the student's own configuration


@pytest.mark.parametrize("loss", ["reverse_kl", "sampled_kl(k2)"])
def test_without_ratios_dropout_stays(tmp_path: Path, loss: str) -> None:
    settings = {"objective.loss": loss} | ({} if loss == "reverse_kl" else {"rollout.correction": "none"})
    write_on_policy_run(tmp_path, family="gpt2", **settings)
    shown = run("distill", tmp_path / "run.yaml", "train.steps=2").out
    assert TRAINED_WITHOUT not in shown
    assert any(line["rollout/log_ratio_max"] > 1e-2 for line in rollout_figures(tmp_path / "out"))
    assert shown.count("or the cause is the student's dropout in training (attn_dropout, drop, dropout") == 1


def test_dropout_of_an_adapter_is_refused_by_its_key(tmp_path: Path) -> None:
    settings = {"student.adapter": {"r": 4, "dropout": 0.1}}
    for loss, is_refused in (("policy_gradient(teacher_kl=1)", True), ("reverse_kl", False)):
        config = write_on_policy_run(tmp_path, **settings, **{"objective.loss": loss})
        if not is_refused:
            assert noise_of(prepare(config, announce=False).models.student) == ["lora_dropout"]
            continue
        with pytest.raises(ConfigError, match=r"^student\.adapter\.dropout: got 0\.1: expected 0\.0") as raised:
            prepare(config, announce=False)
        assert raised.value.key == "student.adapter.dropout"


@pytest.mark.parametrize("family", ["qwen3_5_text", slow("gpt_oss"), slow("nemotron_h"), slow("llama4_text")])
def test_the_engine_has_the_log_probabilities_of_training(tmp_path: Path, family: str) -> None:
    tokenizer = toy_tokenizer()
    build_causal(family, seed=1, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    write_on_policy_run(tmp_path, **{"train.steps": 4})
    ended = run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'out'}")
    assert "documents of student: " in ended.out
    lines = rollout_figures(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["rollout/log_ratio_max"] < 1e-4 for line in lines)
    assert all(line["rollout/log_ratio"] < 1e-5 for line in lines)
