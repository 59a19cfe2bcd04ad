"""Stopping at a loss or a gradient that is not finite, before it reaches a weight, and saying where it came from."""

import math
from collections.abc import Sequence

import torch

from stillhouse.data import Batch
from stillhouse.objective import ObjectiveOutput
from stillhouse.train.session import Session
from stillhouse.train.step import forward_backward

#: sources of samples that an error names
_NAMED = 5


def stop_unless_finite(
    session: Session, step: int, batches: Sequence[Batch], outputs: Sequence[ObjectiveOutput], loss: float, norm: float
) -> None:
    """Raise ValueError if the step's loss or gradient norm is NaN or infinite. The weights are still untouched."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    findings = _losses(session, batches, outputs) or _gradients(session, batches)
    where = "; ".join(findings) or "in no single micro-batch: the sum over them overflowed"
    what = "loss" if not math.isfinite(loss) else "gradient"
    raise ValueError(
        f"step {step}: the {what} is not finite (loss {loss:g}, gradient norm {norm:g}): {where}. "
        "Nothing of this step was applied; the last checkpoint is intact. A lower train.learning_rate, "
        "train.precision=fp32, or leaving these samples out are the usual remedies"
    )


def _losses(session: Session, batches: Sequence[Batch], outputs: Sequence[ObjectiveOutput]) -> list[str]:
    """Which terms are not finite, and on which samples."""
    findings = []
    for name in outputs[0].per_token:
        documents: set[int] = set()
        for batch, output in zip(batches, outputs, strict=True):
            bad_T = ~output.per_token[name].isfinite()
            documents |= set(batch.document_T[bad_T].tolist())
        if documents:
            findings.append(f"{name} on {_sources(session, documents)}")
    return findings


def _gradients(session: Session, batches: Sequence[Batch]) -> list[str]:
    """Which micro-batches' gradients are not finite, each run again by itself; the first bad parameter names it."""
    findings = []
    for batch in batches:
        session.student.zero_grad(set_to_none=True)
        forward_backward(session.student, session.teacher, [batch], session.recipe, precision=session.precision())
        bad = [
            name
            for name, parameter in session.student.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        if bad:
            documents = set(batch.document_T[batch.valid_index].tolist())
            findings.append(f"gradient of {bad[0]} (and {len(bad) - 1} more) on {_sources(session, documents)}")
    session.student.zero_grad(set_to_none=True)
    return findings


def _sources(session: Session, documents: set[int]) -> str:
    sources = [session.train.documents.sources[document] for document in sorted(documents) if document >= 0]
    more = f" and {len(sources) - _NAMED} more" if len(sources) > _NAMED else ""
    return ", ".join(sources[:_NAMED]) + more
