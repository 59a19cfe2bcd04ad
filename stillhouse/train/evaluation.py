"""Held-out figures: cross-entropy, forward KL over the full vocabulary, agreement, entropies; per target token."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import torch

from stillhouse.data import PackedSequences
from stillhouse.models import evaluating
from stillhouse.objective import ObjectiveOutput
from stillhouse.objective.divergence import forward_kl
from stillhouse.objective.recipe import Recipe
from stillhouse.parallel import watchdog
from stillhouse.train.session import Session

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
    sequences = session.evaluation
    if sequences is None:
        return {}
    watchdog.enter("an evaluation")
    recipe = Recipe(cross_entropy=1.0, divergence=None if session.config.teacher is None else forward_kl())
    outputs: list[ObjectiveOutput] = []
    with ExitStack() as modes:
        for student in session.runner.students():
            modes.enter_context(evaluating(student))
        for rows in _rows(session, sequences):
            outputs += session.runner.forward(session.works(sequences, rows, recipe, 1.0, training=False))
    sums = session.totals(outputs)
    tokens = sums["tokens"]
    return {key: sums[name] / tokens for name, key in KEYS.items() if name in sums} | {"eval/tokens": tokens}


def _rows(session: Session, sequences: PackedSequences) -> Iterator[list[np.ndarray]]:
    """Micro-batches' sequences, as many at a time as keep all processes at work."""
    mesh, stages = session.runner.mesh, session.runner.layout.stages
    together = 1 if mesh is None else mesh.degrees.data * stages
    budget = session.config.eval.micro_batch_tokens or session.config.train.micro_batch_tokens
    rows = max(1, budget // session.config.data.max_tokens)
    numbers = np.arange(len(sequences))
    micro_batches = [numbers[start : start + rows] for start in range(0, len(sequences), rows)]
    for start in range(0, len(micro_batches), together):
        yield micro_batches[start : start + together]
