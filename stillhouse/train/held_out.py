"""A few held-out documents, token by token: where teacher and student differ, and what each expected.

T tokens of one document, V vocabulary.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillhouse.data import Documents, make_batch
from stillhouse.models import evaluating
from stillhouse.objective import DenseLogits, Distill, forward_kl, logits_objective
from stillhouse.train.session import Session

DOCUMENTS = 4
TOKENS = 256
TOP = 5


@torch.no_grad()
def held_out_tokens(session: Session, step: int) -> dict[str, Any] | None:
    """For tokens.json: every token's text, its KL(teacher‖student) and the five likeliest of each side.

    The entry of a token describes the distributions that predicted it, so the first token of a document has none.
    None without a teacher or held-out data.
    """
    if session.teacher is None or session.evaluation is None:
        return None
    documents = session.evaluation.documents
    with evaluating(session.student), session.precision():
        chosen = [_document(session, documents, document) for document in _choose(documents)]
    return {"step": step, "documents": chosen}


def _choose(documents: Documents) -> list[int]:
    """Some documents of a good length, the same ones in every run on this data."""
    long_enough = np.flatnonzero(documents.lengths_D >= min(TOKENS, documents.lengths_D.max()) // 2)
    ranked = sorted(long_enough.tolist(), key=lambda d: hashlib.sha256(documents.tokens(d).tobytes()).digest())
    return ranked[:DOCUMENTS]


def _document(session: Session, documents: Documents, document: int) -> dict[str, Any]:
    assert session.teacher is not None
    batch = make_batch(documents, [[document]]).to(session.device)
    ids_T = batch.input_ids_BS[0, :TOKENS]
    positions_1T = batch.position_ids_BS[:, :TOKENS]
    student_TV = session.student(ids_T[None], positions_1T)[0].float()
    teacher_TV = session.teacher.decoder(ids_T[None], positions_1T)[0].float()
    rows = min(student_TV.shape[1], teacher_TV.shape[1])
    student_TV, teacher_TV = student_TV[:, :rows], teacher_TV[:, :rows]
    output = logits_objective(student_TV, [Distill(DenseLogits(teacher_TV), forward_kl())])
    kl = [None, *output.per_token["forward_kl"].tolist()[:-1]]
    tops = [([], []), *zip(_top(session, teacher_TV), _top(session, student_TV), strict=True)]
    targets = documents.targets(document)
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


def _top(session: Session, logits_TV: Tensor) -> list[list[tuple[str, float]]]:
    best = torch.softmax(logits_TV, 1).topk(min(TOP, logits_TV.shape[1]))
    return [
        [(session.tokenizer.decode([token]), round(probability, 6)) for token, probability in zip(ids, values, strict=True)]
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
