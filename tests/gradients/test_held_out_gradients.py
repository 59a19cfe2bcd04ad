"""tokens.json: what each term of the objective does to the logits at each held-out token, against plain autograd."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.documents import log_probs
from kit.runs import session_of
from kit.shard_ranks import Rank, on_ranks
from torch import Tensor

from stillhouse.loops.held_out import PUSHED, gradients_by_term, held_out_tokens
from stillhouse.objective import TEACHER, FullVocab, OutputHead, VocabShard
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.spec import ObjectiveSpec, parse_objective

LOSS = "0.4*cross_entropy(label_smoothing=0.1) + 0.2*forward_kl + 0.3*jsd(0.5) + 0.01*entropy"


#: student, teacher, labels and weights
Batch = tuple[FullVocab, FullVocab, Tensor, Tensor]


def make_batch(rows: int, teacher_rows: int) -> Batch:
    """70 tokens of float64, so that they are cut; some have no label, some no weight, and some logits are peaked."""
    random = torch.Generator().manual_seed(rows)
    hidden_TD, hidden_TE = (torch.randn(70, width, generator=random, dtype=torch.float64) * 2 for width in (8, 12))
    hidden_TD[::9] *= 30
    weight_VD = torch.randn(rows, 8, generator=random, dtype=torch.float64)
    weight_VE = torch.randn(teacher_rows, 12, generator=random, dtype=torch.float64)
    labels_T = torch.randint(0, min(rows, teacher_rows), (70,), generator=random)
    labels_T[5::10] = -100
    weights_T = torch.rand(70, generator=random, dtype=torch.float64) + 0.5
    weights_T[3::7] = 0
    student, teacher = FullVocab(hidden_TD, OutputHead(weight_VD)), FullVocab(hidden_TE, OutputHead(weight_VE))
    return student, teacher, labels_T, weights_T


def expected(spec: ObjectiveSpec, batch: Batch) -> list[list[tuple[float, Tensor]]]:
    """For each term, by row: its value and its gradient, from all logits and plain operations."""
    student, teacher, labels_T, weights_T = batch
    rows = min(len(model.head.weight_VD) for model in (student, teacher))
    results = []
    for term in spec.terms(labels_T, {TEACHER: replace(teacher, head=OutputHead(teacher.head.weight_VD[:rows]))}):
        logits_TV = (student.hidden_TE @ student.head.weight_VD[:rows].T).requires_grad_()
        identity = OutputHead(torch.eye(rows, dtype=torch.float64))
        output = dense_objective(logits_TV, identity, [term], weights_T=weights_T)
        (gradient_TV,) = torch.autograd.grad(output.loss, logits_TV)
        results.append(list(zip(output.per_token[term.name].tolist(), gradient_TV, strict=True)))
    return results


def check(results: list[dict[str, Any]], spec: ObjectiveSpec, batch: Batch) -> None:
    weights_T, plain = batch[-1], expected(spec, batch)
    assert len(results) == len(weights_T)
    for row, of_row in enumerate(results):
        assert bool(of_row) == bool(weights_T[row])
        for (value, norm, raised, lowered), of_term in zip(of_row.values(), plain, strict=bool(of_row)):
            expected_value, gradient_V = of_term[row]
            assert value == pytest.approx(expected_value, rel=1e-9, abs=1e-12)
            assert norm == pytest.approx(float(gradient_V.norm()), rel=1e-9, abs=1e-12)
            for pushed, sign in ((raised, -1), (lowered, 1)):
                best = (sign * gradient_V).topk(min(PUSHED, len(gradient_V))).values.clamp(min=0).tolist()
                values = [value for _, value in pushed] + [0.0] * (len(best) - len(pushed))
                assert values == pytest.approx(best, rel=1e-9, abs=1e-12)
                assert [value for _, value in pushed] == pytest.approx(
                    [sign * float(gradient_V[token]) for token, _ in pushed], rel=1e-9, abs=1e-12
                )


@pytest.mark.parametrize(("rows", "teacher_rows"), [(251, 251), (251, 243), (243, 251)])
@pytest.mark.parametrize(("temperature", "squared"), [(1.0, False), (2.0, True)])
def test_values_and_gradients_are_those_of_autograd(
    rows: int, teacher_rows: int, temperature: float, squared: bool
) -> None:
    spec, batch = parse_objective(LOSS, temperature, squared), make_batch(rows, teacher_rows)
    results = gradients_by_term(spec, *batch)
    assert list(results[0]) == ["cross_entropy", str(spec.divergence), "entropy"]
    check(results, spec, batch)


@pytest.mark.parametrize(("rows", "teacher_rows", "ranks"), [(251, 251, 2), (251, 243, 4), (5, 4, 4)])
def test_over_vocabulary_shards_they_are_those_of_one_process(rows: int, teacher_rows: int, ranks: int) -> None:
    """Some ranks have fewer rows than the requested number of tokens, or none below the teacher's rows."""
    for results in on_ranks(gradients_over_shards, ranks, rows, teacher_rows, ranks):
        check(results, parse_objective(LOSS), make_batch(rows, teacher_rows))


def gradients_over_shards(rank: Rank, rows: int, teacher_rows: int, ranks: int) -> list[dict[str, Any]]:
    student, *others = make_batch(rows, teacher_rows)
    size = -(-rows // ranks)
    start, stop = (min(rows, place * size) for place in (rank.number, rank.number + 1))
    shard = VocabShard(start, stop, rank.groups[ranks])
    local = replace(student, head=OutputHead(student.head.weight_VD[start:stop], shard=shard))
    return gradients_by_term(parse_objective(LOSS), local, *others)


def test_the_file_has_the_terms_of_targets(tmp_path: Path) -> None:
    """cross_entropy: 1 − p(label) at the label and −p elsewhere; forward_kl: q − p."""
    session = session_of(tmp_path, **{"objective.loss": "0.5*cross_entropy + 2*forward_kl"})
    tokens = held_out_tokens(session.models, session.data, session.loss.spec, 0)
    assert tokens is not None
    json.dumps(asdict(tokens), allow_nan=False)
    assert session.data.evaluation is not None
    documents = session.data.evaluation.documents
    for entry in tokens.documents:
        document = documents.sources.index(entry.source)
        ids = torch.from_numpy(documents.tokens(document).astype("int64"))
        log_q_TV, log_p_TV = (log_probs(tmp_path, name, documents, document) for name in ("student", "teacher"))
        assert entry.tokens[0].terms == {}
        for row, token in enumerate(entry.tokens[1:]):
            if not token.target:
                assert token.terms == {}
                continue
            q_V, p_V = log_q_TV[row].exp(), log_p_TV[row].exp()
            one_hot_V = torch.zeros_like(q_V).index_fill(0, ids[row + 1], 1.0)
            for name, gradient_V in (("cross_entropy", 0.5 * (q_V - one_hot_V)), ("forward_kl", 2 * (q_V - p_V))):
                term = token.terms[name]
                assert term.gradient == pytest.approx(float(gradient_V.norm()), rel=1e-3, abs=1e-5)
                assert term.raises[0][1] == pytest.approx(float(-gradient_V.min()), rel=1e-3, abs=1e-5)
                assert term.lowers[0][1] == pytest.approx(float(gradient_V.max()), rel=1e-3, abs=1e-5)
            of_label = token.terms["cross_entropy"]
            q = float(q_V[ids[row + 1]])
            assert of_label.raises == [(token.text, pytest.approx(0.5 - 0.5 * q, abs=1e-5))]
            assert of_label.value == pytest.approx(-math.log(q), rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "names"), [("sampled_kl + 0.1*cross_entropy", ["cross_entropy"]), ("sampled_kl", [])]
)
def test_terms_of_the_students_own_completions_have_no_gradient_here(
    tmp_path: Path, loss: str, names: list[str]
) -> None:
    session = session_of(tmp_path)
    tokens = held_out_tokens(session.models, session.data, parse_objective(loss), 0)
    assert tokens is not None
    assert [list(token.terms) for token in tokens.documents[0].tokens if token.target][1:2] == [names]
