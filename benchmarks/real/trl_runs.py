"""Runs of experiments.yaml that TRL trains, for a comparison (benchmarks/requirements.txt installs it).

GKDTrainer cannot pack: a step has `DOCUMENTS` documents, which are about as many tokens as a packed step of ours. The
peak of the learning rate, the form of its schedule, AdamW's settings and the limit of the gradient's norm are those
of our runs. The warm-up of transformers begins with a rate of 0, so its first update changes nothing.
"""

import itertools
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
    complete = out / "settings.json"
    if complete.exists():
        if json.loads(complete.read_text(encoding="utf-8")) != settings:
            raise ValueError(f"{out} has a run with other settings: remove it first")
        return out / "model"
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    arguments = GKDConfig(
        output_dir=str(out), lmbda=0.0, beta=beta, per_device_train_batch_size=DOCUMENTS, seed=settings["seed"],
        max_steps=settings["train.steps"], learning_rate=settings["train.learning_rate"], lr_scheduler_type="cosine",
        warmup_steps=settings["train.warmup"], weight_decay=settings["train.weight_decay"], adam_beta2=0.95,
        max_grad_norm=1.0, train_sampling_strategy="sequential", activation_checkpointing=False, bf16=False,
        use_cpu=True, save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(settings[key], dtype=torch.float32)
        for key in ("student.model", "teacher.model")
    )
    tokenizer = AutoTokenizer.from_pretrained(settings["student.model"])
    texts = [json.loads(line)["text"] for line in Path(settings["data.train"]).read_text("utf-8").splitlines()]
    limit = settings["data.max_tokens"]
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    documents = [row[start : start + limit] for row in rows for start in range(0, len(row) - 1, limit)]
    trainer = GKDTrainer(
        student,
        teacher,
        arguments,
        data_collator=DataCollatorForLanguageModeling(pad_token_id=tokenizer.eos_token_id),
        train_dataset=Dataset.from_list([{"input_ids": document} for document in documents]),
        processing_class=tokenizer,
    )
    result = trainer.train()
    trainer.save_model(str(out / "model"))
    used = itertools.islice(itertools.cycle(documents), DOCUMENTS * settings["train.steps"])
    lines = [
        {"step": line["step"], "loss/total_nats_per_token": line["loss"], "train/gradient_norm": line["grad_norm"]}
        for line in trainer.state.log_history
        if "loss" in line
    ]
    lines[-1] |= {"tokens": sum(len(document) - 1 for document in used), "seconds": result.metrics["train_runtime"]}
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    complete.write_text(json.dumps(settings), encoding="utf-8")
    return out / "model"
