"""A few held-out documents, token by token: where teacher and student differ, and what each expected.

T tokens of one document, E a model's width, V vocabulary.
"""

import hashlib
from typing import Any

import numpy as np
import torch

from stillhouse.data import Documents, make_batch
from stillhouse.objective import Distill, FullVocab, forward_kl, linear_objective
from stillhouse.objective.head import Projection, common_vocabulary, operand_dtype
from stillhouse.train.session import Session

DOCUMENTS = 4
TOKENS = 256
TOP = 5


@torch.no_grad()
def held_out_tokens(session: Session, step: int) -> dict[str, Any] | None:
    """For tokens.json: every token's text, its KL(teacher‖student) and the five likeliest of each side.

    The entry of a token describes the distributions that predicted it, so the first token of a document has none.
    None without a teacher or held-out data, and where a process has only a part of the models.
    """
    if session.config.teacher is None or session.evaluation is None or session.runner.mesh is not None:
        return None
    documents = session.evaluation.documents
    chosen = [_document(session, documents, document) for document in _choose(documents)]
    return {"step": step, "documents": chosen}


def _choose(documents: Documents) -> list[int]:
    """Some documents of a good length, the same ones in every run on this data."""
    long_enough = np.flatnonzero(documents.lengths_D >= min(TOKENS, documents.lengths_D.max()) // 2)
    ranked = sorted(long_enough.tolist(), key=lambda d: hashlib.sha256(documents.tokens(d).tobytes()).digest())
    return ranked[:DOCUMENTS]


def _document(session: Session, documents: Documents, document: int) -> dict[str, Any]:
    batch = make_batch(documents, [[document]]).to(session.device)
    teacher = _first_rows(session.runner.twins[0].signal(batch, session.precision))
    with session.precision():
        student = _first_rows(session.student.signal(batch.input_ids_BS, batch.position_ids_BS))
        output = linear_objective(student.hidden_TE, student.head, [Distill(teacher, forward_kl())])
        rows = common_vocabulary([student.head, teacher.head])
        student_top = _top(session, student, rows)
    kl = [None, *output.per_token["forward_kl"].tolist()[:-1]]
    tops = [([], []), *zip(_top(session, teacher, rows), student_top, strict=True)]
    ids_T, targets = batch.input_ids_BS[0, :TOKENS], documents.targets(document)
    return {
        "source": documents.sources[document],
        "tokens": [
            {
                "text": session.tokenizer.decode([token]),
                "target": bool(targets[place]),
                "kl": kl[place],
                "teacher": tops[place][0],
                "student": tops[place][1],
            }
            for place, token in enumerate(ids_T.tolist())
        ],
    }


def _first_rows(signal: FullVocab) -> FullVocab:
    return FullVocab(signal.hidden_TE[:TOKENS], signal.head)


def _top(session: Session, signal: FullVocab, rows: int) -> list[list[tuple[str, float]]]:
    """The likeliest tokens of each position, with the logits that the objective itself sees."""
    projection = Projection(signal.head, rows, operand_dtype(signal.hidden_TE, signal.head.weight_VD))
    best = torch.softmax(projection.logits(signal.hidden_TE), 1).topk(min(TOP, rows))
    return [
        [(session.tokenizer.decode([token]), round(probability, 6)) for token, probability in zip(*pair, strict=True)]
        for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
