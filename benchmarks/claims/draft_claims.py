"""The claim on draft heads: which objective has more drafts accepted in speculative decoding."""

import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from benchmarks.claims.claim import Claim, Difference, Figures
from benchmarks.claims.seed_runs import SeedRuns
from benchmarks.training_runs import metrics, run_config, student_settings
from examples.mtp import acceptance
from stillhouse.run.run import distill
from stillhouse.tools.demo.corpus import collect_split, write_jsonl
from stillhouse.tools.demo.student import TEACHER, token_stream

STEPS, STEP_TOKENS, DOCUMENT_TOKENS = 300, 256, 128
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 48, 32, 64
#: held-out documents of the corpus: the prompts, and the text of the run's own evaluation
HELD_OUT = 2
KL, ACCEPTANCE = "forward_kl", "acceptance"


def draft_acceptance(runs: SeedRuns) -> Figures:
    """A new draft head of the demo's frozen teacher, with the same first weights and batches for both objectives."""
    runs.folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(collect_split("student"), runs.folder / "train.jsonl")
    write_jsonl(collect_split("held_out")[:HELD_OUT], runs.folder / "held_out.jsonl")
    steps, figures = runs.part(STEPS), {}
    sizes = {"max_tokens": DOCUMENT_TOKENS, "tokens_per_step": STEP_TOKENS}
    settings = student_settings(runs.folder, runs.seed, steps, **sizes) | {
        "student.model": str(TEACHER),
        "objective.loss": "cross_entropy",  # of the frozen model, which is not trained
        "train.learning_rate": 4e-3,
        "eval.every": steps,
    }
    for objective in (KL, ACCEPTANCE):
        heads = {"depths": 1, "train": "heads", "signal": "student", "objective": objective}
        out = runs.folder / objective
        distill(run_config(settings | {"student.mtp": heads, "out": str(out)}))
        expected = [line["eval/mtp_1/sampled_acceptance"] for line in metrics(out) if "eval/cross_entropy" in line]
        figures[objective] = {
            "sampled": _accepted_share(runs, out / "model", is_sampled=True),
            "greedy": _accepted_share(runs, out / "model", is_sampled=False),
            "expected": expected[-1],
        }
    return figures


def _accepted_share(runs: SeedRuns, folder: Path, *, is_sampled: bool) -> float:
    """The accepted share of the tokens that transformers drafts, one at a time, with the head of a folder."""
    logging.set_verbosity_error()  # transformers warns about the head at each load
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens_T = token_stream(tokenizer, collect_split("held_out")[:HELD_OUT])
    prompts_PS = tokens_T[: len(tokens_T) // PROMPT_TOKENS * PROMPT_TOKENS].view(-1, PROMPT_TOKENS)
    prompts_PS = prompts_PS[torch.linspace(0, len(prompts_PS) - 1, runs.part(PROMPTS)).long()]
    return statistics.fmean(acceptance(folder, prompts_PS, NEW_TOKENS, is_sampled, runs.seed))


def _gain(metric: str) -> Any:
    return lambda figures: figures[ACCEPTANCE][metric] - figures[KL][metric]


DRAFT_HEADS = Claim(
    name="acceptance",
    metrics={
        "sampled": "accepted share, sampled",
        "greedy": "accepted share, greedy",
        "expected": "held-out Σ min(p, q)",
    },
    differences=(
        Difference("accepted share, sampled: acceptance − forward KL", _gain("sampled"), 0.01),
        Difference("accepted share, greedy: acceptance − forward KL", _gain("greedy"), 0.01),
    ),
    measure=draft_acceptance,
)
