"""GRPO on a task whose answers can be checked: additions in text, "17+5=" → "22".

    python examples/grpo.py

First a small policy is trained on calculations of which one third are right. Then it samples several answers to each
problem, and a reward of 1 for each right answer trains it further. The objective is only an output processor; its
context has the advantages and old log-probabilities of the sampled tokens (see `learn`). The model is a Hugging Face
model, and its own `generate` samples the answers.

All prompts have the same length, and answers are padded after their end. So no attention mask is needed: a token does
not see the tokens after it, and padding has no label.

B rows of S tokens, V vocabulary; P problems, G answers to each.
"""

import argparse
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from stillhouse import Decoder, PolicyTargets, Targets, cross_entropy, policy_gradient, selected_log_probs

PAD, END = "<pad>", "<end>"
PROMPT, ANSWER = 5, 4  # tokens: those of "17+5=", and of three digits and the end at most
PER_TOKEN = ("clipped", "reference_kl", "entropy")  # metrics to print

Problem = tuple[int, int]


@dataclass(frozen=True)
class Answers:
    """Sampled answers, their log-probabilities under the policy that sampled them, and their rewards."""

    ids_BS: Tensor
    labels_BS: Tensor
    log_probs_BS: Tensor
    rewards_B: Tensor


@dataclass(frozen=True)
class Result:
    rewards: list[float]  # mean reward of each step
    before: float  # share of held-out problems that greedy decoding solves, before the first step
    after: float  # the same after the last step
    difference: float  # see `largest_difference`


def main(arguments: Sequence[str] | None = None) -> Result:
    options = parse(arguments)
    chance = random.Random(options.seed)
    torch.manual_seed(options.seed)
    problems = [(a, b) for a in range(100) for b in range(10)]
    chance.shuffle(problems)
    held_out, problems = problems[:200], problems[200:]
    tokenizer = make_tokenizer()
    policy = make_policy(tokenizer)
    imitate(policy, tokenizer, problems, chance, options.imitate)
    before = solved(policy, tokenizer, held_out)
    print(f"after imitation: {before:.0%} of held-out problems solved")

    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.learning_rate, weight_decay=0.0)
    rewards = []
    for step in range(1, options.steps + 1):
        answers = sample(policy, tokenizer, chance.sample(problems, options.problems), options.group)
        metrics = learn(policy, reference, optimizer, answers, options)
        rewards.append(answers.rewards_B.mean().item())
        if step % 10 == 0:
            means = {key: metrics[key] / metrics["tokens"] for key in PER_TOKEN if key in metrics}
            per_token = ", ".join(f"{key} {mean:.3f}" for key, mean in means.items())
            print(f"step {step}: reward {sum(rewards[-10:]) / 10:.3f}; per token {per_token}")

    after = solved(policy, tokenizer, held_out)
    difference = largest_difference(policy, sample(policy, tokenizer, held_out, group=1))
    print(f"after {options.steps} steps: {after:.0%} of held-out problems solved")
    print(f"log-probabilities of the processor and of logits differ by at most {difference:.1e}")
    return Result(rewards, before, after, difference)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="GRPO on additions", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=100)
    add("--seed", type=int, default=0)
    add("--problems", type=int, default=32, help="per step")
    add("--group", type=int, default=8, help="answers to each problem")
    add("--updates", type=int, default=2, help="updates of the policy per step")
    add("--learning-rate", type=float, default=3e-4)
    add("--kl-scale", type=float, default=0.01, help="weight of the KL penalty against the policy at the start")
    add("--entropy-bonus", type=float, default=0.001)
    add("--imitate", type=int, default=200, help="supervised steps at the start")
    return parser.parse_args(arguments)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    backend = Tokenizer(models.WordLevel({token: id for id, token in enumerate([PAD, END, *"0123456789+="])}))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END)


def make_policy(tokenizer: PreTrainedTokenizerFast) -> Decoder:
    """Return a model of 330,000 parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=PROMPT + ANSWER,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Decoder(AutoModelForCausalLM.from_config(config, trust_remote_code=False))


def imitate(
    policy: Decoder, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], chance: random.Random, steps: int
) -> None:
    """Train with cross-entropy on answers of which one third are right; the others are too large by 1 or 2."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for _ in range(steps):
        texts = [
            ask(problem) + answer(problem, wrong_by=chance.randrange(3))
            for problem in chance.choices(problems, k=128)
        ]
        ids_BS = tokenizer(texts, padding=True, return_tensors="pt").input_ids
        labels_BS = labels_of(ids_BS, tokenizer)
        processor = cross_entropy(normalizer=(labels_BS >= 0).sum())
        policy(ids_BS, processor=processor, context=Targets(labels_BS)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sample(
    policy: Decoder, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], group: int, *, greedy: bool = False
) -> Answers:
    """Return `group` answers to each problem, in the order of the problems."""
    problems = [problem for problem in problems for _ in range(group)]
    prompts = tokenizer([ask(problem) for problem in problems], return_tensors="pt")
    # the policy gradient needs log-probabilities of exactly the distribution that is sampled from
    options = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    ids_BS = policy.pretrained.generate(
        prompts.input_ids, attention_mask=prompts.attention_mask, max_new_tokens=ANSWER, **options
    )
    labels_BS = labels_of(ids_BS, tokenizer)
    right = [
        text.startswith(ask(problem) + answer(problem))
        for text, problem in zip(tokenizer.batch_decode(ids_BS), problems, strict=True)
    ]
    return Answers(ids_BS, labels_BS, log_probs(policy, ids_BS, labels_BS), torch.tensor(right).float())


def learn(
    policy: Decoder,
    reference: Decoder,
    optimizer: torch.optim.Optimizer,
    answers: Answers,
    options: argparse.Namespace,
) -> dict[str, Tensor]:
    """Run several clipped updates on the same answers. Return the last update's metrics: sums over tokens."""
    labels_BS = answers.labels_BS
    context = PolicyTargets(
        labels_BS,
        advantages_T=advantages(answers.rewards_B, options.group)[:, None].expand_as(labels_BS),
        old_log_probs_T=answers.log_probs_BS,
        reference_log_probs_T=log_probs(reference, answers.ids_BS, labels_BS),
    )
    processor = policy_gradient(
        kl_scale=options.kl_scale, entropy_bonus=options.entropy_bonus, normalizer=(labels_BS >= 0).sum()
    )
    for _ in range(options.updates):
        output = policy(answers.ids_BS, processor=processor, context=context)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return output.metrics


def advantages(rewards_B: Tensor, group: int) -> Tensor:
    """Return advantages [B] relative to the answers to the same problem; 0 where all or none of them are right."""
    rewards_PG = rewards_B.view(-1, group)
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return (centred_PG / (rewards_PG.std(1, correction=0, keepdim=True) + 1e-4)).flatten()


@torch.no_grad()
def log_probs(model: Decoder, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
    return model(ids_BS, processor=selected_log_probs(), context=Targets(labels_BS)).log_probs_BS


@torch.no_grad()
def largest_difference(policy: Decoder, answers: Answers) -> float:
    """Compare the processor's log-probabilities with those computed from the model's logits."""
    logits_BSV, labels_BS = policy.pretrained(answers.ids_BS).logits, answers.labels_BS
    expected_BS = logits_BSV.log_softmax(-1).gather(-1, labels_BS.clamp_min(0)[..., None])[..., 0]
    return (answers.log_probs_BS - expected_BS)[labels_BS >= 0].abs().max().item()


def labels_of(ids_BS: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return [B, S]: the next token of each token; −1 where the next token is in the prompt or after the end."""
    labels_BS = F.pad(ids_BS[:, 1:], (0, 1), value=-1)
    labels_BS[:, : PROMPT - 1] = -1
    return labels_BS.masked_fill((ids_BS == tokenizer.eos_token_id).cumsum(1) > 0, -1)


def solved(policy: Decoder, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> float:
    return sample(policy, tokenizer, problems, group=1, greedy=True).rewards_B.mean().item()


def ask(problem: Problem) -> str:
    return f"{problem[0]:02}+{problem[1]}="


def answer(problem: Problem, wrong_by: int = 0) -> str:
    return f"{sum(problem) + wrong_by}{END}"


if __name__ == "__main__":
    main()
