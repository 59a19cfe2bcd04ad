"""Recipes on tiny models: what stands in for the models, the data and the sizes that a recipe names.

Each model becomes a tiny one of the same model type, with the toy tokenizer. A model of a family is written once.
"""

import json
import tempfile
from functools import cache
from pathlib import Path

from kit.causal_families import build
from kit.image_models import write_image_model
from kit.image_runs import SETTINGS, write_data
from kit.runs import write_records
from kit.toy_tokenizer import TEXT, toy_backend, toy_tokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.recipes import RECIPES, model_sizes
from stillhouse.config import RunConfig, load_config

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
