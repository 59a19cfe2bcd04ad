"""Half of SmolLM2's layers, recovered with different objectives at equal tokens.

The student begins with every second layer of the teacher, its embedding, final norm and head. All students read the
same number of tokens in each step; for `answers`, they are what the teacher has sampled itself. The figures are those
of the student's held-out text against the teacher: V vocabulary, T tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.real.text import described, held_out_pieces, training_pieces
from benchmarks.record import RESULTS, write_result
from benchmarks.training_runs import run_config, student_settings, write_completions
from stillhouse.run.run import distill

#: objective → its loss and its data
OBJECTIVES = {
    "forward_kl": ("forward_kl", "text"),
    "reverse_kl": ("reverse_kl", "text"),
    "jsd": ("jsd(0.5)", "text"),
    "cross_entropy": ("cross_entropy", "text"),
    "answers": ("cross_entropy", "answers"),
}
STEPS, TOKENS, MAX_TOKENS, RATE = 90, 1024, 512, 6e-4
#: tokens of a beginning that the teacher continues, and of its continuation
PROMPT, ANSWER = 64, 192
PROMPTS = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8").splitlines()


#: the result file of the teacher and of the student before training
START = RESULTS / "real-recovery-start.json"


def result_path(objective: str, seed: int) -> Path:
    return RESULTS / f"real-recovery-{objective}-seed{seed}.json"


def recover(teacher: Path, folder: Path, objective: str, seed: int, steps: int) -> None:
    """Train one student in a folder, and write its result file. A run that was interrupted is continued.

    teacher: the folder of SmolLM2.
    """
    prepare(teacher, folder)
    loss, data = OBJECTIVES[objective]
    if data == "answers":
        write_answers(teacher, folder / "answers.jsonl", steps)
    settings = student_settings(folder, seed, steps, max_tokens=MAX_TOKENS, tokens_per_step=TOKENS)
    settings |= {
        "data.train": str(folder / f"{data}.jsonl"),
        "data.eval": 0,
        "student.init": {"from": "teacher", "layers": "every 2"},
        "teacher.model": str(teacher),
        "objective.loss": loss,
        "train.learning_rate": RATE,
        "eval.every": 0,
        "checkpoint.every": 30,
        "checkpoint.keep": 1,
        "out": str(folder / f"{objective}-seed{seed}"),
    }
    model = distill(run_config(settings)) / "model"
    result = {
        "theme": "real-recovery",
        "objective": objective,
        "loss": loss,
        "seed": seed,
        "settings": {"steps": steps, "tokens_per_step": TOKENS, "learning_rate": RATE, "data": data},
        "text": {"trained": described(training_pieces()), "held_out": described(held_out_pieces())},
        "end": figures(teacher, model),
        "answers": answers(model),
    }
    write_result(result_path(objective, seed), result)


def measure_start(teacher: Path, folder: Path) -> None:
    """Write the result file of the teacher and of the student before training."""
    prepare(teacher, folder)
    result: dict[str, Any] = {"theme": "real-recovery"}
    for name, model in (("teacher", teacher), ("start", folder / "start")):
        result[name] = {"figures": figures(teacher, model), "answers": answers(model)}
    write_result(START, result)


def prepare(teacher: Path, folder: Path) -> None:
    """Write the text, the student's folder without weights, and the student before training."""
    if (folder / "start" / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": piece}) + "\n" for piece in training_pieces())
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    config = AutoConfig.from_pretrained(teacher)
    config.num_hidden_layers //= 2
    config.save_pretrained(folder / "student")
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder / "student")
    model = AutoModelForCausalLM.from_pretrained(teacher)
    model.model.layers = model.model.layers[::2]
    model.config.num_hidden_layers //= 2
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder / "start")
    model.save_pretrained(folder / "start")


def write_answers(teacher: Path, path: Path, steps: int) -> None:
    """Sample the teacher's continuations of beginnings of the text, at least as many tokens as a run reads."""
    if path.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    beginnings = [tokenizer.decode(tokenizer(piece)["input_ids"][:PROMPT]) for piece in training_pieces()]
    count = min(len(beginnings), math.ceil(steps * TOKENS / (PROMPT + ANSWER)))
    lines = (json.dumps({"prompt": beginning}) + "\n" for beginning in beginnings[:count])
    problems, partial = path.with_suffix(".prompts"), path.with_suffix(".partial")
    problems.write_text("".join(lines), encoding="utf-8")
    write_completions(partial, problems, teacher, ANSWER).rename(path)


@torch.no_grad()
def figures(teacher: Path, student: Path) -> dict[str, float]:
    """Held-out perplexity, both KL divergences in nats per token, and the share of equal greedy tokens."""
    tokenizer, model = _loaded(student)
    expected = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    entropy = forward_kl = reverse_kl = equal = count = 0.0
    for piece in held_out_pieces():
        ids = torch.tensor([tokenizer(piece)["input_ids"][:MAX_TOKENS]])
        log_q, log_p = (of(ids).logits[0, :-1].log_softmax(-1) for of in (model, expected))  # (T, V)
        entropy -= log_q.gather(1, ids[0, 1:, None]).sum().item()
        forward_kl += (log_p.exp() * (log_p - log_q)).sum().item()
        reverse_kl += (log_q.exp() * (log_q - log_p)).sum().item()
        equal += (log_q.argmax(-1) == log_p.argmax(-1)).sum().item()
        count += len(log_q)
    sums = {"cross_entropy": entropy, "forward_kl": forward_kl, "reverse_kl": reverse_kl, "agreement": equal}
    means = {name: value / count for name, value in sums.items()}
    return {"perplexity": math.exp(entropy / count), **means, "tokens": count}


@torch.no_grad()
def answers(folder: Path, tokens: int = 40) -> dict[str, str]:
    """Greedy answers to the fixed questions, in the model's chat format."""
    tokenizer, model = _loaded(folder)
    texts = {}
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        texts[prompt] = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return texts


def _loaded(folder: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder), model
