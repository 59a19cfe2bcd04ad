"""A few held-out documents, token by token: where teacher and student differ, and what each expected.

C rows that are shown, of a micro-batch's; E a model's width; V vocabulary; K likeliest tokens; R ranks that share the
vocabulary.
"""

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from stillhouse.data import Batch, Documents, PackedSequences
from stillhouse.models import evaluating
from stillhouse.objective import Distill, FullVocab, OutputHead, Signal, VocabShard, forward_kl, linear_objective
from stillhouse.objective.head import Projection, common_vocabulary, operand_dtype
from stillhouse.objective.recipe import Recipe
from stillhouse.objective.vocab import Pieces
from stillhouse.parallel import Work, gathered
from stillhouse.train.session import Session

DOCUMENTS = 4
TOKENS = 256
TOP = 5

#: of a row: the document, the place of the token that it predicts, its KL, the likeliest of teacher and of student
Entry = tuple[int, int, float, list[tuple[int, float]], list[tuple[int, float]]]


@torch.no_grad()
def held_out_tokens(session: Session, step: int) -> dict[str, Any] | None:
    """For tokens.json: every token's text, its KL(teacher‖student) and the five likeliest of each side.

    The entry of a token describes the distributions that predicted it, so the first token of a document has none.
    None without a teacher or held-out data. A collective of all processes, with the same result on each.
    """
    sequences, runner = session.evaluation, session.runner
    if session.config.teacher is None or sequences is None:
        return None
    chosen = _choose(sequences.documents)
    works = session.works(sequences, _with(sequences, chosen), Recipe(divergence=forward_kl()), 1.0, training=False)
    with ExitStack() as modes:
        for student in runner.students():
            modes.enter_context(evaluating(student))
        made = runner.forward([_showing(work, chosen) for work in works])
    own = [entry for entries in made for entry in entries] if runner.has_results else []
    everyone = gathered(own, None if runner.mesh is None else runner.mesh.everyone, session.device)
    entries = {(document, place): entry for each in everyone for document, place, *entry in each}
    documents = [_document(session, sequences.documents, document, entries) for document in chosen]
    return {"step": step, "documents": documents}


def _choose(documents: Documents) -> list[int]:
    """Some documents of a good length, the same ones in every run on this data."""
    long_enough = np.flatnonzero(documents.lengths_D >= min(TOKENS, documents.lengths_D.max()) // 2)
    ranked = sorted(long_enough.tolist(), key=lambda d: hashlib.sha256(documents.tokens(d).tobytes()).digest())
    return ranked[:DOCUMENTS]


def _with(sequences: PackedSequences, documents: list[int]) -> list[np.ndarray]:
    """The packed sequences that hold these documents, as micro-batches."""
    holding = (number for number in range(len(sequences)) if set(documents) & set(sequences.members(number).tolist()))
    return [np.array([number]) for number in holding]


def _document(
    session: Session, documents: Documents, document: int, entries: dict[tuple[int, int], list[Any]]
) -> dict[str, Any]:
    def texts(pairs: list[tuple[int, float]]) -> list[tuple[str, float]]:
        return [(session.tokenizer.decode([token]), round(probability, 6)) for token, probability in pairs]

    tokens = []
    for place, token in enumerate(documents.tokens(document)[:TOKENS].tolist()):
        kl, teacher, student = entries[document, place] if place else (None, [], [])
        tokens.append(
            {
                "text": session.tokenizer.decode([token]),
                "target": bool(documents.targets(document)[place]),
                "kl": kl,
                "teacher": texts(teacher),
                "student": texts(student),
            }
        )
    return {"source": documents.sources[document], "tokens": tokens}


@dataclass(frozen=True)
class _Shown:
    """What the output processor needs beside hidden states and head. index_C: the rows that are shown."""

    batch: Batch
    index_C: Tensor
    teacher: FullVocab


def _showing(work: Work, chosen: list[int]) -> Work:
    batch = work.tokens
    assert isinstance(batch, Batch)
    positions_T, document_T = batch.position_ids_BS.flatten(), batch.document_T
    shown_T = torch.isin(document_T, torch.tensor(chosen, device=document_T.device)) & (positions_T < TOKENS - 1)
    return replace(work, processor=_entries, context=partial(_shown, batch, shown_T.nonzero()[:, 0]))


def _shown(batch: Batch, index_C: Tensor, signal: Signal | None) -> _Shown:
    assert isinstance(signal, FullVocab)
    return _Shown(batch, index_C, FullVocab(signal.hidden_TE[index_C], signal.head))


def _entries(*, hidden_states: Tensor, head: OutputHead, context: _Shown, depth: int = 0) -> list[Entry]:
    """The output processor. Collectives of the ranks that share the vocabulary, which have the same rows."""
    batch, index_C, teacher = context.batch, context.index_C, context.teacher
    student = FullVocab(hidden_states.flatten(0, -2)[index_C], head)
    kl_C = linear_objective(student.hidden_TE, head, [Distill(teacher, forward_kl())]).per_token["forward_kl"]
    vocabulary = common_vocabulary([head, teacher.head])
    student_top = likeliest(student, vocabulary, head.shard)
    with torch.autocast(kl_C.device.type, enabled=False):
        teacher_top = likeliest(teacher, vocabulary, head.shard)
    documents, places = batch.document_T[index_C], batch.position_ids_BS.flatten()[index_C] + 1
    return list(zip(documents.tolist(), places.tolist(), kl_C.tolist(), teacher_top, student_top, strict=True))


def likeliest(signal: FullVocab, vocabulary: int, shard: VocabShard | None) -> list[list[tuple[int, float]]]:
    """The likeliest tokens of each row with their probabilities, from the logits that the objective itself sees."""
    dtype = operand_dtype(signal.hidden_TE, signal.head.weight_VD)
    projection = Projection(signal.head, vocabulary, dtype, shard)
    start = 0 if shard is None else shard.within(vocabulary)[0]
    made = []
    for hidden_CE in signal.hidden_TE.split(TOKENS) if len(signal.hidden_TE) else ():
        logits_CV = projection.logits(hidden_CE)
        best_CK, ids_CK = logits_CV.topk(min(TOP, logits_CV.shape[1]))
        missing = (0, TOP - best_CK.shape[1])  # on a rank with fewer rows of the vocabulary
        own = [pad(best_CK, missing, value=-torch.inf), pad(ids_CK + start, missing).to(best_CK.dtype)]
        all_RCS = Pieces(torch.cat([*own, logits_CV.logsumexp(1, keepdim=True)], 1), shard).wait()
        values_CS, ids_CS = (part.transpose(0, 1).flatten(1) for part in all_RCS[..., :-1].chunk(2, 2))
        best_CK, places_CK = values_CS.topk(min(TOP, vocabulary))
        probabilities_CK = (best_CK - all_RCS[..., -1].logsumexp(0)[:, None]).exp()
        pairs = zip(ids_CS.gather(1, places_CK).long().tolist(), probabilities_CK.tolist(), strict=True)
        made += [list(zip(*pair, strict=True)) for pair in pairs]
    return made
