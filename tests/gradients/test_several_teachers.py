"""Several teachers of one student: gradients against plain float64 autograd, one document at a time."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.runs import MAX_TOKENS, forward_backward, save_model, session_of, write_records
from kit.serving import Server
from kit.teacher_gradients import (
    LOSS,
    PREFIXES,
    SUBJECTS,
    answer_of,
    assert_same_as_float64,
    first_step,
    jsd_of_rows,
    named,
    named_gradients,
    session_with,
    write_subject_teachers,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from stillhouse.config import ConfigError
from stillhouse.data import DataError
from stillhouse.loops.session import Session
from stillhouse.parallel.host_memory import HeadBuffers
from stillhouse.signals import WeightAverage

#: the divergence of a document's target rows: student's logits, teachers' logits by name, the teacher's name
Divergence = Callable[[Tensor, dict[str, Tensor], str], Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_subject_teachers(tmp_path_factory.mktemp("several"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with Server(folder / "code", "--max-top-k", 1000) as started:
        yield started.url


def gradients(session: Session) -> dict[str, Tensor]:
    named_and_loss = first_step(session)
    session.close()
    return named_and_loss


def expected(
    session: Session, folder: Path, divergence: Divergence, prefixes: dict[str, str] | None = None
) -> dict[str, Tensor]:
    """The gradients of the first step in float64, from one document at a time and whole logits."""
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float64)
    student, teachers = load(folder / "student").train(), {name: load(folder / name).eval() for name in SUBJECTS}
    documents = session.data.train.documents
    step = session.schedule.step_schedule.micro_batches(session.data.train, 0)
    chosen = sorted({document for micro_batch in step for document in micro_batch.document_T.tolist()} - {-1})
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for number in chosen:
        ids, targets = torch.tensor(documents.tokens(number)).long(), torch.tensor(documents.targets(number))
        rows = targets[1:].nonzero()[:, 0]
        hidden = student.model(ids[None]).last_hidden_state
        q_logits = student.lm_head(hidden)[0][rows]
        with torch.no_grad():
            z = {name: teacher(ids[None]).logits[0][rows] for name, teacher in teachers.items()}
            for name, text in (prefixes or {}).items():
                filled = text.format(answer=answer_of(documents.sources[number], folder))
                prefix = torch.tensor(session.data.tokenizer(filled, add_special_tokens=False)["input_ids"]).long()
                front = int(ids[0] == session.data.tokenizer.bos_token_id)  # a later piece of a text has no BOS
                read = torch.cat([ids[:front], prefix, ids[front:]])
                z[name] = teachers[name](read[None]).logits[0][rows + len(prefix)]
        name = documents.columns["subject"][number] if "subject" in documents.columns else ""
        of_document = 0.3 * cross_entropy(q_logits, ids[rows + 1], reduction="sum")
        of_document = of_document + 0.7 * divergence(q_logits, z, name).sum()
        total = total + of_document
        tokens += len(rows)
    (total / tokens).backward()
    return {"loss": (total / tokens).detach()} | named_gradients(student)


def divergence_from(teacher: str, q: Tensor, z: dict[str, Tensor], temperature: float = 1.0) -> Tensor:
    return jsd_of_rows((z[teacher] / temperature).log_softmax(1), (q / temperature).log_softmax(1))


def of_divergences(q: Tensor, z: dict[str, Tensor], name: str) -> Tensor:
    return 0.75 * divergence_from("math", q, z) + 0.25 * divergence_from("code", q, z, 2.0)


def of_distributions(q: Tensor, z: dict[str, Tensor], name: str) -> Tensor:
    p = 0.75 * (z["math"] / 2).softmax(1) + 0.25 * (z["code"] / 2).softmax(1)
    return jsd_of_rows(p.log(), (q / 2).log_softmax(1))


def of_own_teacher(q: Tensor, z: dict[str, Tensor], name: str) -> Tensor:
    temperature, weight = {"math": (1.0, 1.0), "code": (2.0, 0.5)}[name]
    return weight * divergence_from(name, q, z, temperature)


def of_equals(q: Tensor, z: dict[str, Tensor], name: str) -> Tensor:
    return 0.5 * (divergence_from("math", q, z) + divergence_from("code", q, z))


ROUTE, LIVE = {"teachers.route": "subject"}, {"student": "live"}
ONE_TEACHER = "every step has documents of only one teacher"
DISTRIBUTIONS = {"teachers.sum": "distributions", "objective.temperature": 2.0}
OF_CODE: dict[str, Any] = {"weight": 0.5, "temperature": 2.0}
SERVED = {"url": "that of the server"}
SERVED_CODE = {"prefix": PREFIXES["code"], **SERVED}
#: top-k over the whole vocabulary of 400 ids is exact, too
TOP_K = {"signal": "top_k", "top_k": 400}
#: the keys of the two teachers, further settings, the divergence, and the teachers' prefixes
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], Divergence, dict[str, str]]] = {
    "sum of divergences": ({"weight": 3.0}, {"weight": 1, "temperature": 2.0}, {}, of_divergences, {}),
    "sum of distributions": ({"weight": 3.0}, {"weight": 1}, DISTRIBUTIONS, of_distributions, {}),
    "a column names the teacher": ({}, OF_CODE, ROUTE, of_own_teacher, {}),
    "one on a server": ({}, OF_CODE | SERVED, ROUTE, of_own_teacher, {}),
    "top-k of a server": ({}, OF_CODE | SERVED | TOP_K, ROUTE, of_own_teacher, {}),
    "prefixes": ({"prefix": PREFIXES["math"]}, {"prefix": PREFIXES["code"]}, {}, of_equals, PREFIXES),
    "prefixes, one served": ({"prefix": PREFIXES["math"]}, SERVED_CODE, {}, of_equals, PREFIXES),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_whole_logits(folder: Path, server: str, case: str) -> None:
    of_math, of_code, settings, divergence, prefixes = CASES[case]
    if "url" in of_code:
        of_code = of_code | {"url": server}
    session = session_with(folder, **named(folder, of_math, of_code), **settings)
    reference = expected(session, folder, divergence, prefixes)
    assert_same_as_float64(gradients(session), reference)


def test_steps_of_a_single_teacher_are_warned_of(folder: Path) -> None:
    """With documents in rows, a micro-batch has documents of one teacher."""
    settings = ROUTE | named(folder, {}, OF_CODE) | {"data.packing": "rows", "train.tokens_per_step": 4 * MAX_TOKENS}
    for rows, count in ((2, 0), (4, 1)):
        session = session_with(folder, **settings, **{"train.micro_batch_tokens": rows * MAX_TOKENS})
        assert [warning.partition(",")[0] for warning in session.warnings] == [ONE_TEACHER] * count


def test_a_teacher_runs_only_on_its_own_documents(folder: Path) -> None:
    one_row = {"train.micro_batch_tokens": MAX_TOKENS}
    session = session_with(folder, **named(folder, {}, {}), **ROUTE, **one_row)
    seen: dict[str, int] = {}
    for name, decoder in session.models.teachers.items():

        def count(module: object, positional: object, inputs: dict[str, Any], name: str = name) -> None:
            seen[name] = seen.get(name, 0) + inputs["input_ids"].numel()

        decoder.register_forward_pre_hook(count, with_kwargs=True)
    step = session.schedule.step_schedule.micro_batches(session.data.train, 0)
    forward_backward(session, step)
    assert seen.keys() == {"teachers.math", "teachers.code"}
    assert sum(seen.values()) == sum(rows * columns for rows, columns in step.shapes_BS)
    session.close()


def test_the_student_behind_a_prefix_is_its_own_teacher(folder: Path) -> None:
    """live: its gradient does not flow through the teacher."""
    session = session_with(folder, **{"teachers.self": LIVE | {"prefix": PREFIXES["math"]}})
    as_teacher = folder / "as teacher"
    as_teacher.mkdir()
    (as_teacher / "train.jsonl").symlink_to(folder / "train.jsonl")
    for name in (*SUBJECTS, "student"):
        (as_teacher / name).symlink_to(folder / "student")
    prefixes = {"math": PREFIXES["math"]}
    reference = expected(session, as_teacher, lambda q, z, _: divergence_from("math", q, z), prefixes)
    assert_same_as_float64(gradients(session), reference)


def test_an_average_of_the_student_as_its_teacher(folder: Path) -> None:
    """The average follows every update. Its gradients are those of a teacher with these weights in a folder."""
    session = session_with(folder, **{"teachers.slow": {"student": "ema", "ema_decay": 0.75}})
    engine = session.models.engine
    before = {name: parameter.detach().clone() for name, parameter in session.models.student.named_parameters()}
    wanted = {name: parameter.double() for name, parameter in before.items()}
    for _ in range(3):
        forward_backward(session)
        engine.update(1e-2)
        for name, parameter in session.models.student.named_parameters():
            wanted[name] = 0.75 * wanted[name] + 0.25 * parameter.detach().double()
    after = {name: parameter.detach().clone() for name, parameter in session.models.student.named_parameters()}
    average = engine.average
    assert isinstance(average, WeightAverage)
    for name, tensor in average.tensors.items():
        torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-5, atol=1e-7, msg=name)
    assert any(not torch.equal(after[name], average.tensors[name]) for name in after)

    actual = gradients(session)
    assert all(torch.equal(parameter, after[name]) for name, parameter in session.models.student.named_parameters())
    for name, parameter in session.models.student.named_parameters():
        parameter.data.copy_(average.tensors[name])
    session.models.student.pretrained.save_pretrained(folder / "average")
    session.data.tokenizer.save_pretrained(folder / "average")
    for name, parameter in session.models.student.named_parameters():
        parameter.data.copy_(before[name])
        parameter.grad = None
    live = session_with(folder, **{"teachers.slow": {"model": str(folder / "average")}})
    for name, parameter in live.models.student.named_parameters():
        parameter.data.copy_(after[name])
    torch.testing.assert_close(actual, gradients(live), rtol=1e-4, atol=1e-7)


def test_heads_of_one_shape_share_a_buffer() -> None:
    """Unless they are used at the same time; the buffer of a weight that was there last is not copied again."""
    one, other, third = (torch.randn(7, 3) for _ in range(3))
    buffers = HeadBuffers(torch.device("cpu"))
    with buffers.holding("one", one) as first:
        assert torch.equal(first, one)
        address, version = first.data_ptr(), first._version
    with buffers.holding("other", other) as second:
        assert second.data_ptr() == address
        assert torch.equal(second, other)
        assert second._version > version  # so that what was computed from the earlier content is not used again
        with buffers.holding("one", one) as beside:
            assert beside.data_ptr() != address
            assert torch.equal(beside, one)
            assert torch.equal(second, other)
    with buffers.holding("one", one) as again:
        assert again.data_ptr() == beside.data_ptr()
        assert again._version == beside._version
    with buffers.holding("wide", torch.randn(7, 4)) as wide:
        assert wide.shape == (7, 4)
    with buffers.holding("third", third.bfloat16()) as half:
        assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"teachers.route": "topic"}, DataError, r"train.jsonl:1: .*topic"),
        ({"teachers.route": "answer"}, DataError, r"jsonl:1: column 'answer' is a string .*: expected one of code, "),
        ({"teachers.other": LIVE | {"prefix": "{solution}"}}, DataError, r"train.jsonl:1: .*solution"),
        ({"teachers.other": LIVE | {"prefix": "{answer.x}"}}, ConfigError, r"other.prefix: .*\{answer.x\}"),
        ({f"teachers.{name}": {"student": "ema"} for name in "ab"}, ConfigError, r"b.student: got ema a second time"),
    ],
)
def test_teachers_that_do_not_fit_are_refused(
    folder: Path, settings: dict[str, Any], error: type[ValueError], message: str
) -> None:
    with pytest.raises(error, match=message):
        session_of(folder, cached=True, **LOSS | named(folder, {}, {}) | settings)


def test_a_document_without_a_teacher_is_skipped_if_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "train.jsonl").read_text().splitlines()
    odd = json.dumps({"text": "no teacher", "subject": "art", "answer": ""})
    (tmp_path / "train.jsonl").write_text("\n".join([*lines[:5], odd, *lines[5:]]))
    settings = {"data.train": str(tmp_path / "train.jsonl"), "data.on_error": "skip", "teachers.route": "subject"}
    session = session_with(folder, **named(folder, {}, {}), **settings)
    report = session.data.train.documents.report
    assert (report.read, report.kept, report.skipped) == (len(lines) + 1, len(lines), 1)
    assert "train.jsonl:6: column 'subject' is" in report.reasons[0]
    session.close()


def test_a_teacher_without_documents_is_refused(folder: Path) -> None:
    teachers = named(folder, {}, {}) | {"teachers.art": {"model": str(folder / "math")}}
    with pytest.raises(ConfigError, match=r"teachers.art: no document of data.train has 'art' in its column"):
        session_with(folder, **teachers, **ROUTE)


def test_a_prefix_needs_the_columns_of_its_own_documents_alone(folder: Path, tmp_path: Path) -> None:
    """With a route, the other documents have no gap for it either."""
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for record in records:
        if record["subject"] == "math":
            del record["answer"]
    write_records(tmp_path / "train.jsonl", records)
    settings = {"data.train": str(tmp_path / "train.jsonl"), "teachers.route": "subject"}
    session = session_with(folder, **named(folder, {}, {"prefix": PREFIXES["code"]}), **settings)
    documents = session.data.train.documents
    is_code = np.array([subject == "code" for subject in documents.columns["subject"]])
    gaps_D = session.data.train.widths_D - documents.lengths_D
    assert (gaps_D[is_code] > 0).all()
    assert not gaps_D[~is_code].any()
    session.close()


def test_a_prefix_that_the_students_head_has_no_row_for(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "student", "llama", seed=1)
    config = json.loads((tmp_path / "student" / "tokenizer.json").read_text())
    token = {"id": 600, "content": "☃", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    config["added_tokens"].append(token | {"special": True})
    (tmp_path / "student" / "tokenizer.json").write_text(json.dumps(config))
    itself = {"teachers.self": LIVE | {"prefix": "☃"}, "student.model": str(tmp_path / "student")}
    with pytest.raises(ValueError, match=r"of the prefix of teacher 'self' has no row in the student's head"):
        session_with(folder, **itself)


@pytest.mark.parametrize("family", ["gpt2", "granite"])
def test_a_family_that_cannot_be_cut_runs_in_one_process(folder: Path, family: str) -> None:
    """Its gradients are those of the same teacher by itself."""
    save_model(folder / family, family, seed=3)
    model = {"model": str(folder / family)}
    actual = gradients(session_with(folder, **{"teachers.only": model}))
    alone = gradients(session_of(folder, **LOSS, **{"teacher.model": model["model"]}))
    torch.testing.assert_close(actual, alone, rtol=1e-4, atol=1e-7)
