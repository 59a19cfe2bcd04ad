"""Compares teacher and student on a few held-out documents, token by token, for tokens.json.

C rows of a micro-batch that are shown; E hidden size of a model; V vocabulary; K likeliest tokens; R ranks over which
the vocabulary is sharded; S values per row.
"""

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from stillhouse.data import Documents, MicroBatch, PackedSequences
from stillhouse.objective import Distill, FullVocab, OutputHead, Signal, VocabShard, forward_kl, linear_objective
from stillhouse.objective.head import Projection, common_vocabulary, operand_dtype
from stillhouse.objective.vocab import AsyncAllGather
from stillhouse.train.files import gather_from_ranks
from stillhouse.train.session import Session

DOCUMENTS = 4
TOKENS = 256
TOP = 5

#: for a row: the document, the position of the token that it predicts, the KL, and the likeliest tokens of the
#: teacher and of the student
Entry = tuple[int, int, float, list[tuple[int, float]], list[tuple[int, float]]]


@torch.no_grad()
def held_out_tokens(session: Session, step: int) -> dict[str, Any] | None:
    """The content of tokens.json: for every token its text, its KL(teacher‖student), and the five likeliest tokens of
    teacher and student.

    A token's divergence and likeliest tokens describe the distributions that predicted the token, so the first token
    of a document has none.
    Returns None without held-out data, and unless there is one teacher, of the full vocabulary. A collective of all
    processes, with the same result on each.
    """
    sequences = session.evaluation
    if sequences is None or not session.has_dense_teacher:
        return None
    chosen = _choose(sequences.documents)
    micro_batches = session.shard(sequences.micro_batches(_sequences_with(sequences, chosen)), training=False)
    signals = session.source.request(micro_batches).result()
    found = session.engine.process(_entries, partial(_shown_rows, chosen), micro_batches, signals)
    own = [entry for entries in found for entry in entries]
    all_ranks = gather_from_ranks(own, session.runner.mesh)
    entries = {(document, position): entry for each in all_ranks for document, position, *entry in each}
    documents = [_document(session, sequences.documents, document, entries) for document in chosen]
    return {"step": step, "documents": documents}


def _choose(documents: Documents) -> list[int]:
    """Choose up to `DOCUMENTS` sufficiently long documents, the same ones in every run on this data."""
    long_enough = np.flatnonzero(documents.lengths_D >= min(TOKENS, documents.lengths_D.max()) // 2)
    ranked = sorted(long_enough.tolist(), key=lambda d: hashlib.sha256(documents.tokens(d).tobytes()).digest())
    return ranked[:DOCUMENTS]


def _sequences_with(sequences: PackedSequences, documents: list[int]) -> list[np.ndarray]:
    """The packed sequences that contain these documents, one per micro-batch."""
    holding = (number for number in range(len(sequences)) if set(documents) & set(sequences.members(number).tolist()))
    return [np.array([number]) for number in holding]


def _document(
    session: Session, documents: Documents, document: int, entries: dict[tuple[int, int], list[Any]]
) -> dict[str, Any]:
    def texts(pairs: list[tuple[int, float]]) -> list[tuple[str, float]]:
        return [(session.tokenizer.decode([token]), round(probability, 6)) for token, probability in pairs]

    tokens = []
    for position, token in enumerate(documents.tokens(document)[:TOKENS].tolist()):
        kl, teacher, student = entries[document, position] if position else (None, [], [])
        tokens.append(
            {
                "text": session.tokenizer.decode([token]),
                "target": bool(documents.targets(document)[position]),
                "kl": kl,
                "teacher": texts(teacher),
                "student": texts(student),
            }
        )
    return {"source": documents.sources[document], "tokens": tokens}


@dataclass(frozen=True)
class _ShownRows:
    """The output processor's inputs besides hidden states and head. index_C: the rows that are shown."""

    micro_batch: MicroBatch
    index_C: Tensor
    teacher: FullVocab


def _shown_rows(chosen: list[int], micro_batch: MicroBatch, signal: Signal | None) -> _ShownRows:
    assert isinstance(signal, FullVocab)
    positions_T, document_T = micro_batch.position_ids_BS.flatten(), micro_batch.document_T
    shown_T = torch.isin(document_T, torch.tensor(chosen, device=document_T.device)) & (positions_T < TOKENS - 1)
    index_C = shown_T.nonzero()[:, 0]
    return _ShownRows(micro_batch, index_C, FullVocab(signal.hidden_TE[index_C], signal.head))


def _entries(*, hidden_states: Tensor, head: OutputHead, context: _ShownRows, depth: int = 0) -> list[Entry]:
    """The output processor. Calls collectives of the ranks that share the vocabulary, which have the same C rows."""
    micro_batch, index_C, teacher = context.micro_batch, context.index_C, context.teacher
    student = FullVocab(hidden_states.flatten(0, -2)[index_C], head)
    kl_C = linear_objective(student.hidden_TE, head, [Distill(teacher, forward_kl())]).per_token["forward_kl"]
    vocabulary = common_vocabulary([head, teacher.head])
    student_top = likeliest(student, vocabulary, head.shard)
    with torch.autocast(kl_C.device.type, enabled=False):
        teacher_top = likeliest(teacher, vocabulary, head.shard)
    documents, positions = micro_batch.document_T[index_C], micro_batch.position_ids_BS.flatten()[index_C] + 1
    return list(zip(documents.tolist(), positions.tolist(), kl_C.tolist(), teacher_top, student_top, strict=True))


def likeliest(signal: FullVocab, vocabulary: int, shard: VocabShard | None) -> list[list[tuple[int, float]]]:
    """The likeliest tokens of each row with their probabilities, from the same logits that the objective uses."""
    dtype = operand_dtype(signal.hidden_TE, signal.head.weight_VD)
    projection = Projection(signal.head, vocabulary, dtype, shard)
    start = 0 if shard is None else shard.within(vocabulary)[0]
    tops = []
    for hidden_CE in signal.hidden_TE.split(TOKENS) if len(signal.hidden_TE) else ():
        logits_CV = projection.logits(hidden_CE)
        best_CK, ids_CK = logits_CV.topk(min(TOP, logits_CV.shape[1]))
        missing = (0, TOP - best_CK.shape[1])  # a rank may have fewer than TOP rows of the vocabulary
        own = [pad(best_CK, missing, value=-torch.inf), pad(ids_CK + start, missing).to(best_CK.dtype)]
        all_RCS = AsyncAllGather(torch.cat([*own, logits_CV.logsumexp(1, keepdim=True)], 1), shard).wait()
        values_CS, ids_CS = (part.transpose(0, 1).flatten(1) for part in all_RCS[..., :-1].chunk(2, 2))
        best_CK, columns_CK = values_CS.topk(min(TOP, vocabulary))
        probabilities_CK = (best_CK - all_RCS[..., -1].logsumexp(0)[:, None]).exp()
        pairs = zip(ids_CS.gather(1, columns_CK).long().tolist(), probabilities_CK.tolist(), strict=True)
        tops += [list(zip(*pair, strict=True)) for pair in pairs]
    return tops
