"""Finds the cause of a loss or gradient that is not finite, before a weight changes.

The error names a term of the loss or a parameter, and the samples. All processes of a layout take part in the search.
"""

import math
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np

from stillhouse.data import PackedMicroBatches, PackedSequences
from stillhouse.engine.engine import StepOutput
from stillhouse.loops.session import Models
from stillhouse.parallel import ShardedMicroBatches, is_first

#: an error names at most this many samples
_NAMED = 5


def not_finite_error(
    models: Models, checkpoints: Path, step: int, micro_batches: ShardedMicroBatches, output: StepOutput, norm: float
) -> ValueError:
    """Return an error that names the cause of a loss or gradient norm that is not finite. Weights are not changed.

    step: the step's number, counted from 1.
    output: the step's output for these micro-batches; the student still has the gradient.
    """
    loss, packed = output.sums["loss"], micro_batches.all_ranks
    assert isinstance(packed, PackedMicroBatches)
    # the name and the document of each value that is not finite; processes without the last stage have no outputs
    terms = [
        (name, document)
        for micro_batch, processed in zip(micro_batches, output.outputs, strict=bool(output.outputs))
        for name, value_T in processed.per_token.items()
        for document in set(micro_batch.document_T[~value_T.isfinite()].tolist())
    ]
    documents_by_name: dict[str, set[int]] = {}
    for name, document in chain.from_iterable(models.ranks.gather(terms)):
        documents_by_name.setdefault(name, set()).add(document)
    sequences = packed.sequences
    findings = [f"{name} on {_sources(models, sequences, numbers)}" for name, numbers in documents_by_name.items()]
    if not findings:  # run each micro-batch again, and name the first parameter whose gradient is not finite
        for number, rows in enumerate(packed.rows):
            _run_again(models, sequences.micro_batches([rows]))
            if bad := models.engine.gradients_not_finite():
                samples = _sources(models, sequences, packed.documents_of(number))
                findings.append(f"gradient of {bad[0]} (and {len(bad) - 1} more) on {samples}")
    models.engine.zero_grad()
    where = "; ".join(findings) or "in no single micro-batch: the sum over the micro-batches overflowed"
    what = "loss" if not math.isfinite(loss) else "gradient"
    if not is_first():
        return ValueError(f"step {step}: the {what} is not finite; rank 0 prints the cause")
    precision = ", train.precision=fp32" if models.autocast else ""
    start = "there is no checkpoint yet, so start again with such a change"
    if (last := max(checkpoints.glob("step-*"), default=None)) is not None:
        start = f"start a run in another folder with such a change and with checkpoint.resume={last}"
    return ValueError(
        f"step {step}: the {what} is not finite (loss {loss:g}, gradient norm {norm:g}): {where}. "
        f"No weight was changed by this step. The usual remedies are a lower train.learning_rate{precision}, or to "
        f"remove these samples; {start}"
    )


def _sources(models: Models, sequences: PackedSequences, documents: Iterable[int]) -> str:
    """The sources of the documents whose own loss or gradient is not finite. If there is no such document, the
    sources of all documents.

    Each document is run separately, because a NaN spreads to all documents that are packed into the same row.
    """
    candidates = sorted(set(documents))
    numbers: list[int] = []
    for document in candidates:
        if len(numbers) == _NAMED:
            break
        single_document = PackedSequences(
            sequences.documents.select([document]),
            max_tokens=sequences.max_tokens,
            seed=0,
            gaps=sequences.gaps,
            media_inputs=sequences.media_inputs,
        )
        loss = _run_again(models, single_document.micro_batches([np.array([0])]))
        if not math.isfinite(loss) or not math.isfinite(models.engine.gradient_norm()):
            numbers.append(document)
    named = (numbers or candidates)[:_NAMED]
    sources = ", ".join(sequences.documents.sources[document] for document in named)
    return f"{sources} and maybe others" if len(named) == _NAMED < len(candidates) else sources


def _run_again(models: Models, packed: PackedMicroBatches) -> float:
    """Run one micro-batch separately and return its loss. The student then has the gradient of this micro-batch."""
    models.engine.zero_grad()
    return models.step(models.shard(packed)).sums["loss"]
