"""The gradients of a run's first step, from a teacher in the job, in a cache or on a server, and what they are; and a
run with two teachers of different widths, and texts of which each is the subject of one of them.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.runs import forward_backward, save_model, session_of, write_records, write_run
from torch import Tensor, nn

from stillhouse.data import MicroBatch
from stillhouse.loops.session import Session
from stillhouse.objective import TEACHER, Chosen, Signal, TopK

LOSS = {"objective.loss": "0.3*cross_entropy + 0.7*jsd(0.5)", "data.eval": 0.0}
SUBJECTS = ("math", "code")
PREFIXES = {"math": "You know the answer: {answer}. ", "code": "{answer}! "}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def write_subject_teachers(folder: Path, *, tied: bool | None = None) -> Path:
    """Write a run whose column `subject` names the teacher of a text; `answer` is for a prefix. tied: the student."""
    records = [
        {
            "text": f"{number} " + " ".join(WORDS[number % 7 : number % 7 + 1 + number % 5]),
            "subject": SUBJECTS[number % 3 == 0],
            "answer": WORDS[number % 11],
        }
        for number in range(40)
    ]
    write_records(folder / "train.jsonl", records)
    write_run(folder, tied=tied)
    save_model(folder / "math", "qwen3", seed=5)
    save_model(folder / "code", "llama", seed=6, tied=False)
    return folder


def named(folder: Path, math: dict[str, Any] | None = None, code: dict[str, Any] | None = None) -> dict[str, Any]:
    """The settings of both teachers; None leaves one out."""
    by_teacher = {"math": math, "code": code}
    return {
        f"teachers.{name}": {"model": str(folder / name), **keys} if not {"url", "student"} & keys.keys() else keys
        for name, keys in by_teacher.items()
        if keys is not None
    }


def answer_of(source: str, folder: Path) -> str:
    """The column `answer` of the record at `file:line`."""
    line = int(source.rpartition(":")[2].partition(" ")[0])
    return json.loads((folder / "train.jsonl").read_text().splitlines()[line - 1])["answer"]


def session_with(folder: Path, **settings: Any) -> Session:
    return session_of(folder, cached=True, **LOSS, **settings)


#: a loss, and the gradient of each parameter
Gradients = tuple[float, dict[str, Tensor]]


def gradients(folder: Path, **settings: Any) -> Gradients:
    """Of a run with these settings (see `write_run`), which may name another teacher than the one in the job."""
    is_other = any(key.startswith(("teacher.url", "teacher.cache", "teachers.")) for key in settings)
    session = session_of(folder, cached=is_other, **settings)
    loss = forward_backward(session).sums["loss"]
    named = named_gradients(session.models.student)
    session.close()
    return loss, named


def first_step(session: Session) -> dict[str, Tensor]:
    """The loss and the gradients of a session's first step, by their names."""
    loss = forward_backward(session).sums["loss"]
    return {"loss": torch.tensor(loss)} | named_gradients(session.models.student.pretrained)


def gradients_of_signals(folder: Path, signal: Callable[[Session, MicroBatch], Signal], **settings: Any) -> Gradients:
    """Of the same run with the teacher in the job, whose signals `signal` makes."""
    live = session_of(folder, **settings)
    micro_batches = live.models.shard(live.schedule.step_schedule.micro_batches(live.data.train, 0))
    signals = [{TEACHER: signal(live, micro_batch)} for micro_batch in micro_batches]
    output = live.models.engine.forward_backward(micro_batches, signals, micro_batches.all_ranks.normalizer)
    return output.sums["loss"], named_gradients(live.models.student)


def first_signals(session: Session) -> list[dict[str, Signal]]:
    """The signals of the first step's micro-batches."""
    micro_batches = session.models.shard(session.schedule.step_schedule.micro_batches(session.data.train, 0))
    return list(session.models.source.request(micro_batches).result())


def ids_signal(kind: str, temperature: float) -> Callable[[Session, MicroBatch], Signal]:
    """For `gradients_of_signals`: the log-probabilities of seven ids per token, from the teacher's logits.

    kind: "top_k" or "chosen", as in the configuration
    """

    def signal(session: Session, micro_batch: MicroBatch) -> Signal:
        log_p_TV = log_probs_TV(session, micro_batch, temperature)
        with torch.no_grad():
            chooser_TV = log_p_TV if kind == "top_k" else session.models.student(**micro_batch.inputs).flatten(0, 1)
        ids_TK = chooser_TV.topk(7).indices
        outside_T = log_p_TV.scatter(1, ids_TK, -torch.inf).logsumexp(1).float()
        make = TopK if kind == "top_k" else Chosen
        return make(ids_TK, log_p_TV.gather(1, ids_TK).float(), "bucket", outside_T, temperature)

    return signal


def log_probs_TV(session: Session, micro_batch: MicroBatch, temperature: float) -> Tensor:
    """The teacher's, in float64."""
    assert session.models.teacher is not None
    exact = session.models.teacher.double().signal(**micro_batch.inputs)
    return (exact.hidden_TE @ exact.head.weight_VD.T / temperature).log_softmax(1)


def jsd_of_rows(p_log: Tensor, q_log: Tensor) -> Tensor:
    """jsd(0.5) of each row of log-probabilities."""
    middle = torch.logaddexp(p_log, q_log) - math.log(2)
    return 0.5 * (p_log.exp() * (p_log - middle) + q_log.exp() * (q_log - middle)).sum(1)


def assert_close(first: Gradients, second: Gradients, tolerance: float = 1e-5) -> None:
    assert first[0] == pytest.approx(second[0], rel=tolerance / 10)
    assert first[1].keys() == second[1].keys()
    torch.testing.assert_close(first[1], second[1], rtol=tolerance, atol=tolerance / 10)


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_as_float64(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Compare float32 gradients with those of plain float64 autograd, relative to the largest one of a parameter."""
    assert gradients.keys() == reference.keys()
    for name, expected in reference.items():
        error = (gradients[name].double() - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
        assert error < 2e-5, name
