"""Stopping at a loss or a gradient that is not finite, before it reaches a weight, and saying where it came from.

All processes of a layout take part in the search, and all find the same.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from stillhouse.data import Batch, PackedSequences
from stillhouse.objective import ObjectiveOutput
from stillhouse.parallel import Work, gathered, is_first
from stillhouse.parallel.gradients import local
from stillhouse.train.session import Session

#: sources of samples that an error names
_NAMED = 5


def stop_unless_finite(
    session: Session,
    step: int,
    works: Sequence[Work],
    outputs: Sequence[ObjectiveOutput],
    loss: float,
    norm: float,
) -> None:
    """Raise ValueError if the step's loss or gradient norm is NaN or infinite. The weights are still untouched.

    step: counted from 1. works, outputs: this process's part of it.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    rows = session.plan.micro_batches(session.train, step - 1)
    findings = _losses(session, works, outputs) or _gradients(session, rows)
    session.runner.zero_grad()
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


def _losses(session: Session, works: Sequence[Work], outputs: Sequence[ObjectiveOutput]) -> list[str]:
    """Which terms are not finite, and on which samples."""
    own: dict[str, list[int]] = {}
    # a pipeline's outputs are on its last stage alone
    for work, output in zip(works, outputs, strict=True) if session.runner.has_results else ():
        assert isinstance(work.tokens, Batch)
        for name, value_T in output.per_token.items():
            own.setdefault(name, []).extend(work.tokens.document_T[~value_T.isfinite()].tolist())
    found: dict[str, set[int]] = {}
    for each in _everywhere(session, own):
        for name, documents in each.items():
            found.setdefault(name, set()).update(documents)
    return [f"{name} on {_sources(session, documents)}" for name, documents in found.items() if documents]


def _gradients(session: Session, rows: Iterable[np.ndarray]) -> list[str]:
    """Which micro-batches' gradients are not finite, each run again by itself; the first bad parameter names it."""
    findings = []
    for each in rows:
        _run_again(session, session.train, each)
        own = [
            session.runner.shared_name(name)
            for name, parameter in session.runner.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(local(parameter.grad)).all())
        ]
        bad = list(dict.fromkeys(name for names in _everywhere(session, own) for name in names))
        if bad:
            documents = {document for sequence in each for document in session.train.members(sequence).tolist()}
            findings.append(f"gradient of {bad[0]} (and {len(bad) - 1} more) on {_sources(session, documents)}")
    return findings


def _sources(session: Session, documents: Iterable[int]) -> str:
    """The places of those documents that fail by themselves: a NaN reaches all that are packed into its row."""
    candidates = sorted(documents)
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
    alone = session.train.documents.select([document])
    sequences = PackedSequences(alone, max_tokens=session.train.max_tokens, seed=0)
    loss = _run_again(session, sequences, np.array([0]))
    return not math.isfinite(loss) or not math.isfinite(float(session.runner.clip(0.0)))


def _run_again(session: Session, sequences: PackedSequences, rows: np.ndarray) -> float:
    """One micro-batch by itself: its loss; its gradient is the student's afterwards."""
    session.runner.zero_grad()
    works = session.works(sequences, [rows], session.recipe, sequences.targets([rows]), training=True)
    return session.totals(session.runner.forward_backward(works), works)["loss"]


def _everywhere(session: Session, value: Any) -> list[Any]:
    mesh = session.runner.mesh
    return gathered(value, None if mesh is None else mesh.everyone, session.device)
