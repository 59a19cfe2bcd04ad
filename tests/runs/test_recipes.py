"""recipes/: each file is a complete run, its check passes on tiny models, and the page shows its present plan."""

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from kit import slow
from kit.causal_families import build
from kit.image_models import write_image_model
from kit.image_runs import SETTINGS, write_data
from kit.ranks import Ranks
from kit.runs import ROOT, run, write_records
from kit.serving import Server
from kit.toy_tokenizer import TEXT, toy_backend, toy_tokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.recipes import (
    PAGE,
    RECIPES,
    commands,
    model_config,
    model_sizes,
    planned_recipes,
    plans,
    recipes,
    with_table,
)
from stillhouse.config import RunConfig, load_config
from stillhouse.models.pretrained import auto_class

MAX_TOKENS = 64
SUBJECTS = ("math", "code", "chat")


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp())


@cache
def tiny_model(model_type: str, seed: int, vocabulary: int = 400) -> Path:
    """Return the folder of a tiny model. Two vocabularies have two tokenizers."""
    folder = _folder() / f"{model_type}-{seed}-{vocabulary}"
    if model_type == "qwen3_vl":
        return write_image_model(model_type, folder, seed)
    tokenizer = _tokenizer(vocabulary)
    sizes = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}
    if model_type != "gemma4_text":
        del sizes["vocab_size_per_layer_input"]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    build(model_type, seed=seed, **sizes, **special).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@cache
def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    return toy_tokenizer(backend=toy_backend(text=TEXT, vocabulary=vocabulary))


@cache
def _data() -> Path:
    """Return a folder with prompts and completions, and with conversations about images."""
    folder = _folder() / "data"
    folder.mkdir()
    words = " ".join(TEXT).split()
    records = [
        {
            "prompt": " ".join(words[number : number + 4]),
            "completion": " " + " ".join(words[number + 4 : number + 8]),
            "subject": SUBJECTS[number % len(SUBJECTS)],
        }
        for number in range(24)
    ]
    write_records(folder / "texts.jsonl", records)
    write_data(folder)
    return folder


def recipe_config(name: str) -> RunConfig:
    return load_config(RECIPES / f"{name}.yaml")


def overrides(name: str, out: Path) -> list[str]:
    """Return the overrides that replace a recipe's models, data and sizes, and servers by models in the job."""
    config = recipe_config(name)
    types = {model: options["model_type"] for model, options in model_sizes().items()}
    models = {"student": tiny_model(types[config.student.model], 0)}
    for seed, (section, teacher) in enumerate(config.teacher_sections.items(), 1):
        vocabulary = 400 if teacher.cross_tokenizer is None else 380
        if teacher.model is not None:
            models[section] = tiny_model(types[teacher.model], seed, vocabulary)
    has_images = types[config.student.model] == "qwen3_vl"
    data = _data() / ("train.jsonl" if has_images else "texts.jsonl")
    sizes = {"data.max_tokens": MAX_TOKENS, "train.tokens_per_step": 256, "train.micro_batch_tokens": 128}
    sizes |= SETTINGS if has_images else {}
    sizes |= {"parallel.expert": 1} if config.parallel.expert > 1 else {}
    if config.rollout is not None:
        sizes |= {"rollout.prompts_per_step": 3, "rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 8}
        if config.rollout.url is not None:
            sizes |= {"rollout.engine": "transformers", "rollout.url": "null", "rollout.weights": "null"}
        del sizes["train.tokens_per_step"]
    if config.eval.prompts is not None:
        sizes |= {"eval.prompts.data": str(data), "eval.prompts.count": 4, "eval.prompts.max_new_tokens": 8}
    if config.teacher is not None and config.teacher.offload:
        sizes["teacher.offload"] = "false"  # a CPU refuses it
    replaced = {f"{section}.model": str(folder) for section, folder in models.items()} | sizes
    replaced |= {"data.train": str(data), "out": str(out), "device": "cpu"}
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in replaced.items()]


#: the most lines of a recipe
LINES = 30
SERVED = "qwen3_235b_a22b_served_to_8b"
MEGATRON = "qwen3_235b_a22b_to_32b_megatron"
QUICK = "qwen3_30b_a3b_to_4b"
#: billions of parameters as their makers give them, without towers for images and sound
PARAMETERS = {
    "Qwen/Qwen3-1.7B": 1.7,
    "Qwen/Qwen3-4B": 4.0,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30.5,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 235.1,
    "unsloth/gpt-oss-20b-BF16": 20.9,
    "unsloth/gpt-oss-120b-BF16": 116.8,
    "meta-llama/Llama-3.2-3B-Instruct": 3.2,
    "google/gemma-4-31B-it": 30.7,
    "Qwen/Qwen3-VL-2B-Instruct": 2.1,
    "Qwen/Qwen3-VL-8B-Instruct": 8.8,
}


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_a_short_complete_run(name: str) -> None:
    """Every key is valid, the file is short, and the commands in its comments name it with valid overrides."""
    config = recipe_config(name)
    assert config.out == f"runs/{name}"
    assert len((RECIPES / f"{name}.yaml").read_text().splitlines()) <= LINES
    launches = [command for command in commands(name) if command[:2] != ["stillhouse", "plan"]]
    assert launches
    for command in launches:
        assert command[0] in ("stillhouse", "torchrun", "sbatch")
        script = [word for word in command if word.startswith("examples/")]
        assert all((ROOT / word).exists() for word in script), command
        at = command.index(f"recipes/{name}.yaml")
        load_config(RECIPES / f"{name}.yaml", command[at + 1 :])
    models = [config.student.model, *(teacher.model for teacher in config.teacher_sections.values())]
    assert {model for model in models if model is not None} <= {*model_sizes()}


def test_the_models_have_as_many_parameters_as_published() -> None:
    for name, billions in PARAMETERS.items():
        config = model_config(name)
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        assert round(sum(weight.numel() for weight in model.parameters()) / 1e9, 1) == billions, name


@pytest.mark.parametrize(
    "name", [QUICK, *(slow(name) for name in recipes() if name not in (QUICK, SERVED, MEGATRON))]
)
def test_a_recipe_passes_its_check_on_tiny_models(name: str, tmp_path: Path) -> None:
    shown = run("check", RECIPES / f"{name}.yaml", *overrides(name, tmp_path / "out")).out
    assert "one step" in shown
    assert "peak memory" in shown


@pytest.mark.slow
def test_the_recipe_with_a_server_passes_its_check(tmp_path: Path) -> None:
    with Server(tiny_model("qwen3_moe", 1)) as server:
        served = f"teacher.url={server.url}"
        shown = run("check", RECIPES / f"{SERVED}.yaml", *overrides(SERVED, tmp_path / "out"), served).out
    assert "peak memory" in shown


@pytest.mark.slow
def test_the_recipe_for_megatron_passes_its_check(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from kit.megatron_runs import without_cuda

    sizes = ["parallel.tensor=2", "parallel.pipeline=1"]
    arguments = ("check", RECIPES / f"{MEGATRON}.yaml", *overrides(MEGATRON, tmp_path / "out"), *sizes)
    ranks = Ranks(2, *arguments, hook=without_cuda)
    assert ranks.wait(240) == [0, 0], ranks.texts
    assert "peak memory" in ranks[0].out


def test_the_page_shows_the_plans_of_the_recipes_as_they_are() -> None:
    """If this fails: python -m benchmarks.recipes."""
    results = plans()
    digests = {recipe.key: recipe.digest for recipe in planned_recipes()}
    assert {key: result["sha256"] for key, result in results.items()} == digests
    assert PAGE.read_text() == with_table(PAGE.read_text(), results)
    assert all(f"(../recipes/{name}.yaml)" in PAGE.read_text() for name in recipes())
