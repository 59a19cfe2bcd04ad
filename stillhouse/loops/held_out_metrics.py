"""Held-out metrics per target token: cross-entropy, forward KL over the full vocabulary, agreement, entropies."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from stillhouse.data import Documents, MicroBatch, PackedSequences
from stillhouse.engine.engine import add_up
from stillhouse.loops.session import Models
from stillhouse.loops.step_metrics import evaluation_metrics
from stillhouse.objective import Signals
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import watchdog


def held_out_metrics(
    models: Models,
    sequences: PackedSequences,
    spec: ObjectiveSpec,
    micro_batch_tokens: int,
    *,
    with_teacher: bool = False,
) -> dict[str, float]:
    """Return means over all target tokens of the held-out documents (see `Engine.evaluate`).

    If there are several sets, each set also has its own metrics `eval/<name>/…`. No metric depends on the run's
    objective. Without a teacher, the metrics that need a teacher are absent.

    spec: the run's objective, which names the teachers and has the temperature of `uld`.
    with_teacher: also report the cross-entropy of the teacher, to compare it with the student's. This needs a single
    teacher with exact signals, because sparse signals may lack the label.
    """
    watchdog.enter("an evaluation")
    names = list(sequences.documents.reports)
    sets = [np.flatnonzero(sequences.set_S == number) for number in range(len(names))]
    with_teacher = with_teacher and models.has_exact_teacher
    sums = [
        models.engine.evaluate(_parts(models, sequences, numbers, micro_batch_tokens), with_teacher=with_teacher)
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
    """Yield these sequences as (micro-batches, signals), with one micro-batch per data rank and stage at a time."""
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
