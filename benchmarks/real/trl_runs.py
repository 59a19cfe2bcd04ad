"""Runs of experiments.yaml that TRL trains, for a comparison (benchmarks/requirements.txt installs it).

GKDTrainer cannot pack: a step has `DOCUMENTS` documents, which are about as many tokens as a packed step of ours. The
learning rate, its schedule, AdamW's settings and the limit of the gradient's norm are those of our runs.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DOCUMENTS = 2


def train(settings: dict[str, Any], beta: float, out: Path) -> Path:
    """Train with GKDTrainer on the dataset (`lmbda=0`), and return the folder of the model.

    beta: that of its generalized JSD; 0: forward KL, 1: reverse KL. The folder also gets tokens and seconds in
    metrics.jsonl, as ours.
    """
    if (out / "metrics.jsonl").exists():
        return out / "model"
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    arguments = GKDConfig(
        output_dir=str(out), lmbda=0.0, beta=beta, per_device_train_batch_size=DOCUMENTS, seed=settings["seed"],
        max_steps=settings["train.steps"], learning_rate=settings["train.learning_rate"], lr_scheduler_type="cosine",
        warmup_steps=settings["train.warmup"], weight_decay=settings["train.weight_decay"], adam_beta2=0.95,
        max_grad_norm=1.0, activation_checkpointing=False, bf16=False, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(settings[key], dtype=torch.float32)
        for key in ("student.model", "teacher.model")
    )
    tokenizer = AutoTokenizer.from_pretrained(settings["student.model"])
    texts = [json.loads(line)["text"] for line in Path(settings["data.train"]).read_text("utf-8").splitlines()]
    ids = [
        [*row[: settings["data.max_tokens"] - 1], tokenizer.eos_token_id]
        for row in tokenizer(texts, add_special_tokens=False)["input_ids"]
    ]
    trainer = GKDTrainer(
        student,
        teacher,
        arguments,
        data_collator=DataCollatorForLanguageModeling(pad_token_id=tokenizer.eos_token_id),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in ids]),
        processing_class=tokenizer,
    )
    result = trainer.train()
    trainer.save_model(str(out / "model"))
    tokens = sum(map(len, ids)) / len(ids) * DOCUMENTS * settings["train.steps"]
    line = {"step": settings["train.steps"], "tokens": round(tokens), "seconds": result.metrics["train_runtime"]}
    (out / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    return out / "model"
