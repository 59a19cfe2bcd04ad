"""Trains the teacher that the demo ships, from scratch: `python -m stillhouse.tools.demo.train_teacher --out DIR`.

The script uses plain torch and transformers, so that the teacher does not depend on the code that the demo shows. An
epoch contains the teacher split's prose twice and the source code of the same modules once. A fiftieth of the split
is not trained on but chooses the best checkpoint. The loss on the demo's held-out split is only reported, and the
student split is not read at all. An interrupted run continues from DIR.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stillhouse.tools.demo.corpus import Document, collect_split, collect_teacher_sources, name_hash
from stillhouse.tools.demo.tokenizer import encode, train_tokenizer

Model = Callable[..., Any]  # the model itself, or its compiled form

ROW = 512  # tokens per sequence
ROWS = 8  # sequences per step
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.2
WARMUP_STEPS = 200
DECAY_SHARE = 0.3  # the last part of the steps, in which the learning rate falls to zero
CHOOSING_SHARE = 0.02  # of the teacher split's names: these documents choose the checkpoint and are not trained on
PROSE_REPEATS = 2  # per epoch, which contains the source code once
STATE = "state.safetensors"


def teacher_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Return a configuration of 4.5 million parameters: 9 MB in bfloat16."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def chooses(document: Document) -> bool:
    """Whether a teacher document is set aside to choose the checkpoint; a module's source and prose go together."""
    return name_hash("choosing:" + document.name.removeprefix("source:")) < CHOOSING_SHARE


@dataclass(frozen=True)
class Text:
    """The tokenizer and the streams of token ids."""

    tokenizer: PreTrainedTokenizerFast
    prose_T: torch.Tensor
    source_T: torch.Tensor
    choosing_T: torch.Tensor
    held_out_T: torch.Tensor


def read_text() -> Text:
    """Collect the documents and tokenize them with a tokenizer that is trained on the training prose."""
    prose = collect_split("teacher")
    training = [document for document in prose if not chooses(document)]
    tokenizer = train_tokenizer(training)
    return Text(
        tokenizer,
        prose_T=encode(tokenizer, training),
        source_T=encode(tokenizer, [source for source in collect_teacher_sources() if not chooses(source)]),
        choosing_T=encode(tokenizer, [document for document in prose if chooses(document)]),
        held_out_T=encode(tokenizer, collect_split("held_out")),
    )


def rows(tokens_T: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Cut a stream of tokens into rows; the last token of each row is also the first token of the next row."""
    return tokens_T[offset:].unfold(0, ROW + 1, ROW)


def batches(text: Text, first_step: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield the batches from `first_step` on, cut at new offsets each epoch; resuming does not change them."""
    step = 0
    for epoch in range(10**9):
        generator = torch.Generator().manual_seed(seed + epoch)
        offsets = torch.randint(ROW, (PROSE_REPEATS + 1,), generator=generator).tolist()
        streams = [rows(text.prose_T, offset) for offset in offsets[1:]] + [rows(text.source_T, offsets[0])]
        shuffled = torch.cat(streams)
        shuffled = shuffled[torch.randperm(len(shuffled), generator=generator)]
        for batch in shuffled.split(ROWS)[:-1]:
            if step >= first_step:
                yield batch
            step += 1


def learning_rate_at(step: int, steps: int) -> float:
    """Return the learning rate of a step: warm-up, constant, linear decay."""
    left = (steps - step) / (DECAY_SHARE * steps)
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS, left)


def loss_of(model: Model, rows_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=rows_BT[:, :-1]).logits
    return cross_entropy(logits.float().flatten(0, 1), rows_BT[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Model, tokens_T: torch.Tensor) -> float:
    """Return the mean cross-entropy over the complete rows of a stream."""
    losses = [loss_of(model, batch) * len(batch) for batch in rows(tokens_T).split(ROWS)]
    return float(sum(losses)) / len(rows(tokens_T))


@dataclass
class Training:
    """The state of a run: everything that it needs to continue."""

    model: Qwen3ForCausalLM
    optimizer: torch.optim.Optimizer
    log: list[dict[str, float]] = field(default_factory=list)

    @property
    def step(self) -> int:
        return int(self.log[-1]["step"]) if self.log else 0

    @property
    def seconds(self) -> float:
        return self.log[-1]["seconds"] if self.log else 0.0


def new_training(config: Qwen3Config, seed: int) -> Training:
    """Return a newly initialised model with its optimizer; weight decay applies to matrices, not to norms."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return Training(model, torch.optim.AdamW(groups, betas=(0.9, 0.95)))


def save_state(path: Path, training: Training) -> None:
    """Save everything that a resumed run needs in one safetensors file, which is replaced atomically."""
    tensors = {f"model.{name}": p.detach() for name, p in training.model.named_parameters()}
    for index, state in training.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    save_file(tensors, path.with_suffix(".new"), metadata={"log": json.dumps(training.log)})
    os.replace(path.with_suffix(".new"), path)


def load_state(path: Path, training: Training) -> None:
    """Restore a saved state."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    parameters = dict(training.model.named_parameters())
    with safe_open(path, "pt") as file, torch.no_grad():
        training.log = json.loads(file.metadata()["log"])
        for key in file.keys():  # noqa: SIM118
            owner, name = key.split(".", 1)
            if owner == "model":
                parameters[name].copy_(file.get_tensor(key))
            else:
                index, name = name.split(".")
                state.setdefault(int(index), {})[name] = file.get_tensor(key)
    groups = training.optimizer.state_dict()["param_groups"]
    training.optimizer.load_state_dict({"state": state, "param_groups": groups})


def train(out: Path, steps: int, every: int, seed: int) -> None:
    """Train up to step `steps`; every `every` steps, evaluate, save, and write the model if it is the best so far."""
    out.mkdir(parents=True, exist_ok=True)
    text = read_text()
    training = new_training(teacher_config(text.tokenizer), seed)
    if (out / STATE).exists():
        load_state(out / STATE, training)
    losses: list[torch.Tensor] = []
    started = time.time() - training.seconds
    compiled = torch.compile(training.model, dynamic=False)
    for step, batch_BT in enumerate(batches(text, training.step, seed), training.step):
        if step == steps:
            return
        losses.append(optimize(compiled, training.optimizer, batch_BT, learning_rate_at(step, steps)))
        if (step + 1) % every == 0 or step + 1 == steps:
            line = measure(training.model, text, step, learning_rate_at(step, steps), losses)
            training.log.append(line | {"seconds": round(time.time() - started)})
            publish(out, training, text.tokenizer)
            save_state(out / STATE, training)
            losses.clear()


def optimize(model: Model, optimizer: torch.optim.Optimizer, batch_BT: torch.Tensor, rate: float) -> torch.Tensor:
    """Run one step and return its loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = loss_of(model, batch_BT)
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measure(
    model: Qwen3ForCausalLM, text: Text, step: int, rate: float, losses: list[torch.Tensor]
) -> dict[str, float]:
    """Return one line of the log: nats per token on the recent training batches and on text not trained on."""
    line = {
        "step": step + 1,
        "tokens": (step + 1) * ROWS * ROW,
        "learning_rate": rate,
        "train_cross_entropy": round(float(torch.stack(losses).mean()), 4),
        "choosing_cross_entropy": round(evaluate(model, text.choosing_T), 4),
        "held_out_cross_entropy": round(evaluate(model, text.held_out_T), 4),
    }
    print(json.dumps(line), flush=True)
    return line


def publish(out: Path, training: Training, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the log and, if its last line is the best so far, the model in bfloat16."""
    lines = [json.dumps(line) + "\n" for line in training.log]
    (out / "training_log.jsonl").write_text("".join(lines), encoding="utf-8")
    if training.log[-1] is min(training.log, key=lambda line: line["choosing_cross_entropy"]):
        shipped = Qwen3ForCausalLM(training.model.config).to(torch.bfloat16)
        shipped.load_state_dict(training.model.state_dict())
        shipped.save_pretrained(out / "new")
        tokenizer.save_pretrained(out / "new")
        for path in (out / "new").iterdir():
            os.replace(path, out / path.name)
        (out / "new").rmdir()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model; a run in it is resumed")
    parser.add_argument("--steps", type=int, default=10_000, help=f"steps of {ROWS * ROW} tokens")
    parser.add_argument("--every", type=int, default=250, help="steps between evaluations and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train(arguments.out, arguments.steps, arguments.every, arguments.seed)


if __name__ == "__main__":
    main()
