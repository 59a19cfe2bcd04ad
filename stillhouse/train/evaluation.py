"""Held-out figures: cross-entropy, forward KL over the full vocabulary, agreement, entropies; per target token."""

from collections.abc import Iterator

import torch

from stillhouse.data import Batch
from stillhouse.models import evaluating
from stillhouse.objective import ObjectiveOutput
from stillhouse.objective.divergence import forward_kl
from stillhouse.objective.recipe import Recipe
from stillhouse.train.session import Session
from stillhouse.train.step import ObjectiveContext, objective_processor, summed_metrics

#: metric keys of an evaluation, from the names that the objective gives them
KEYS = {
    "cross_entropy": "eval/cross_entropy",
    "forward_kl": "eval/forward_kl",
    "agreement": "eval/agreement",
    "student_entropy": "eval/student_entropy",
    "teacher_entropy": "eval/teacher_entropy",
}


@torch.no_grad()
def evaluate(session: Session) -> dict[str, float]:
    """Means over all target tokens of the held-out documents, whatever the run's own objective is.

    Always at temperature 1. Without a teacher there is cross-entropy alone. Empty without held-out data.
    """
    recipe = Recipe(cross_entropy=1.0, divergence=None if session.teacher is None else forward_kl())
    outputs: list[ObjectiveOutput] = []
    with evaluating(session.student), session.precision():
        for batch in _batches(session):
            signal = None if session.teacher is None else session.teacher.signal(batch)
            context = ObjectiveContext(
                recipe.terms(batch.labels_T, signal), batch, 1.0, session.config.objective.chunk_tokens
            )
            outputs.append(
                session.student(
                    batch.input_ids_BS, batch.position_ids_BS, processor=objective_processor, context=context
                )
            )
    if not outputs:
        return {}
    sums = summed_metrics(outputs)
    tokens = sums["tokens"]
    return {key: sums[name] / tokens for name, key in KEYS.items() if name in sums} | {"eval/tokens": tokens}


def _batches(session: Session) -> Iterator[Batch]:
    sequences = session.evaluation
    if sequences is None:
        return
    budget = session.config.eval.micro_batch_tokens or session.config.train.micro_batch_tokens
    rows = max(1, budget // session.config.data.max_tokens)
    for start in range(0, len(sequences), rows):
        yield sequences.batch(range(start, min(start + rows, len(sequences)))).to(session.device)
