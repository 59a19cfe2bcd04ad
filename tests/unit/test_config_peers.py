"""Names of other tools: every one leads to a key that exists, and the page that lists them is true."""

import ast
import re
from pathlib import Path

import click
import pytest
from kit.config_cases import failure, load, refused_calls, yaml_file
from kit.pages import code_blocks
from ruamel.yaml import YAML

from docs.write_config import with_names
from stillhouse.cli import cli
from stillhouse.config import RunConfig, load_config, override_hint
from stillhouse.config.explain_errors import PEERS, loss_hint, nearest, peer_entries, peer_hint, peer_table
from stillhouse.config.schema import value_fields
from stillhouse.user_code.functions import REWARD, checked_reward, load_function

#: the fields of GRPOConfig of TRL 1.16 that transformers' TrainingArguments does not have
GRPO_FIELDS = """
model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations
num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high sapo_temperature_neg
sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level
reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model
ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy
entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions
log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
vllm_importance_sampling_cap
"""
#: fields of TrainingArguments that the page's GRPO job sets
OF_TRAINER = {"output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "bf16"}
OF_TRAINER |= {"lr_scheduler_type", "warmup_steps", "max_steps", "save_steps", "report_to"}
#: a word of each of the page's blocks about GRPO
JOB_REWARDS_AND_WRAPPER = ("GRPOConfig(", "def exact(completions", "def of_trl(function)")
PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
KNOWN = {**value_fields(RunConfig), **RunConfig.model_fields}


def test_every_entry_leads_to_what_exists() -> None:
    assert all(list(entry.names()) for entry in peer_entries())
    assert all(entry.ours for entry in peer_table().keys)
    assert all(entry.note and not entry.ours for entry in peer_table().without_key)
    assert [key for entry in peer_entries() for key in entry.ours if key not in {*KNOWN, "student.adapter"}] == []
    named = [name for entry in peer_entries() for name in re.findall(r"stillhouse (\w+)", entry.note)]
    assert {"distill", "evaluate", "export"} <= set(named) <= set(cli.list_commands(click.Context(cli)))
    for key, values in peer_table().values.items():
        for ours, theirs in values.items():
            load(f"{key}={ours}")
            for value in theirs:
                assert f"did you mean {ours}?" in str(failure(f"{key}={value}"))
    rows = {name for entry in peer_entries() for name in entry.trl}
    assert [name for name in GRPO_FIELDS.split() if name not in rows] == []


@pytest.mark.parametrize("peer", PEERS)
def test_every_name_leads_to_its_key(peer: str) -> None:
    rows = [(name, entry) for entry in peer_entries() for name in getattr(entry, peer)]
    assert len(rows) > 20
    for name, entry in rows:
        last = name.rpartition(".")[2]
        if any(key.rpartition(".")[2] == last for key in KNOWN):
            continue  # the same name, in another section
        hint = peer_hint(name)
        assert hint is not None, name
        assert PEERS[peer] in hint or f" {name.rpartition('.')[2]}" in f" {hint}", name
        assert not entry.ours or any(key in hint for key in entry.ours), name


@pytest.mark.parametrize(("call", "words"), refused_calls("losses of other tools"))
def test_an_error_about_a_loss_of_another_tool(call: str, words: str) -> None:
    hint = loss_hint(eval(call))
    assert (bool(hint), bool(re.match(words, hint))) == (bool(words), True)


@pytest.mark.parametrize(("call", "words"), refused_calls("options of the command line"))
def test_an_option_that_is_a_key(call: str, words: str) -> None:
    option = eval(call)
    hint = override_hint(option, RunConfig)
    assert hint.startswith(words)
    assert bool(hint) == bool(words)


@pytest.mark.parametrize(
    "word",
    ["zzz", "verbose", "train.cuda_graphs", "data.streaming", "fp8", "teacher.name", "model_class", "model._target_"],
)
def test_a_foreign_word_gets_no_near_name(word: str) -> None:
    assert nearest(word, KNOWN) == []


def test_the_page_is_up_to_date_and_its_configurations_load(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- names: ") == len(PEERS) == text.count("<!-- end -->")
    assert with_names(text) == text, "run python docs/write_config.py"
    blocks = code_blocks(PAGE.read_text(encoding="utf-8"), "yaml")
    ours = [block for block in blocks if "student" in (YAML(typ="safe").load(block) or {})]
    assert len(ours) == len(PEERS) + 1  # two of TRL
    for text in ours:
        assert load_config(yaml_file(tmp_path, text)).out == "runs/qwen3"


def test_the_wrapper_of_the_page_calls_rewards_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = code_blocks(PAGE.read_text(encoding="utf-8"), "python")
    job, of_trl, wrapper = (next(text for text in blocks if word in text) for word in JOB_REWARDS_AND_WRAPPER)
    (tmp_path / "trl_rewards.py").write_text(of_trl, encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(wrapper, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    exact, short = (load_function(REWARD, f"my_rewards:{name}") for name in ("exact", "short"))
    chat = {"prompt": [{"role": "user", "content": "1+1=?"}], "answer": "2"}
    assert checked_reward(exact, "User: 1+1=?", " 2", chat, "d:1") == 1.0
    assert checked_reward(short, "User: 1+1=?", "2" * 50, chat, "d:1") == -0.5
    message = r"expected a function\(prompt, completion, record\); reward functions for TRL take"
    with pytest.raises(ValueError, match=message):
        load_function(REWARD, "trl_rewards:exact")
    calls = [node for node in ast.walk(ast.parse(job)) if isinstance(node, ast.Call)]
    fields = {keyword.arg for call in calls if ast.unparse(call.func) == "GRPOConfig" for keyword in call.keywords}
    assert fields
    assert fields - OF_TRAINER.union(GRPO_FIELDS.split()) == set()
