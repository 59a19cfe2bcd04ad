"""Held-out metrics per target token: cross-entropy, forward KL over the full vocabulary, agreement, entropies."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stillhouse.data import MicroBatch
from stillhouse.engine.depths import acceptance, by_depth
from stillhouse.engine.engine import add_up
from stillhouse.objective import Signals
from stillhouse.objective.keys import CHUNK_TOKENS, WEIGHTS
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import watchdog
from stillhouse.run.session import Session

#: metric keys of an evaluation, by the names that the objective gives the metrics
KEYS = {
    "cross_entropy": "eval/cross_entropy",
    "forward_kl": "eval/forward_kl",
    "agreement": "eval/agreement",
    "student_entropy": "eval/student_entropy",
    "teacher_entropy": "eval/teacher_entropy",
    "uld": "eval/uld",
    "teacher_cross_entropy": "eval/teacher_cross_entropy",
}

#: metrics of one distribution at one temperature
ENTROPIES = ("student_entropy", "teacher_entropy")
#: metrics that are no part of a loss
DESCRIPTIONS = (*ENTROPIES, "agreement", "teacher_mass")


def evaluate(session: Session, *, of_teacher: bool = False) -> dict[str, float]:
    """Means over all target tokens of the held-out documents (see `Engine.evaluate`).

    Each of several sets has its own metrics, `eval/<name>/…`, besides those over the tokens of all sets. They do not
    depend on the run's own objective. Without a teacher, the metrics that need one are absent. Without
    held-out data, the result is empty. of_teacher: also the teacher's own cross-entropy, which the student's
    approaches, if there is one teacher whose signals are exact.
    """
    if session.evaluation is None:
        return {}
    watchdog.enter("an evaluation")
    names, sequences = list(session.evaluation.documents.reports), session.evaluation
    of_teacher = of_teacher and session.has_exact_teacher
    if not names:
        parts = _parts(session, np.arange(len(sequences)))
        return _metrics(session, session.engine.evaluate(parts, of_teacher=of_teacher))
    sets = [np.flatnonzero(sequences.set_S == number) for number in range(len(names))]
    sums = [session.engine.evaluate(_parts(session, numbers), of_teacher=of_teacher) for numbers in sets]
    metrics = _metrics(session, add_up(sums))
    for name, sums_of_part in zip(names, sums, strict=True):
        of_set = _metrics(session, sums_of_part)
        metrics |= {f"eval/{name}/{key.removeprefix('eval/')}": value for key, value in of_set.items()}
    return metrics


def _metrics(session: Session, sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of some held-out documents, from the sums over their target tokens."""
    temperatures = {store.signal.temperature or 1.0 for store in session.stores.values()}
    metrics = dict[str, float]()
    known = means(by_depth(sums)[0], session.spec, mixes_temperatures=len(temperatures) > 1)
    for of_teacher in ("", *(f"/{name}" for name in session.spec.teachers)):
        if f"continuation{of_teacher}" in known:  # the forward KL of spans at the rows of their later tokens
            known[f"forward_kl{of_teacher}"] += known[f"continuation{of_teacher}"]
        metrics |= {
            f"{key}{of_teacher}": known[name + of_teacher] for name, key in KEYS.items() if name + of_teacher in known
        }
    return metrics | acceptance(sums) | {"eval/tokens": sums["tokens"]}


def means(sums: Mapping[str, float], objective: ObjectiveSpec, *, mixes_temperatures: bool) -> dict[str, float]:
    """The metrics of a step or an evaluation per target token, under the names that the objective gives them.

    A metric of one of several teachers is `<name>/<teacher>`, per token that this teacher judges. `<name>` is then
    the mean over the teachers that report it: with their weights, or, if every token has one teacher, over tokens.
    mixes_temperatures: the teachers have different ones, so that entropies have no mean.
    """
    averages, of_one, weights = dict[str, float](), dict[str, float](), dict[str, float]()
    for name, value in sums.items():
        kind, _, teacher = name.partition("/")
        # a part of the loss is per token, as the loss is; what only describes the tokens is their mean, by weight
        count = WEIGHTS if kind.partition("#")[0] in DESCRIPTIONS and WEIGHTS in sums else "tokens"
        tokens = sums[count] or 1.0
        if kind in ("loss", "tokens", WEIGHTS, CHUNK_TOKENS) or (name == "student_entropy" and mixes_temperatures):
            continue
        if not teacher:
            averages[name] = value / tokens
            continue
        routed = sums.get(f"{count}/{teacher}")
        tokens_of_term = tokens if routed is None else routed
        share = objective.teachers[teacher].weight if routed is None else 1.0
        if tokens_of_term:
            of_one[name] = value / tokens_of_term
        if not (mixes_temperatures and kind in ENTROPIES):
            averages[kind] = averages.get(kind, 0.0) + share * value
            weights[kind] = weights.get(kind, 0.0) + share * tokens_of_term
    return {name: value / (weights.get(name) or 1.0) for name, value in averages.items()} | of_one


def _parts(session: Session, numbers: np.ndarray) -> Iterator[tuple[Sequence[MicroBatch], Sequence[Signals]]]:
    """These held-out sequences as micro-batches with their signals. A part has one for each data rank and stage."""
    sequences = session.evaluation
    assert sequences is not None
    layout = session.engine.layout
    together = layout.degrees.data * layout.stages
    budget = session.eval_config.micro_batch_tokens or session.train_config.micro_batch_tokens
    rows = max(1, budget // sequences.max_tokens)
    micro_batches = [numbers[start : start + rows] for start in range(0, len(numbers), rows)]
    for start in range(0, len(micro_batches), together):
        part = session.shard(sequences.micro_batches(micro_batches[start : start + together]), training=False)
        yield part, session.source.request(part).result()
        del part
