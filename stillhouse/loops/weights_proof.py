"""Checks after each update that servers generate with the new weights.

A server's version label proves nothing: a server may report it even if the load changed nothing, loaded only a part,
or loaded the files of another version. So each server completes a few of the run's prompts after an update, and its
log-probabilities are compared with the trainer's.
"""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from stillhouse.config.servers import server_kinds
from stillhouse.data import Documents
from stillhouse.loops.session import Models
from stillhouse.models.processors import cross_entropy
from stillhouse.objective.metric_keys import OLD_LOG_PROBS
from stillhouse.parallel import ShardedMicroBatches
from stillhouse.rollout import Completion, Sample
from stillhouse.rollout.engines import PROBES, ROUNDED
from stillhouse.signals import SignalsLostError

#: the largest rounding difference, in nats, if server and trainer compute in float32, in the same way
_EXACT = 1e-3
#: the probes are the shortest ones among this number of prompts
_CHOICE = 256


def probe_prompts(prompts: Documents) -> list[int]:
    """Return the numbers of the prompts that servers complete as probes; with media, if a prompt has some."""
    numbers = np.arange(len(prompts))
    if prompts.has_media:
        assert prompts.media is not None
        numbers = np.flatnonzero(np.diff(prompts.media.offsets))
    numbers = numbers[:_CHOICE]
    return numbers[np.argsort(prompts.lengths_D[numbers], kind="stable")[:PROBES]].tolist()


def probe_samples(prompts: Documents, by_server: Mapping[str, Sequence[Completion]]) -> list[Sample]:
    """Return the samples that servers generated for the probes among these prompts, server by server."""
    probes = [
        (number, completion)
        for completions in by_server.values()
        for number, completion in zip(probe_prompts(prompts), completions, strict=True)
    ]
    return [
        Sample(at, number, completion, np.ones(len(completion.ids_N), dtype=bool))
        for at, (number, completion) in enumerate(probes)
    ]


def require_weights_in_use(
    models: Models,
    prompts: Documents,
    engine: str,
    version: int,
    urls: Sequence[str],
    micro_batches: ShardedMicroBatches,
) -> float:
    """Raise SignalsLostError if the log-probabilities of a server come from other weights.

    Returns the largest difference in nats that rounding can cause. A collective of all processes.

    prompts: of the run. engine: `rollout.engine`. micro_batches: those of the servers' `probe_samples`.
    """
    rounding, gaps_by_server = (
        _rounding(models, engine),
        _gaps_by_server(models, micro_batches, len(probe_prompts(prompts))),
    )
    for number, url in enumerate(urls):
        gaps = gaps_by_server.get(number)
        if not gaps:
            raise SignalsLostError(f"{url} has generated no token for the probes of its weights: expected some")
        median = statistics.median(gaps)
        if not median <= rounding:  # also true for NaN
            raise SignalsLostError(
                f"{url} says that it generates with version {version}, and its log-probabilities are those of other "
                f"weights: they differ from the trainer's by {median:.3g} nats (the median of {len(gaps)} "
                f"tokens), and rounding is at most {rounding:g}: expected a server that reads the folder "
                "that it is given, loads all of it, and computes the same model"
            )
    return rounding


def _gaps_by_server(models: Models, micro_batches: ShardedMicroBatches, probes: int) -> dict[int, list[float]]:
    """Return, by server number, the differences between the server's log-probabilities and the student's, in nats."""
    entries = list[list[float]]()
    outputs = models.engine.process(cross_entropy(), micro_batches, [{}] * len(micro_batches))
    for micro_batch, output in zip(micro_batches, outputs, strict=False):
        rows = micro_batch.valid_index
        gaps = (-output.per_token["cross_entropy"] - micro_batch.per_token[OLD_LOG_PROBS])[rows].abs()
        entries += torch.stack([(micro_batch.document_T[rows] // probes).to(gaps.dtype), gaps], 1).tolist()
    gaps_by_server: dict[int, list[float]] = {}
    for entries_of_rank in models.ranks.gather(entries):
        for server, gap in entries_of_rank:
            gaps_by_server.setdefault(int(server), []).append(gap)
    return gaps_by_server


def _rounding(models: Models, engine: str) -> float:
    """Return the largest rounding difference in nats. Only `stillhouse serve` is known to round like the trainer."""
    is_exact = (
        server_kinds()[engine].rounds_as_here
        and models.autocast is None
        and next(models.student.parameters()).dtype == torch.float32
        and torch.get_float32_matmul_precision() == "highest"
    )
    return _EXACT if is_exact else ROUNDED
