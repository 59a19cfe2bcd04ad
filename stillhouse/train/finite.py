"""Stops the run at a loss or gradient that is not finite, before it changes a weight, and reports its origin.

All processes of a layout take part in the search, and all get the same findings.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from stillhouse.data import MicroBatch, PackedMicroBatches, PackedSequences
from stillhouse.objective import ObjectiveOutput
from stillhouse.parallel import ShardedMicroBatches, gathered, is_first
from stillhouse.parallel.gradients import local
from stillhouse.train.engine import StepOutput
from stillhouse.train.session import Session

#: most sources of samples that an error names
_NAMED = 5


def stop_unless_finite(
    session: Session, step: int, micro_batches: ShardedMicroBatches, made: StepOutput, norm: float
) -> None:
    """Raise ValueError if the step's loss or gradient norm is NaN or infinite. The weights are unchanged.

    step: its number, counted from 1. made, norm: the output and the gradient norm of these micro-batches.
    """
    loss = made.sums["loss"]
    if math.isfinite(loss) and math.isfinite(norm):
        return
    packed = session.plan.micro_batches(session.train, step - 1)
    findings = _losses(session, micro_batches, made.own) or _gradients(session, packed)
    session.engine.zero_grad()
    where = "; ".join(findings) or "in no single micro-batch: the sum over them overflowed"
    what = "loss" if not math.isfinite(loss) else "gradient"
    if not is_first():
        raise ValueError(f"step {step}: the {what} is not finite; rank 0 says where it came from")
    raise ValueError(
        f"step {step}: the {what} is not finite (loss {loss:g}, gradient norm {norm:g}): {where}. "
        "Nothing of this step was applied; the last checkpoint is intact. A lower train.learning_rate, "
        "train.precision=fp32, or leaving these samples out are the usual remedies: a run in another folder takes "
        "them on with checkpoint.resume=<that checkpoint>"
    )


def _losses(session: Session, micro_batches: Sequence[MicroBatch], outputs: Sequence[ObjectiveOutput]) -> list[str]:
    """Name the terms that are not finite, and the samples on which they are not.

    outputs: of the micro-batches; empty if the last stage is on other processes.
    """
    own: dict[str, list[int]] = {}
    for micro_batch, output in zip(micro_batches, outputs, strict=True) if outputs else ():
        for name, value_T in output.per_token.items():
            own.setdefault(name, []).extend(micro_batch.document_T[~value_T.isfinite()].tolist())
    found: dict[str, set[int]] = {}
    for each in _everywhere(session, own):
        for name, documents in each.items():
            found.setdefault(name, set()).update(documents)
    return [f"{name} on {_sources(session, documents)}" for name, documents in found.items() if documents]


def _gradients(session: Session, packed: PackedMicroBatches) -> list[str]:
    """Run each micro-batch again by itself; name those whose gradient is not finite, and the first such parameter."""
    findings = []
    for rows in packed.rows:
        _run_again(session, session.train.micro_batches([rows]))
        own = [
            session.runner.shared_name(name)
            for name, parameter in session.runner.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(local(parameter.grad)).all())
        ]
        bad = list(dict.fromkeys(name for names in _everywhere(session, own) for name in names))
        if bad:
            where = _sources(session, packed.documents(rows))
            findings.append(f"gradient of {bad[0]} (and {len(bad) - 1} more) on {where}")
    return findings


def _sources(session: Session, documents: Iterable[int]) -> str:
    """The sources of those documents that fail by themselves, or of all documents if none does.

    Each is run alone, because a NaN spreads to all documents that are packed into the same row.
    """
    candidates = sorted(set(documents))
    found: list[int] = []
    for document in candidates:
        if len(found) == _NAMED:
            break
        if _fails_alone(session, document):
            found.append(document)
    named = (found or candidates)[:_NAMED]
    sources = ", ".join(session.train.documents.sources[document] for document in named)
    return f"{sources} and maybe others" if len(named) == _NAMED < len(candidates) else sources


def _fails_alone(session: Session, document: int) -> bool:
    documents = session.train.documents.select([document])
    sequences = PackedSequences(documents, max_tokens=session.train.max_tokens, seed=0)
    loss = _run_again(session, sequences.micro_batches([np.array([0])]))
    return not math.isfinite(loss) or not math.isfinite(session.engine.clip())


def _run_again(session: Session, packed: PackedMicroBatches) -> float:
    """Run one micro-batch by itself and return its loss. Afterwards the student has this micro-batch's gradient."""
    session.engine.zero_grad()
    micro_batches = session.shard(packed)
    signals = session.source_for(session.spec).request(micro_batches).result()
    return session.engine.forward_backward(micro_batches, signals, packed.normalizer).sums["loss"]


def _everywhere(session: Session, value: Any) -> list[Any]:
    mesh = session.runner.mesh
    return gathered(value, None if mesh is None else mesh.everyone, session.device)
