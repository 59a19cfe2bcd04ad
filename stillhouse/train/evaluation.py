"""Held-out metrics per target token: cross-entropy, forward KL over the full vocabulary, agreement, entropies."""

from collections.abc import Iterator, Sequence

import numpy as np

from stillhouse.data import MicroBatch
from stillhouse.parallel import PairSignal, watchdog
from stillhouse.train.session import Session

#: metric keys of an evaluation, by the names that the objective gives the metrics
KEYS = {
    "cross_entropy": "eval/cross_entropy",
    "forward_kl": "eval/forward_kl",
    "agreement": "eval/agreement",
    "student_entropy": "eval/student_entropy",
    "teacher_entropy": "eval/teacher_entropy",
    "uld": "eval/uld",
}


def evaluate(session: Session) -> dict[str, float]:
    """Means over all target tokens of the held-out documents, always at temperature 1.

    They do not depend on the run's own objective. Without a teacher, the metrics that need one are absent. Without
    held-out data, the result is empty.
    """
    if session.evaluation is None:
        return {}
    watchdog.enter("an evaluation")
    sums = session.engine.evaluate(_parts(session))
    tokens = sums["tokens"]
    if "continuation" in sums:  # the rest of the forward KL of spans, at the rows of their later tokens
        sums["forward_kl"] += sums["continuation"]
    return {key: sums[name] / tokens for name, key in KEYS.items() if name in sums} | {"eval/tokens": tokens}


def _parts(session: Session) -> Iterator[tuple[Sequence[MicroBatch], Sequence[PairSignal]]]:
    """The held-out micro-batches with their signals. A part has one micro-batch for each data rank and stage."""
    sequences = session.evaluation
    assert sequences is not None
    mesh, stages = session.runner.mesh, session.runner.layout.stages
    together = 1 if mesh is None else mesh.degrees.data * stages
    budget = session.config.eval.micro_batch_tokens or session.config.train.micro_batch_tokens
    rows = max(1, budget // session.config.data.max_tokens)
    numbers = np.arange(len(sequences))
    micro_batches = [numbers[start : start + rows] for start in range(0, len(sequences), rows)]
    for start in range(0, len(micro_batches), together):
        part = session.shard(sequences.micro_batches(micro_batches[start : start + together]), training=False)
        yield part, session.source.request(part).result()
        del part
