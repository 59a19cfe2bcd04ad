"""Held-out documents: their metrics, and a comparison of teacher and student on a few of them, token by token.

Dimensions: C shown rows of a micro-batch, or some of these rows; E hidden size of a model; V vocabulary; K tokens
with the largest values.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillhouse.data import Documents, MicroBatch, PackedSequences
from stillhouse.data.media import shown_media, shown_positions
from stillhouse.engine.engine import add_up
from stillhouse.loops.session import Data, Models
from stillhouse.loops.step_metrics import evaluation_metrics
from stillhouse.models.processors import DistillTargets
from stillhouse.objective import (
    TEACHER,
    Distill,
    FullVocab,
    OutputHead,
    Signals,
    Term,
    VocabShard,
    forward_kl,
    linear_objective,
    logits_objective,
)
from stillhouse.objective.divergence import Divergence
from stillhouse.objective.head import Projection, common_vocabulary, operand_dtype
from stillhouse.objective.metrics import unique_names
from stillhouse.objective.sampled_tokens import DATASET
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.objective.vocab import AsyncAllGather, largest
from stillhouse.output.records import HeldOutDocument, HeldOutTokens, TermAtToken, Token
from stillhouse.parallel import watchdog

DOCUMENTS = 4
TOKENS = 256
TOP = 5
#: for each term, this many logits that a gradient step raises most are shown, and as many that it lowers most
PUSHED = 3
#: the number of rows whose logits are computed at once
ROWS = 64

#: token ids with their probabilities or gradients, the largest first
Ranked = list[tuple[int, float]]
#: for one term of the objective and one row: the value in nats; the norm of the gradient of scale · value with
#: respect to the student's logits; and the entries of this gradient that raise a logit most and lower a logit most
OfTerm = tuple[float, float, Ranked, Ranked]
#: for each row: the document, the position of the predicted token, the KL, the most probable tokens of the teacher
#: and of the student, and the terms by name
Entry = tuple[int, int, float, Ranked, Ranked, dict[str, OfTerm]]


def held_out_metrics(
    models: Models,
    sequences: PackedSequences,
    spec: ObjectiveSpec,
    micro_batch_tokens: int,
    *,
    with_teacher: bool = False,
    divergence: Divergence | None = None,
) -> dict[str, float]:
    """Return means over all target tokens of the held-out documents (see `Engine.evaluate`).

    If there are several sets, each set also has metrics `eval/<name>/…`. No metric depends on the run's objective.
    Metrics that need a teacher are absent if there is none.

    spec: the run's objective, which names the teachers.
    with_teacher: also report the cross-entropy of the teacher, to compare it with the student's. This needs a single
        teacher with exact signals, because sparse signals may lack the label.
    divergence: the divergence from the teacher, None for the forward KL. A sum of divergences gives the metric of
        each of them that has a name in `evaluation_metrics`.
    """
    watchdog.enter("an evaluation")
    names = list(sequences.documents.reports)
    sets = [np.flatnonzero(sequences.set_S == number) for number in range(len(names))]
    with_teacher = with_teacher and models.has_exact_teacher
    sums = [
        models.engine.evaluate(
            _parts(models, sequences, numbers, micro_batch_tokens), with_teacher=with_teacher, divergence=divergence
        )
        for numbers in sets or [np.arange(len(sequences))]
    ]
    metrics = evaluation_metrics(add_up(sums), spec, models.signal_temperatures)
    for name, sums_of_set in zip(names, sums, strict=False):  # a single set has no name
        set_metrics = evaluation_metrics(sums_of_set, spec, models.signal_temperatures)
        metrics |= {f"eval/{name}/{key.removeprefix('eval/')}": value for key, value in set_metrics.items()}
    return metrics


def _parts(
    models: Models, sequences: PackedSequences, numbers: np.ndarray, micro_batch_tokens: int
) -> Iterator[tuple[Sequence[MicroBatch], Sequence[Signals]]]:
    """Yield these sequences as (micro-batches, signals). Each part has one micro-batch per data rank and stage."""
    layout = models.engine.student.layout
    together = layout.degrees.data * layout.stages
    rows = max(1, micro_batch_tokens // sequences.max_tokens)
    micro_batches = [numbers[start : start + rows] for start in range(0, len(numbers), rows)]
    for start in range(0, len(micro_batches), together):
        part = models.shard(sequences.micro_batches(micro_batches[start : start + together]), training=False)
        yield part, models.source.request(part).result()
        del part


def in_shown_order(documents: Documents, numbers: Iterable[int]) -> list[int]:
    """Sort documents by a hash of their tokens, so that every run on the same data shows the same documents."""
    return sorted(numbers, key=lambda number: hashlib.sha256(documents.tokens(number).tobytes()).digest())


@torch.no_grad()
def held_out_tokens(models: Models, data: Data, spec: ObjectiveSpec, step: int) -> HeldOutTokens | None:
    """Return the content of tokens.json. For every token, it has the text, KL(teacher‖student), the five most
    probable tokens of teacher and student and, if the token is a target, the gradient of each term of the objective.

    These values describe the distributions that predicted the token, so the first token of a document has no values.
    Terms that need the student's own completions are omitted. A collective of all processes, with the same result on
    each process. Returns None if there is no held-out data, or if the run does not have exactly one teacher with the
    full vocabulary.
    """
    sequences = data.evaluation
    if sequences is None or not models.has_exact_teacher:
        return None
    lengths_D = sequences.documents.lengths_D
    long_enough = np.flatnonzero(lengths_D >= min(TOKENS, lengths_D.max()) // 2)
    chosen = in_shown_order(sequences.documents, long_enough.tolist())[:DOCUMENTS]
    members = (sequences.members(number).tolist() for number in range(len(sequences)))
    with_chosen = [np.array([number]) for number, documents in enumerate(members) if set(chosen) & set(documents)]
    micro_batches = models.shard(sequences.micro_batches(with_chosen), training=False)
    signals = models.source.request(micro_batches).result()
    ids = {document: sequences.documents.tokens(document) for document in chosen}
    shown = {document: shown_positions(of, data.media_processor)[:TOKENS] for document, of in ids.items()}
    processor = _ShownTokens(shown, _without_rollouts(spec))
    results = models.engine.process(processor, micro_batches, signals)
    all_ranks = models.ranks.gather([entry for entries in results for entry in entries])
    entries = {(document, position): entry for part in all_ranks for document, position, *entry in part}
    documents = [
        _document(data, sequences.documents, document, positions.tolist(), entries)
        for document, positions in shown.items()
    ]
    return HeldOutTokens(step, documents)


def _document(
    data: Data, documents: Documents, document: int, positions: list[int], entries: dict[tuple[int, int], list[Any]]
) -> HeldOutDocument:
    def texts(pairs: Ranked) -> list[tuple[str, float]]:
        rounded = [(token, round(value, 6)) for token, value in pairs]
        return [(data.tokenizer.decode([token]), value) for token, value in rounded if value]

    tokens = []
    ids, targets = documents.tokens(document).tolist(), documents.targets(document).tolist()
    for position in positions:
        kl, teacher, student, terms = entries[document, position] if position else (None, [], [], {})
        by_name = {
            name: TermAtToken(value, norm, texts(raised), texts(lowered))
            for name, (value, norm, raised, lowered) in terms.items()
        }
        text = data.tokenizer.decode([ids[position]])
        tokens.append(Token(text, targets[position], kl, texts(teacher), texts(student), by_name))
    shown = shown_media(documents.media_of(document), data.media_processor)
    return HeldOutDocument(documents.sources[document], tokens, **shown)


def _without_rollouts(spec: ObjectiveSpec) -> ObjectiveSpec | None:
    """The objective of the dataset's documents without terms that need rollouts, or None if no term is left."""
    if spec.by_origin:
        return _without_rollouts(spec.by_origin[DATASET]) if DATASET in spec.by_origin else None
    if not spec.needs_rollouts:
        return spec
    rest = replace(spec, sampled_kl=None, policy_gradient=None, teacher_kl=0.0, discount=0.0)
    return rest if rest.cross_entropy or rest.divergence or rest.entropy else None


@dataclass(frozen=True)
class _ShownTokens:
    """The output processor that computes the values of the shown tokens.

    It calls collectives of the ranks that share the vocabulary. These ranks have the same C rows.

    shown: the positions of the shown tokens of each shown document.
    objective: the terms whose gradients are shown.
    """

    shown: Mapping[int, np.ndarray]
    objective: ObjectiveSpec | None

    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: DistillTargets, depth: int = 0
    ) -> list[Entry]:
        assert context.document_T is not None
        assert context.position_ids_BS is not None
        assert context.weights_T is not None
        positions_T, document_T = context.position_ids_BS.flatten(), context.document_T
        is_shown_T = torch.zeros_like(document_T, dtype=torch.bool)
        for document, shown in self.shown.items():
            predicts_shown_T = torch.isin(positions_T + 1, torch.from_numpy(shown).to(positions_T.device))
            is_shown_T |= (document_T == document) & predicts_shown_T
        index_C = is_shown_T.nonzero()[:, 0]
        student = FullVocab(hidden_states.flatten(0, -2)[index_C], head)
        (signal,) = context.signals.values()
        with signal.opened(head) as exact:
            assert isinstance(exact, FullVocab)
            teacher = exact.rows(index_C)
            kl_C = linear_objective(student.hidden_TE, head, [Distill(teacher, forward_kl())]).per_token["forward_kl"]
            vocabulary = common_vocabulary([head, teacher.head])
            student_top = top_tokens(student, vocabulary, head.shard)
            terms: list[dict[str, OfTerm]] = [{} for _ in range(len(index_C))]
            if self.objective is not None:
                labels_C, weights_C = context.labels_T[index_C], context.weights_T[index_C]
                terms = gradients_by_term(self.objective, student, teacher, labels_C, weights_C)
            with torch.autocast(kl_C.device.type, enabled=False):
                teacher_top = top_tokens(teacher, vocabulary, head.shard)
        documents, positions = document_T[index_C].tolist(), (positions_T[index_C] + 1).tolist()
        return list(zip(documents, positions, kl_C.tolist(), teacher_top, student_top, terms, strict=True))


def gradients_by_term(
    spec: ObjectiveSpec, student: FullVocab, teacher: FullVocab, labels_C: Tensor, weights_C: Tensor
) -> list[dict[str, OfTerm]]:
    """For each row, the value of each term and its gradient with respect to the student's logits. The dict of a row
    with weight 0 is empty.

    The gradient is that of weight · scale · value; a training step also divides by the number of target tokens.
    """
    head = student.head
    vocabulary = common_vocabulary([head, teacher.head])  # also used for terms that need no teacher
    shard = head.shard
    if shard is not None and vocabulary < shard.rows:
        shard = replace(shard, start=shard.within(vocabulary)[0], stop=shard.within(vocabulary)[1])
    projection = Projection(head, vocabulary, operand_dtype(student.hidden_TE, head.weight_VD), shard)
    by_row: list[dict[str, OfTerm]] = []
    for rows in torch.arange(len(labels_C), device=labels_C.device).split(ROWS) if len(labels_C) else ():
        logits_CV = projection.logits(student.hidden_TE[rows])
        terms = spec.terms(labels_C[rows], {TEACHER: teacher.rows(rows)})
        by_term = [_gradient(term, logits_CV, weights_C[rows], shard) for term in terms]
        names = unique_names(terms)
        counts = (weights_C[rows] != 0).tolist()
        by_row += [
            dict(zip(names, row, strict=True)) if counted else {}
            for counted, row in zip(counts, zip(*by_term, strict=True), strict=True)
        ]
    return by_row


def _gradient(term: Term, logits_CV: Tensor, weights_C: Tensor, shard: VocabShard | None) -> list[OfTerm]:
    """The value and the gradient of a term for each row. logits_CV: this rank's columns of the logits."""
    with torch.enable_grad(), torch.autocast(logits_CV.device.type, enabled=False):
        leaf_CV = logits_CV.detach().requires_grad_()
        output = logits_objective(leaf_CV, [term], shard=shard, weights_T=weights_C)
        (gradient_CV,) = torch.autograd.grad(output.loss, leaf_CV)
    norms_C = AsyncAllGather(gradient_CV.square().sum(1, keepdim=True), shard).wait().sum(0)[:, 0].sqrt()
    count = min(PUSHED, logits_CV.shape[1] if shard is None else shard.rows)
    raised, lowered = (
        [[(token, value) for token, value in row if value > 0] for row in _ranked(signed_CV, count, shard)]
        for signed_CV in (-gradient_CV, gradient_CV)
    )
    return list(zip(output.per_token[term.name].tolist(), norms_C.tolist(), raised, lowered, strict=True))


def top_tokens(signal: FullVocab, vocabulary: int, shard: VocabShard | None) -> list[Ranked]:
    """Return each row's `TOP` tokens with their probabilities, from the same logits that the objective uses."""
    dtype = operand_dtype(signal.hidden_TE, signal.head.weight_VD)
    projection = Projection(signal.head, vocabulary, dtype, shard)
    tops: list[Ranked] = []
    for hidden_CE in signal.hidden_TE.split(ROWS) if len(signal.hidden_TE) else ():
        logits_CV = projection.logits(hidden_CE)
        normalizers_RC1 = AsyncAllGather(logits_CV.logsumexp(1, keepdim=True), shard).wait()
        log_probs_CV = logits_CV - normalizers_RC1.logsumexp(0)
        tops += _ranked(log_probs_CV.exp(), min(TOP, vocabulary), shard)
    return tops


def _ranked(values_CV: Tensor, k: int, shard: VocabShard | None) -> list[Ranked]:
    values_CK, ids_CK = largest(values_CV, k, shard)
    return [list(zip(*row, strict=True)) for row in zip(ids_CK.tolist(), values_CK.tolist(), strict=True)]
