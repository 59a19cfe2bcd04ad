"""Proves after each update that servers write with the weights that they were given.

A server's own word proves nothing: a load that changed nothing, half a load, or the files of another version have the
right label, too. So each server completes a few of the run's prompts after an update, and the log-probabilities that
it gives are compared with those that the trainer computes itself.
"""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from stillhouse.config import RolloutConfig
from stillhouse.data import Documents
from stillhouse.generation import Completion, Sample
from stillhouse.objective.keys import OLD_LOG_PROBS
from stillhouse.parallel import ShardedMicroBatches
from stillhouse.run.session import Session
from stillhouse.serving.client.engine_proof import PROBES, ROUNDED
from stillhouse.signals import SignalsLostError

#: a difference of log-probabilities that rounding stays below where both sides compute in float32, in the same way
_EXACT = 1e-3
#: probes are the shortest of so many prompts
_CHOICE = 256


def probe_prompts(prompts: Documents) -> list[int]:
    """The numbers of the prompts that servers complete."""
    return [int(number) for number in np.argsort(prompts.lengths_D[:_CHOICE], kind="stable")[:PROBES]]


def probe_samples(numbers: Sequence[int], by_server: Mapping[str, Sequence[Completion]]) -> list[Sample]:
    """What servers have written for these prompts, one server after the other."""
    completions = [
        (prompt, completion)
        for completions_of_server in by_server.values()
        for prompt, completion in zip(numbers, completions_of_server, strict=True)
    ]
    return [
        Sample(at, prompt, completion, np.ones(len(completion.ids_N), dtype=bool))
        for at, (prompt, completion) in enumerate(completions)
    ]


def gaps_of_servers(
    session: Session, micro_batches: ShardedMicroBatches, servers: int, probes: int
) -> list[list[float]]:
    """For each server, how much each of its log-probabilities differs from the student's, in nats.

    micro_batches: of `probe_samples`, of which each server has so many probes. A collective of all processes.
    """
    entries: list[list[float]] = []
    for micro_batch, log_probs_T in zip(micro_batches, session.engine.log_probs(micro_batches), strict=False):
        rows = micro_batch.valid_index
        gaps = (log_probs_T - micro_batch.per_token[OLD_LOG_PROBS])[rows].abs()
        entries += torch.stack([(micro_batch.document_T[rows] // probes).to(gaps.dtype), gaps], 1).tolist()
    all_entries = [entry for rank in session.ranks.gather(entries) for entry in rank]
    return [[gap for server, gap in all_entries if server == number] for number in range(servers)]


def rounding(session: Session, rollout: RolloutConfig) -> float:
    """So many nats can be rounding. What other engines compute in, they do not tell; ours has the student's dtype."""
    is_exact = (
        rollout.engine == "stillhouse"
        and session.engine.autocast is None
        and next(session.student.parameters()).dtype == torch.float32
        and torch.get_float32_matmul_precision() == "highest"
    )
    return _EXACT if is_exact else ROUNDED


def require_weights_in_use(version: int, gaps: Mapping[str, Sequence[float]], most: float) -> None:
    """Raise SignalsLostError for a server whose log-probabilities are those of other weights."""
    for url, gaps_of_server in gaps.items():
        median = statistics.median(gaps_of_server)
        if not median <= most:  # a NaN is none
            raise SignalsLostError(
                f"{url} says that it writes with version {version}, and its log-probabilities are those of other "
                f"weights: they differ from the trainer's by {median:.3g} nats (the median of {len(gaps_of_server)} "
                f"tokens) and rounding is at most {most:g}: expected a server that reads the folder "
                "that it is given, loads all of it, and computes the same model"
            )
