"""Held-out metrics and the held-out text, compared with logits of plain transformers; the steps of evaluations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.documents import log_probs
from kit.runs import evaluate, metrics, session_of
from kit.shard_ranks import Rank, on_ranks

from stillhouse.data import Documents
from stillhouse.loops.held_out import DOCUMENTS, TOP, held_out_tokens, top_tokens
from stillhouse.loops.off_policy import train
from stillhouse.loops.session import Session
from stillhouse.objective import FullVocab, OutputHead, VocabShard
from stillhouse.output.folder import RunFolder, init_run_dir

KEYS = ["cross_entropy", "forward_kl", "agreement", "student_entropy", "teacher_entropy", "tokens"]
OF_TEACHER = "eval/teacher_cross_entropy"


def plain_figures(folder: Path, documents: Documents) -> dict[str, float]:
    sums = dict.fromkeys([*KEYS, "teacher_cross_entropy"], 0.0)
    for document in range(len(documents)):
        labels = torch.from_numpy(documents.tokens(document).astype(np.int64))[1:, None]
        q, p = (log_probs(folder, name, documents, document)[:-1] for name in ("student", "teacher"))
        chosen = torch.from_numpy(documents.targets(document)[1:])
        sums["cross_entropy"] += float(-q.gather(1, labels)[:, 0][chosen].sum())
        sums["teacher_cross_entropy"] += float(-p.gather(1, labels)[:, 0][chosen].sum())
        sums["forward_kl"] += float((p.exp() * (p - q)).sum(1)[chosen].sum())
        sums["agreement"] += float((p.argmax(1) == q.argmax(1))[chosen].sum())
        sums["student_entropy"] += float(-(q.exp() * q).sum(1)[chosen].sum())
        sums["teacher_entropy"] += float(-(p.exp() * p).sum(1)[chosen].sum())
        sums["tokens"] += int(chosen.sum())
    tokens = sums.pop("tokens")
    return {f"eval/{name}": value / tokens for name, value in sums.items()} | {"eval/tokens": tokens}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"objective.temperature": 3.0, "objective.scale_by_temperature_squared": True},
        {"objective.loss": "reverse_kl", "eval.micro_batch_tokens": 512},
        {"objective.loss": "cross_entropy(label_smoothing=0.1) + 0.1*z_loss"},
    ],
    ids=["as trained", "temperature", "another loss", "smoothed"],
)
def test_figures_are_the_plain_ones_whatever_the_objective(tmp_path: Path, settings: dict[str, Any]) -> None:
    session = session_of(tmp_path, **settings)
    assert session.data.evaluation is not None
    figures = evaluate(session, with_teacher=True)
    assert figures == pytest.approx(plain_figures(tmp_path, session.data.evaluation.documents), rel=1e-5)
    del figures[OF_TEACHER]
    assert evaluate(session) == figures
    assert list(figures) == [f"eval/{key}" for key in KEYS]


def test_evaluation_has_no_dropout_draws_nothing_and_puts_the_mode_back(tmp_path: Path) -> None:
    session = session_of(tmp_path, family="gpt2")
    before = torch.get_rng_state()
    assert session.models.student.training
    assert evaluate(session) == evaluate(session)
    expected = plain_figures(tmp_path, session.data.evaluation.documents)
    del expected[OF_TEACHER]
    assert evaluate(session) == pytest.approx(expected, rel=1e-5)
    assert session.models.student.training
    assert session.models.student.backbone.h[0].attn.resid_dropout.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in session.models.student.parameters())


def trained(folder: Path, **settings: Any) -> tuple[Session, list[dict[str, Any]]]:
    session = session_of(folder, **settings)
    init_run_dir(RunFolder(folder / "out"), "")
    train(session, RunFolder(folder / "out"))
    return session, [line for line in metrics(folder / "out") if "eval/tokens" in line]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"eval.every": 0}, [0, 6]),
        ({"eval.every": 2}, [0, 2, 4, 6]),
        ({"eval.every": 4}, [0, 4, 6]),
        ({"eval.every": 0, "checkpoint.every": 2}, [0, 6]),
        ({"eval.every": 100, "checkpoint.every": 4}, [0, 4, 6]),
        ({"eval.every": 100, "checkpoint.every": 4, "checkpoint.best": None}, [0, 6]),
        ({"data.eval": 0}, []),
    ],
    ids=str,
)
def test_when_a_run_evaluates(tmp_path: Path, settings: dict[str, Any], steps: list[int]) -> None:
    session, lines = trained(tmp_path, **settings)
    assert [line["step"] for line in lines] == steps
    if lines:
        final = {key: value for key, value in lines[-1].items() if key.startswith("eval/")}
        assert final == evaluate(session, with_teacher=True)
        assert lines[0]["eval/cross_entropy"] > lines[-1]["eval/cross_entropy"]
        assert lines[0]["tokens"] == 0


def test_without_a_teacher_there_is_cross_entropy_alone(tmp_path: Path) -> None:
    session, lines = trained(tmp_path, teacher=False)
    assert list(evaluate(session)) == ["eval/cross_entropy", "eval/tokens"]
    assert held_out_tokens(session.models, session.data, session.loss.spec, 6) is None
    assert len(lines) == 2
    absent = {"train/teacher_entropy_nats", "loss/jsd(0.5)_nats_per_token"}
    assert not absent & set().union(*metrics(tmp_path / "out"))


def test_a_figure_that_is_not_finite_is_null_in_the_log_and_no_best(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"text": "§§"}\n')
    settings = {"data.eval": str(tmp_path / "odd.jsonl"), "train.steps": 2}
    session = session_of(tmp_path, family="gpt2", tied=False, teacher=False, **settings)
    token = int(session.data.evaluation.documents.tokens(0)[1])
    with torch.no_grad():
        session.models.student.pretrained.get_input_embeddings().weight[token] = (
            3e38  # layer norms overflow on this value
        )
    init_run_dir(RunFolder(tmp_path / "out"), "")
    train(session, RunFolder(tmp_path / "out"))

    def refuse(text: str) -> None:
        raise AssertionError(text)

    for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=refuse)
    assert metrics(tmp_path / "out")[0]["eval/cross_entropy"] is None
    (state,) = (tmp_path / "out").glob("checkpoints/*/state.json")
    assert json.loads(state.read_text())["progress"]["metrics"] == {"eval/tokens": 5.0}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_held_out_text(tmp_path: Path, precision: str) -> None:
    session = session_of(tmp_path, **{"train.precision": precision})
    assert session.data.evaluation is not None
    tokens = held_out_tokens(session.models, session.data, session.loss.spec, 7)
    assert tokens is not None
    assert tokens.step == 7
    documents = session.data.evaluation.documents
    assert len(tokens.documents) == min(DOCUMENTS, len(documents))
    for shown in tokens.documents:
        document = documents.sources.index(shown.source)
        ids = documents.tokens(document)
        q, p = (log_probs(tmp_path, name, documents, document) for name in ("student", "teacher"))
        kl_T = (p.exp() * (p - q)).sum(1)
        near = {"rel": 1e-4} if precision == "fp32" else {"rel": 0.1, "abs": 0.05}
        assert [token.text for token in shown.tokens] == [
            session.data.tokenizer.decode([token_id]) for token_id in ids
        ]
        assert [token.target for token in shown.tokens] == documents.targets(document).tolist()
        expected_kl = [None, *(pytest.approx(float(kl), **near) for kl in kl_T[:-1])]
        assert [token.kl for token in shown.tokens] == expected_kl
        first, *others = shown.tokens
        assert (first.teacher, first.student) == ([], [])
        for row, token in enumerate(others):
            for pairs, log_p in ((token.teacher, p[row]), (token.student, q[row])):
                if pairs is token.student and precision == "bf16":
                    continue
                best = log_p.exp().topk(TOP)
                assert [text for text, _ in pairs] == [session.data.tokenizer.decode([t]) for t in best.indices]
                assert [value for _, value in pairs] == pytest.approx(best.values.tolist(), abs=2e-6)


@pytest.mark.parametrize(("rows", "ranks"), [(251, 2), (251, 4), (11, 4), (3, 2)])
def test_the_top_tokens_over_vocabulary_shards(rows: int, ranks: int) -> None:
    """Some ranks have fewer rows than the requested number of tokens, or no rows."""
    for of_rank in on_ranks(top_tokens_of_shards, ranks, rows, ranks):
        sharded, expected = ([pair for row in rows_of_head for pair in row] for rows_of_head in of_rank)
        assert len(expected) == 6 * min(TOP, rows)
        assert [token for token, _ in sharded] == [token for token, _ in expected]
        assert [value for _, value in sharded] == pytest.approx([value for _, value in expected], rel=1e-5)


def top_tokens_of_shards(rank: Rank, rows: int, ranks: int) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(rows)
    hidden_TE, weight_VE = torch.randn(6, 8, generator=random), torch.randn(rows, 8, generator=random)
    size = -(-rows // ranks)
    start, stop = (min(rows, place * size) for place in (rank.number, rank.number + 1))
    shard = VocabShard(start, stop, rank.groups[ranks])
    head = OutputHead(weight_VE[start:stop], shard=shard)
    sharded = top_tokens(FullVocab(hidden_TE, head), rows, shard)
    return sharded, top_tokens(FullVocab(hidden_TE, OutputHead(weight_VE)), rows, None)
