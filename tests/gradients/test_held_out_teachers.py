"""Held-out metrics of several teachers."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit.runs import evaluate, session_of
from kit.serving import Server
from kit.teacher_gradients import LOSS, PREFIXES, named, write_subject_teachers
from transformers import AutoModelForCausalLM

from stillhouse.loops.step_metrics import means
from stillhouse.objective.spec import TeacherShare, parse_objective


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_subject_teachers(tmp_path_factory.mktemp("several"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with Server(folder / "code", "--max-top-k", 1000) as started:
        yield started.url


def test_a_held_out_divergence_of_each_teacher_and_of_all(folder: Path) -> None:
    keys = {"objective.loss": "cross_entropy + forward_kl", "data.eval": 0.3}
    mixed = session_of(folder, cached=True, **keys, **named(folder, {"weight": 3.0}, {}))
    actual = evaluate(mixed)
    for kind in ("forward_kl", "agreement", "teacher_entropy"):
        parts = 0.75 * actual[f"eval/{kind}/math"] + 0.25 * actual[f"eval/{kind}/code"]
        assert actual[f"eval/{kind}"] == pytest.approx(parts, rel=1e-6)
    alone = session_of(folder, **keys, **{"teacher.model": str(folder / "math")})
    reference = evaluate(alone)
    assert actual["eval/forward_kl/math"] == pytest.approx(reference["eval/forward_kl"], rel=1e-5)
    assert actual["eval/student_entropy"] == pytest.approx(reference["eval/student_entropy"], rel=1e-5)
    assert actual["eval/cross_entropy"] == pytest.approx(reference["eval/cross_entropy"], rel=1e-5)
    routed_session = session_of(folder, cached=True, **keys, **named(folder, {}, {}), **{"teachers.route": "subject"})
    by_column = evaluate(routed_session)
    assert by_column["eval/student_entropy"] == pytest.approx(reference["eval/student_entropy"], rel=1e-5)
    low, high = sorted((by_column["eval/forward_kl/math"], by_column["eval/forward_kl/code"]))
    assert low <= by_column["eval/forward_kl"] <= high
    for session in (mixed, alone, routed_session):
        session.close()


def test_held_out_micro_batches_that_lack_a_teachers_documents(folder: Path) -> None:
    """The sums of a pipeline's micro-batches together are those of the micro-batches one by one."""
    keys = {"objective.loss": "cross_entropy + forward_kl", "data.eval": 0.3, "teachers.route": "subject"}
    keys |= {"data.max_tokens": 8, "train.micro_batch_tokens": 8}
    session = session_of(folder, cached=True, **keys, **named(folder, {}, {}))
    sequences = session.data.evaluation
    assert sequences is not None
    one_by_one = sequences.micro_batches([[at] for at in range(len(sequences))])
    micro_batches = session.models.shard(one_by_one, training=False)
    signals = session.models.source.request(micro_batches).result()
    assert any(len(of_teachers) < 2 for of_teachers in signals)
    together = session.models.engine.evaluate([(micro_batches, signals)])
    pairs = zip(micro_batches, signals, strict=True)
    alone = session.models.engine.evaluate([([batch], [of_one]) for batch, of_one in pairs])
    assert together == pytest.approx(alone, rel=1e-6)
    session.close()


def test_held_out_top_k_of_a_routed_server_has_its_temperature(folder: Path, server: str) -> None:
    """Its log-probabilities are known at one temperature alone, the training's."""
    rows = json.loads((folder / "code" / "config.json").read_text())["vocab_size"]
    served = {"url": server, "signal": "top_k", "temperature": 2.0, "top_k": rows}
    keys = LOSS | {"data.eval": 0.3, "teachers.route": "subject"}
    session = session_of(folder, cached=True, **keys, **named(folder, {}, served))
    metrics = evaluate(session)
    assert session.data.evaluation is not None
    documents = session.data.evaluation.documents
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()
        for name in ("student", "code")
    )
    divergences = []
    for number in range(len(documents)):
        if documents.columns["subject"][number] == "code":
            ids, targets = torch.tensor(documents.tokens(number)).long(), torch.tensor(documents.targets(number))
            with torch.no_grad():
                q_log, p_log = ((model(ids[None]).logits[0] / 2).log_softmax(1) for model in (student, teacher))
            divergences.append((p_log.exp() * (p_log - q_log)).sum(1)[targets[1:].nonzero()[:, 0]])
    assert metrics["eval/forward_kl/code"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-5)
    session.close()


def test_a_mean_is_over_the_teachers_that_report_it(folder: Path, server: str) -> None:
    """A teacher that only draws ids has no entropy and no divergence."""
    draws = {"url": server, "signal": "sampled", "weight": 3.0}
    settings = {"objective.loss": "forward_kl", "data.eval": 0.3}
    for route in ({}, {"teachers.route": "subject"}):
        session = session_of(folder, cached=True, **settings, **route, **named(folder, {}, draws))
        actual = evaluate(session)
        session.close()
        for kind in ("forward_kl", "teacher_entropy", "agreement"):
            assert f"eval/{kind}/code" not in actual
            assert actual[f"eval/{kind}"] == actual[f"eval/{kind}/math"]


def test_entropies_at_different_temperatures_have_no_mean(folder: Path) -> None:
    sums = {"tokens": 10.0, "tokens/a": 4.0, "tokens/b": 6.0, "student_entropy": 7.0, "jsd(0.5)/a": 8.0}
    sums |= {"jsd(0.5)/b": 3.0, "teacher_entropy/a": 2.0, "teacher_entropy/b": 9.0}
    spec = replace(parse_objective("jsd(0.5)"), teachers={name: TeacherShare(2.0) for name in "ab"})
    actual = means(sums, spec, {1.0, 2.0})
    divergences = {"jsd(0.5)": 1.1, "jsd(0.5)/a": 2.0, "jsd(0.5)/b": 0.5}
    assert actual == divergences | {"teacher_entropy/a": 0.5, "teacher_entropy/b": 1.5}
    actual = means(sums, spec, {1.0})
    assert (actual["student_entropy"], actual["teacher_entropy"]) == (0.7, 1.1)


@pytest.mark.parametrize("share", [0.03, 0.3])
def test_a_served_teacher_without_held_out_documents(folder: Path, server: str, share: float) -> None:
    keys = {"url": server, "prefix": PREFIXES["code"]}
    settings = {"objective.loss": "forward_kl", "data.eval": share, "teachers.route": "subject"}
    session = session_of(folder, cached=True, **settings, **named(folder, {}, keys))
    assert evaluate(session)["eval/forward_kl"] > 0
    session.close()
