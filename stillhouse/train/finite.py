"""Stopping at a loss or a gradient that is not finite, before it reaches a weight, and saying where it came from."""

import math
from collections.abc import Iterable, Sequence

import torch

from stillhouse.data import Batch, make_batch
from stillhouse.objective import ObjectiveOutput
from stillhouse.parallel import Work
from stillhouse.train.session import Session
from stillhouse.train.step import forward_backward

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
    """Raise ValueError if the step's loss or gradient norm is NaN or infinite. The weights are still untouched."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    batches = [work.tokens for work in works if isinstance(work.tokens, Batch)]
    # under a layout every process has its own samples, and none could run one again without the others
    alone = session.runner.mesh is None
    findings = (_losses(session, batches, outputs) or _gradients(session, batches)) if alone else []
    session.runner.zero_grad()
    where = "; ".join(findings) or ("in no single micro-batch: the sum over them overflowed" if alone else "")
    where = where or "run stillhouse check in one process to find the samples"
    what = "loss" if not math.isfinite(loss) else "gradient"
    raise ValueError(
        f"step {step}: the {what} is not finite (loss {loss:g}, gradient norm {norm:g}): {where}. "
        "Nothing of this step was applied; the last checkpoint is intact. A lower train.learning_rate, "
        "train.precision=fp32, or leaving these samples out are the usual remedies: a run in another folder takes "
        "them on with checkpoint.resume=<that checkpoint>"
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
        _run_again(session, batch)
        bad = [
            name
            for name, parameter in session.student.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        if bad:
            documents = set(batch.document_T[batch.valid_index].tolist())
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
    output = _run_again(session, make_batch(session.train.documents, [[document]]).to(session.device))
    norm = session.runner.clip(0.0)
    return not bool(output.loss.isfinite() & norm.isfinite())


def _run_again(session: Session, batch: Batch) -> ObjectiveOutput:
    """One micro-batch by itself; its gradient is the student's afterwards."""
    session.runner.zero_grad()
    (output,) = forward_backward(
        session.runner,
        [batch],
        session.recipe,
        precision=session.precision,
        chunk_tokens=session.config.objective.chunk_tokens,
    )
    return output
