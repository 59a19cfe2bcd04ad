"""Gold for a student that writes spaces as ▁: a run's loss and gradients against float64 over whole logits.

Nothing of the code under test is used: texts are cut by the tokenizers themselves, their common borders are searched
for, and each of the teacher's ids is spelled out and cut anew.

N rows, V vocabulary.
"""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.runs import forward_backward, session_of, write_records
from kit.teacher_gradients import named_gradients
from kit.two_tokenizers import (
    GOLD,
    K,
    are_characters,
    bytes_of,
    cut_within_a_text,
    demo_text,
    tokenizer,
    vocabulary_bytes,
    write_model,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

#: the student's tokenizer and the teacher's
PAIRS = [("mistral", "deepseek"), ("pieces", "deepseek"), ("mistral", "large"), ("small", "mistral")]
TEXTS = [*(text[:60] for text in demo_text()[:7]), "  two spaces", "Hallå 😀  x1024\n\n中"]


class Side:
    """A tokenizer and its ids of a text with its end, and where each token ends in the text's bytes."""

    def __init__(self, made: PreTrainedTokenizerBase, text: str):
        self.ids = [*made(text)["input_ids"], made.eos_token_id]
        self.first = self.ids[0] == made.bos_token_id  # the rows before the text
        pieces = bytes_of(made, self.ids[self.first : -1])
        if b"".join(pieces) == b" " + text.encode():
            pieces[0] = pieces[0][1:]
        assert b"".join(pieces) == text.encode()
        self.ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
        self.starts = [0, *self.ends[:-1]]

    def between(self, begin: int, end: int) -> list[int]:
        """The places in `ids` of the tokens of these bytes. A token without bytes is at the beginning alone."""
        return [
            at + self.first
            for at, (start, stop) in enumerate(zip(self.starts, self.ends, strict=True))
            if begin <= start and stop <= end and (stop > begin or begin == 0)
        ]


def spans(one: Side, other: Side) -> list[tuple[list[int], list[int]]]:
    """The places of the tokens between two common borders, and the ends."""
    borders = sorted({0, *one.ends} & {0, *other.ends})
    inner = [(one.between(*cut), other.between(*cut)) for cut in pairwise(borders)]
    return [*inner, ([len(one.ids) - 1], [len(other.ids) - 1])]


class Students:
    """The student's token for each id of the teacher, within a text and where a space is put before it."""

    def __init__(self, one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase):
        self.one, self.pieces = one, vocabulary_bytes(other)
        self.by_bytes: dict[bytes, int] = {}
        for index, piece in sorted(
            vocabulary_bytes(one).items(), key=lambda pair: (is_number(one, pair[0]), pair[0])
        ):
            self.by_bytes.setdefault(piece, index)
        names = {name: one.convert_tokens_to_ids(name) for name in one.all_special_tokens}
        self.special = {other.convert_tokens_to_ids(name): names.get(name, -1) for name in other.all_special_tokens}
        self.special |= {other.bos_token_id: names.get(one.bos_token, -1), other.eos_token_id: names[one.eos_token]}
        self.adds_space = one("a", add_special_tokens=False)["input_ids"] != one.convert_tokens_to_ids(["a"])

    def token(self, index: int, *, begins: bool) -> int:
        """-1: it counts for the tail."""
        if index in self.special:
            return self.special[index]
        piece = self.pieces.get(index)
        if piece is None:
            return -1
        if begins and self.adds_space and are_characters(piece):
            return self.one(piece.decode(), add_special_tokens=False)["input_ids"][0]
        if piece in self.by_bytes:
            return self.by_bytes[piece]
        if not are_characters(piece):
            return -1
        if not self.adds_space:
            return self.one(piece.decode(), add_special_tokens=False)["input_ids"][0]
        return cut_within_a_text(self.one, piece.decode())[0]


def is_number(made: PreTrainedTokenizerBase, index: int) -> bool:
    return made.convert_ids_to_tokens(index).startswith("<0x")


def expected(folder: Path, one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    student = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float64)
    students, total, tokens = Students(one, other), torch.zeros((), dtype=torch.float64), 0
    for text in TEXTS:
        here, there = Side(one, text), Side(other, text)
        log_q_NV = student(torch.tensor(here.ids)[None]).logits[0].log_softmax(1)
        with torch.no_grad():
            log_p_NV = teacher(torch.tensor(there.ids)[None]).logits[0].log_softmax(1)
        tokens += len(here.ids) - 1
        for ours, others in spans(here, there):
            if ours[0] == 0 or others[0] == 0:
                continue
            log_p = sum(float(log_p_NV[at - 1, there.ids[at]]) for at in others)
            begins = ours[0] == here.first
            p = outcomes(students, log_p_NV[others[0] - 1], there.ids[others[0]], log_p, here.ids[ours[0]], begins)
            total = total + divergence(p, log_q_NV[ours[0] - 1])
            for at in ours[1:]:
                total = total - math.exp(log_p) * log_q_NV[at - 1, here.ids[at]]
    (total / tokens).backward()
    return {"loss": (total / tokens).detach()} | named_gradients(student)


def outcomes(students: Students, log_p_V: Tensor, x_0: int, log_p: float, y_0: int, begins: bool) -> dict[int, float]:
    """The probability of each of the student's tokens; the others are the tail."""
    top_k = set(log_p_V.topk(K).indices.tolist())
    p = {y_0: math.exp(log_p)}
    for index in top_k | {x_0}:
        probability = float(log_p_V[index].exp()) - (math.exp(log_p) if index == x_0 else 0.0)
        token = students.token(index, begins=begins)
        if token >= 0:
            p[token] = p.get(token, 0.0) + probability
    return p


def divergence(p: dict[int, float], log_q_V: Tensor) -> Tensor:
    """Forward KL over these outcomes and one more for all others."""
    ids = torch.tensor(list(p))
    p_N = torch.tensor([p[token] for token in ids.tolist()], dtype=torch.float64)
    rest = (1 - p_N.sum()).clamp(min=0)
    is_other_V = torch.ones_like(log_q_V, dtype=torch.bool).index_fill(0, ids, False)
    inside = torch.special.xlogy(p_N, p_N).sum() - (p_N * log_q_V[ids]).sum()
    return inside + torch.special.xlogy(rest, rest) - rest * log_q_V[is_other_V].logsumexp(0)


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_loss_and_gradients_are_what_the_docs_say(tmp_path: Path, student: str, teacher: str) -> None:
    write_model(tmp_path / "student", student, family="llama", seed=1)
    write_model(tmp_path / "teacher", teacher, family="qwen3", seed=2)
    for name in ("train.jsonl", "eval.jsonl"):
        write_records(tmp_path / name, [{"text": text} for text in TEXTS])
    session = session_of(
        tmp_path, **GOLD, **{"data.max_tokens": 96, "train.micro_batch_tokens": 96, "objective.loss": "forward_kl"}
    )
    every = session.data.train.micro_batches([np.arange(len(session.data.train))])
    loss = forward_backward(session, every).sums["loss"]
    actual = named_gradients(session.models.student.pretrained)
    session.close()
    reference = expected(tmp_path, tokenizer(student), tokenizer(teacher))
    assert loss == pytest.approx(float(reference.pop("loss")), rel=1e-4)
    assert actual.keys() == reference.keys()
    for name, gradient in reference.items():
        error = float((actual[name].double() - gradient).norm() / gradient.norm())
        assert error < 1e-4, name
