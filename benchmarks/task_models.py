"""Trains a tiny model on a task from scratch, on one core.

    python -m benchmarks.task_models --task "reversal(2:12)" --steps 600 --out DIR

Cross-entropy on the answers alone, characters as tokens, plain torch. The model is a starting point for experiments:
a student that solves a part of the problems, or a teacher that solves nearly all. Every `--every` steps, the exact
match on held-out problems is printed, with the processor time so far; training stops when it reaches `--until`.

Seed 0, 64 problems per step for reversal(2:12), 128 for sums(2:3), on one core of a small machine that is shared:

    reversal(2:12)                                --steps 90    15 s   0.62
    reversal(2:12)                                --steps 600   90 s   1.00
    reversal(2:12) --width 64 --layers 2  --until 0.4  (260)    18 s   0.44
    sums(2:3) --rows 128                          --steps 450   52 s   0.64
    sums(2:3) --rows 128                          --steps 800   87 s   0.82
    sums(2:3) --rows 128                          --steps 1500  169 s  0.92
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stillhouse.loops.greedy_evaluation import evaluate_tasks
from stillhouse.rollout import Completion, GenerationRequest
from stillhouse.tasks import Problem, TaskSpec, problem

CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyz :()[]{}"
PAD, END = "<pad>", "</s>"
WARMUP_STEPS = 50
ANSWER_TOKENS = 32


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character of the tasks."""
    vocabulary = {token: index for index, token in enumerate([PAD, END, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)


def new_model(tokenizer: PreTrainedTokenizerFast, width: int, layers: int, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def batch_of(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, S], padded on the right, and labels [B, S]: -100 at prompts and padding."""
    prompts = tokenizer([task_problem.prompt for task_problem in problems])["input_ids"]
    answers = tokenizer([task_problem.answer + END for task_problem in problems])["input_ids"]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids_BS = torch.full((len(problems), width), tokenizer.pad_token_id)
    labels_BS = torch.full_like(ids_BS, -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids_BS[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels_BS[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids_BS, labels_BS


class Greedy:
    """Generates the top tokens with transformers' own `generate`, one batch of equal prompts at a time."""

    def __init__(self, model: Qwen3ForCausalLM, max_new_tokens: int):
        self.model, self.max_new_tokens = model, max_new_tokens

    @torch.no_grad()
    def __call__(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        completions: dict[int, Completion] = {}
        for length in sorted({len(request.prompt_ids) for request in requests}):
            of_length = [at for at, request in enumerate(requests) if len(request.prompt_ids) == length]
            ids_BS = torch.tensor(np.stack([requests[at].prompt_ids for at in of_length])).long()
            generated_BN = self.model.generate(
                ids_BS,
                attention_mask=torch.ones_like(ids_BS),
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
            )[:, length:].numpy()
            for at, generated_N in zip(of_length, generated_BN, strict=True):
                ends = np.flatnonzero(generated_N == self.model.config.eos_token_id)
                ids_N = generated_N[: ends[0] + 1 if len(ends) else None].astype(np.int32)
                zeros_N = np.zeros(len(ids_N), dtype=np.float32)
                completions[at] = Completion(
                    ids_N, zeros_N, zeros_N.astype(np.int32), "stop" if len(ends) else "length"
                )
        return [completions[at] for at in range(len(requests))]


def exact_matches(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: str, count: int
) -> dict[str, float]:
    model.eval()
    matches = evaluate_tasks(Greedy(model, ANSWER_TOKENS), tokenizer, [task], count, seed=0)
    model.train()
    return matches


def _with_error(problem: Problem, draw: np.random.Generator) -> Problem:
    """The problem with a wrong answer: without its first character, or with its last one twice."""
    answer = problem.answer
    return replace(problem, answer=answer[1:] if draw.random() < 0.5 else answer + answer[-1])


def train(
    task: str, out: Path, *, steps: int, rows: int, width: int, layers: int, rate: float, every: int, until: float,
    distinct: int, seed: int, right: float = 1.0,
) -> float:  # fmt: skip
    """Train, write model and tokenizer as a Hugging Face folder, and return the exact match that it has reached.

    right: the share of right answers in the training data.
    """
    spec, tokenizer = TaskSpec.parse(task), character_tokenizer()
    model = new_model(tokenizer, width, layers, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.1)
    print(
        f"{task}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, {rows} problems per step"
    )
    key, matched, started, measuring = f"eval/exact_match/{spec.name}", 0.0, time.process_time(), 0.0
    for step in range(steps):
        left = (steps - step) / (0.3 * steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARMUP_STEPS, left)
        numbers = range(step * rows, (step + 1) * rows)
        problems = [problem(spec, seed, number % distinct, held_out=False) for number in numbers]
        draw = np.random.default_rng([seed, step])
        problems = [problem if draw.random() < right else _with_error(problem, draw) for problem in problems]
        ids_BS, labels_BS = batch_of(tokenizer, problems)
        logits = model(input_ids=ids_BS[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), labels_BS[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0 or step + 1 == steps:
            before = time.process_time()
            matches = exact_matches(model, tokenizer, task, 200)
            measuring += time.process_time() - before
            matched, seconds = matches[key], time.process_time() - started - measuring
            lengths = " ".join(
                f"{name.rpartition('_')[2]}:{value:.2f}" for name, value in matches.items() if "length" in name
            )
            print(
                f"step {step + 1}  {seconds:.0f} s  loss {loss.item():.3f}  exact {matched:.3f}  by length {lengths}",
                flush=True,
            )
            if matched >= until:
                break
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return matched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="sums(2:3)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=64, help="problems of one step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--until", type=float, default=2.0, help="stop at this exact match on held-out problems")
    parser.add_argument("--distinct", type=int, default=10**9, help="number of different training problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--right", type=float, default=1.0, help="share of right answers in the training data")
    torch.set_num_threads(1)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
