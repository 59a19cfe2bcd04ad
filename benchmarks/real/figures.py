"""The figures of a language model, with plain transformers and torch. V vocabulary, T tokens."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.real.material import BEGINNING, held_out_pieces
from benchmarks.real.tasks import LEARNED, exact, held_out_problems

PROMPTS = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8").splitlines()
MAX_TOKENS = 512


def loaded(folder: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder), model


@torch.no_grad()
def text_figures(teacher: Path, student: Path) -> dict[str, float]:
    """Held-out perplexity, both KL divergences in nats per token, and the share of equal greedy tokens."""
    tokenizer, model = loaded(student)
    expected = loaded(teacher)[1]
    entropy = forward_kl = reverse_kl = equal = count = 0.0
    for piece in held_out_pieces():
        ids = torch.tensor([tokenizer(piece)["input_ids"][:MAX_TOKENS]])
        log_q_TV, log_p_TV = (of(ids).logits[0, :-1].log_softmax(-1) for of in (model, expected))
        entropy -= log_q_TV.gather(1, ids[0, 1:, None]).sum().item()
        forward_kl += _kl(log_p_TV, log_q_TV)
        reverse_kl += _kl(log_q_TV, log_p_TV)
        equal += (log_q_TV.argmax(-1) == log_p_TV.argmax(-1)).sum().item()
        count += len(log_q_TV)
    sums = {"cross_entropy": entropy, "forward_kl": forward_kl, "reverse_kl": reverse_kl, "agreement": equal}
    means = {name: value / count for name, value in sums.items()}
    return {"perplexity": math.exp(entropy / count), **means, "tokens": count}


@torch.no_grad()
def own_figures(teacher: Path, student: Path, tokens: int = 64) -> dict[str, float]:
    """The reverse KL and the student's entropy, in nats per token, on its samples after held-out beginnings."""
    tokenizer, model = loaded(student)
    expected = loaded(teacher)[1]
    ids_NT = torch.tensor([tokenizer(piece)["input_ids"][:BEGINNING] for piece in held_out_pieces()])
    with _seeded():
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": 2}
        # no end before the last token, so that all continuations are of one length
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        samples = model.generate(ids_NT, attention_mask=torch.ones_like(ids_NT), **lengths, **settings)
    log_q, log_p = (of(samples).logits[:, BEGINNING - 1 : -1].log_softmax(-1) for of in (model, expected))
    count = len(samples) * tokens
    return {"own_reverse_kl": _kl(log_q, log_p) / count, "own_entropy": -(log_q.exp() * log_q).sum().item() / count}


def task_figures(student: Path) -> dict[str, float]:
    """The share of right greedy answers to the held-out problems of each task."""
    tokenizer, model = loaded(student)
    means = {}
    for task in LEARNED:
        records = held_out_problems(task)
        scores = [exact("", _answer(tokenizer, model, record["prompt"], 16), record) for record in records]
        means[task] = sum(scores) / len(scores)
    return means


def answers(folder: Path, tokens: int = 40) -> dict[str, str]:
    """Greedy answers to the fixed questions, in the model's chat format."""
    tokenizer, model = loaded(folder)
    chats = {prompt: [{"role": "user", "content": prompt}] for prompt in PROMPTS}
    return {prompt: _answer(tokenizer, model, chat, tokens) for prompt, chat in chats.items()}


@torch.no_grad()
def _answer(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, chat: list[dict[str, str]], tokens: int
) -> str:
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True).strip()


def _kl(log_p: Tensor, log_q: Tensor) -> float:
    return (log_p.exp() * (log_p - log_q)).sum().item()


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
