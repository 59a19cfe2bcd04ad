"""Runs of experiments.yaml that TRL trains, for a comparison (benchmarks/requirements.txt installs it).

A run with the key `trl.beta` is one: its other settings decide on the trainer. GRPOTrainer if there is a reward,
GOLDTrainer if the teacher has another tokenizer, otherwise GKDTrainer, which samples if there are `rollout` keys.

TRL's trainers for distillation cannot pack texts: a step has `DOCUMENTS` of them, which are about as many tokens as a
packed step of ours. The peak of the learning rate, the form of its schedule, AdamW's settings and the limit of the
gradient's norm are those of our runs. The warm-up of transformers begins with a rate of 0, so its first update
changes nothing.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DOCUMENTS = 2


def train(settings: dict[str, Any], out: Path) -> Path:
    """Train, and return the folder of the model. It also gets targets and seconds in metrics.jsonl, as ours."""
    complete = out / "settings.json"
    if complete.exists():
        if json.loads(complete.read_text(encoding="utf-8")) != settings:
            raise ValueError(f"{out} has a run with other settings: remove it first")
        return out / "model"
    tokenizer = AutoTokenizer.from_pretrained(settings["student.model"])
    if "rollout.reward" in settings:
        trainer = _grpo(settings, out, tokenizer)
    elif "teacher.cross_tokenizer" in settings:
        trainer = _gold(settings, out, tokenizer)
    else:
        trainer = _gkd(settings, out, tokenizer)
    result = trainer.train()
    trainer.save_model(str(out / "model"))
    lines = list(_metrics(trainer.state.log_history))
    lines[-1] |= {"tokens": trainer.targets, "seconds": result.metrics["train_runtime"]}
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    complete.write_text(json.dumps(settings), encoding="utf-8")
    return out / "model"


def _gkd(settings: dict[str, Any], out: Path, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Generalized JSD of a beta: 0 is forward KL, 1 reverse KL. Each step is on-policy with probability `lmbda`."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    own = settings.get("rollout.share", 1.0) if "rollout.max_new_tokens" in settings else 0.0
    rows = list(_tokenized(settings, tokenizer))
    arguments = GKDConfig(
        **_arguments(settings, out, settings.get("rollout.prompts_per_step", DOCUMENTS)),
        lmbda=own,
        beta=settings["trl.beta"],
        temperature=1.0,
        max_new_tokens=settings.get("rollout.max_new_tokens", 1),
    )
    return _counted(GKDTrainer)(
        _model(settings["student.model"]),
        _model(settings["teacher.model"]),
        arguments,
        data_collator=partial(_padded, tokenizer=tokenizer),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=_adapter(settings),
    )


def _gold(settings: dict[str, Any], out: Path, tokenizer: PreTrainedTokenizerBase) -> Any:
    """ULD by position. Its alignment (`use_extended_uld`) needs two byte-level tokenizers, and Gemma's is none.

    GOLDTrainer refuses a text without a prompt, or one whose prompt is cut off: the first word is the prompt here.
    """
    from datasets import Dataset
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    words = [record["text"].partition(" ") for record in _records(settings)]
    rows = [{"prompt": first, "completion": space + rest} for first, space, rest in words]
    arguments = GOLDConfig(
        **_arguments(settings, out, DOCUMENTS),
        lmbda=0.0,
        beta=settings["trl.beta"],
        use_uld_loss=True,
        use_extended_uld=False,
        max_length=None,
    )
    return _counted(GOLDTrainer)(
        _model(settings["student.model"]),
        _model(settings["teacher.model"]),
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def _grpo(settings: dict[str, Any], out: Path, tokenizer: PreTrainedTokenizerBase) -> Any:
    """GRPO with TRL's defaults; beta weighs a divergence from the first model."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    module, _, name = settings["rollout.reward"].partition(":")
    samples = settings["rollout.samples_per_prompt"]
    arguments = GRPOConfig(
        **_arguments(settings, out, settings["rollout.prompts_per_step"] * samples),
        beta=settings["trl.beta"],
        num_generations=samples,
        max_completion_length=settings["rollout.max_new_tokens"],
    )
    # as text, because the columns of a dataset need one type, and the entries of two tasks differ
    rows = [{"prompt": record["prompt"], "record": json.dumps(record)} for record in _records(settings)]
    return _counted(GRPOTrainer)(
        _model(settings["student.model"]),
        reward_funcs=_reward(getattr(importlib.import_module(module), name)),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def _reward(score: Callable[[str, str, dict[str, Any]], float]) -> Callable[..., list[float]]:
    def rewards(completions: Sequence[list[dict[str, str]]], record: Sequence[str], **_: Any) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        return [score("", text, json.loads(item)) for text, item in zip(texts, record, strict=True)]

    return rewards


def _counted(trainer: type) -> Any:
    """The trainer with the count of the tokens that it has trained on as `targets`."""

    class Counted(trainer):
        targets = 0

        def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            mask = inputs["completion_mask"] if "completion_mask" in inputs else inputs["labels"][:, 1:] != -100
            self.targets += int(mask.sum())
            return super().compute_loss(model, inputs, *arguments, **options)

    return Counted


def _arguments(settings: dict[str, Any], out: Path, batch: int) -> dict[str, Any]:
    """The arguments of every trainer."""
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": batch,
        "seed": settings["seed"],
        "max_steps": settings["train.steps"],
        "learning_rate": settings["train.learning_rate"],
        "lr_scheduler_type": "cosine",
        "warmup_steps": settings["train.warmup"],
        "weight_decay": settings["train.weight_decay"],
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "activation_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def _model(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _adapter(settings: dict[str, Any]) -> Any:
    if "student.adapter" not in settings:
        return None
    from peft import LoraConfig

    adapter = settings["student.adapter"]
    return LoraConfig(r=adapter["r"], lora_alpha=adapter["alpha"], target_modules="all-linear", task_type="CAUSAL_LM")


def _records(settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(settings["data.train"]).read_text(encoding="utf-8").splitlines()]


def _tokenized(settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, list[int]]]:
    """The ids of prompts and completions; those of a text, which has no prompt, in pieces of the longest length."""
    limit = settings["data.max_tokens"]
    for record in _records(settings):
        prompt, text = record.get("prompt", ""), record.get("completion", record.get("text"))
        before, ids = tokenizer([prompt, text], add_special_tokens=False)["input_ids"]
        if "text" in record:
            ids = [*ids, tokenizer.eos_token_id]
        pieces = [ids[start : start + limit] for start in range(0, len(ids) - 1, limit)]
        yield from ({"prompt": before, "completion": piece} for piece in pieces)


def _padded(rows: Sequence[dict[str, list[int]]], tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """A batch of GKDTrainer: sequences and labels that are padded on the right, and prompts on the left."""
    ids = [row["prompt"] + row["completion"] for row in rows]
    batch = dict(tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt"))
    prompts = tokenizer.pad({"input_ids": [row["prompt"] for row in rows]}, padding_side="left", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for number, row in enumerate(rows):
        labels[number, : len(row["prompt"])] = -100
    masks = {"prompts": prompts["input_ids"], "prompt_attention_mask": prompts["attention_mask"]}
    return batch | masks | {"labels": labels}


def _metrics(history: Sequence[dict[str, Any]]) -> Iterator[dict[str, float]]:
    """The lines of metrics.jsonl: what TRL has logged of each step, by our names."""
    names = {"loss": "loss/total_nats_per_token", "grad_norm": "train/gradient_norm", "reward": "rollout/reward"}
    for line in history:
        if "loss" in line:
            yield {"step": line["step"]} | {name: line[key] for key, name in names.items() if key in line}
