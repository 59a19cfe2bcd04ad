"""A teacher with another tokenizer: what share of the gain from a teacher with the student's tokenizer is recovered?

The demo's students learn from the demo's text alone, from the shipped teacher, which has their tokenizer, and from a
teacher with another tokenizer, through `teacher.cross_tokenizer: gold` (`uld`, in 68748665, was removed since). Both
teachers are the same network: the second one begins with the weights of the first, where a new token's embedding is
the mean of those of its old tokens, and is then trained on the teacher's text. Its tokenizer cuts texts by another
pattern and has more tokens.
The cross-entropy per byte of held-out text says how good each teacher is. Every student has the same initial weights,
data and order for a seed. The gain is the difference of held-out cross-entropy from the student that learned alone.
Writes benchmarks/results/cross_tokenizer-<date>.json.

    python -m benchmarks.cross_tokenizer --seeds 0 1 2
"""

import argparse
import copy
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.demo_teacher import END
from benchmarks.record import result_file, write_result
from benchmarks.training_runs import CROSS_ENTROPY, run_config, student_settings, values_of
from stillhouse.config import RunConfig
from stillhouse.data.render.alignment import Aligner
from stillhouse.run.run import distill
from stillhouse.tools.demo.corpus import NamedText, collect_split, write_jsonl
from stillhouse.tools.demo.student import TEACHER, save_new_student, token_stream

MAX_TOKENS, TOP_K = 256, 256
#: of the other tokenizer: its number of tokens, and Llama 3's pattern of words
VOCABULARY = 4096
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
#: of the other teacher's training
ROW, ROWS, LEARNING_RATE = 256, 8, 1e-3

WAYS: dict[str, dict[str, Any]] = {
    "alone": {"objective.loss": "cross_entropy"},
    "same tokenizer": {"teacher.model": str(TEACHER), "objective.loss": "0.5*cross_entropy + 0.5*forward_kl"},
    "gold": {"teacher.cross_tokenizer": "gold", "objective.loss": "0.5*cross_entropy + 0.5*forward_kl"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300, help="steps of each student")
    parser.add_argument("--teacher-steps", type=int, default=120, help="steps of the other teacher")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_jsonl(collect_split("student"), folder / "train.jsonl")
        write_jsonl(held_out(), folder / "held_out.jsonl")
        teachers = {"same tokenizer": bytes_entropy(TEACHER)}
        teachers |= make_other_teacher(folder / "other", arguments.teacher_steps)
        shared = shared_tokens(folder / "other")
        runs = {seed: figures_of(folder, seed, arguments.steps) for seed in arguments.seeds}
    means = {way: statistics.mean(run[way] for run in runs.values()) for way in WAYS}
    gains = {way: [run["alone"] - run[way] for run in runs.values()] for way in WAYS if way != "alone"}
    recovered = {
        way: [round(gain / same, 3) for gain, same in zip(values, gains["same tokenizer"], strict=True)]
        for way, values in gains.items()
    }
    result = {
        "teachers_nats_per_byte_of_held_out_text": teachers,
        "tokens": shared,
        "held_out_cross_entropy": {way: round(mean, 4) for way, mean in means.items()},
        "gain_in_nats_per_token": {way: round(statistics.mean(gain), 4) for way, gain in gains.items()},
        "share_of_the_gain": {way: round(statistics.mean(shares), 3) for way, shares in recovered.items()},
        "share_of_the_gain_by_seed": recovered,
        "runs": runs,
        "steps": arguments.steps,
        "teacher_steps": arguments.teacher_steps,
        "top_k": TOP_K,
    }
    print(json.dumps(result, indent=1))
    write_result(result_file("cross_tokenizer"), {"theme": "cross tokenizer", **result}, "cpu")


def figures_of(folder: Path, seed: int, steps: int) -> dict[str, float]:
    """The held-out cross-entropy of the student that learned in each way, in nats per token."""
    save_new_student(folder / "student", seed)
    losses = {}
    for way, settings in WAYS.items():
        teacher = {"teacher.model": str(folder / "other"), "teacher.top_k": TOP_K} if way == "gold" else {}
        out = distill(configuration(folder, seed, steps, teacher | settings | {"out": str(folder / f"{seed} {way}")}))
        losses[way] = values_of(out, CROSS_ENTROPY)[-1]
    return losses


def configuration(folder: Path, seed: int, steps: int, settings: dict[str, Any]) -> RunConfig:
    student = student_settings(folder, seed, steps, max_tokens=MAX_TOKENS, tokens_per_step=512)
    student |= {"eval.every": steps, "checkpoint.best": None}
    return run_config(student | ({"teacher.dtype": "float32"} if "teacher.model" in settings else {}) | settings)


def held_out() -> list[NamedText]:
    """Every second document of the demo's held-out split: enough, and half of the time."""
    return collect_split("held_out")[::2]


def other_tokenizer(documents: Sequence[NamedText]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    by_words = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_words, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end_of_text|>")


def make_other_teacher(folder: Path, steps: int) -> dict[str, float]:
    """Write the teacher with the other tokenizer; returns its held-out cross-entropy before and after training."""
    documents = collect_split("teacher")
    tokenizer = other_tokenizer(documents)
    shipped = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    config = copy.deepcopy(shipped.config)
    config.vocab_size = len(tokenizer)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = shipped.state_dict()
    for name, tensor in state.items():
        if tensor.shape[0] == shipped.config.vocab_size:
            state[name] = transplanted(tensor, tokenizer)
    model.load_state_dict(state)
    save(model, tokenizer, folder)
    entropies = {"other tokenizer, untrained": bytes_entropy(folder)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step, batch_BS in enumerate(batches(token_stream(tokenizer, documents), steps)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        logits_BSV = model(input_ids=batch_BS[:, :-1]).logits
        cross_entropy(logits_BSV.flatten(0, 1), batch_BS[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    save(model, tokenizer, folder)
    return entropies | {"other tokenizer": bytes_entropy(folder)}


def transplanted(rows_VE: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """For each token of the other tokenizer, the mean of the rows of the shipped tokens of its bytes."""
    shipped = AutoTokenizer.from_pretrained(TEACHER)
    known = shipped.get_vocab()
    made_VE = rows_VE.new_empty(len(tokenizer), rows_VE.shape[1])
    for token, index in tokenizer.get_vocab().items():
        text = tokenizer.decode([index])
        if index == tokenizer.eos_token_id:
            old = [known[END]]
        elif token in known:
            old = [known[token]]
        elif "\N{REPLACEMENT CHARACTER}" in text:
            old = [known[character] for character in token]  # both are byte-level, so every byte is a token
        else:
            old = shipped(text, add_special_tokens=False)["input_ids"]
        made_VE[index] = rows_VE[old].mean(0)
    return made_VE


def batches(tokens_T: Tensor, steps: int) -> Iterator[Tensor]:
    rows_NS = tokens_T.unfold(0, ROW + 1, ROW)
    order_N = torch.randperm(len(rows_NS), generator=torch.Generator().manual_seed(0))
    yield from rows_NS[order_N].split(ROWS)[:steps]


def save(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def bytes_entropy(folder: Path) -> float:
    """The cross-entropy of held-out text in nats per byte, which can be compared between tokenizers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = held_out()
    tokens_T = token_stream(tokenizer, documents)
    rows_NS = tokens_T.unfold(0, ROW + 1, ROW)
    per_token = sum(
        float(cross_entropy(model(input_ids=batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())) * len(batch)
        for batch in rows_NS.split(ROWS)
    ) / len(rows_NS)
    return round(per_token * len(tokens_T) / sum(len(document.text.encode()) for document in documents), 4)


def shared_tokens(folder: Path) -> dict[str, int]:
    """How many tokens student and other teacher have, how many are the same, and their spans of held-out text."""
    student, teacher = (AutoTokenizer.from_pretrained(path) for path in (TEACHER, folder))
    aligner = Aligner(student, teacher)
    ids = [token_stream(student, [document]).numpy() for document in held_out()]
    aligned = aligner.align(ids)
    return {
        "student": len(student),
        "teacher": len(teacher),
        "same bytes": int((aligner.teacher_of >= 0).sum()),
        "student tokens of held-out text": sum(map(len, ids)),
        "teacher tokens of held-out text": sum(len(document.teacher_tokens) for document in aligned),
        "spans of held-out text": sum(len(document.spans) for document in aligned),
    }


if __name__ == "__main__":
    main()
