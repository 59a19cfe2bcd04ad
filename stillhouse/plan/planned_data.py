"""The data and the stored signals of a dry run: documents without text, and signals without values.

N tokens of all documents.
"""

from collections.abc import Sequence
from dataclasses import replace
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillhouse.config import RunConfig, TeacherConfig
from stillhouse.data import DataReport, Documents, PackedSequences, StepMicroBatches
from stillhouse.data.media import MediaInputs
from stillhouse.engine.schedule import make_step_schedule
from stillhouse.objective.metrics import ADVANTAGES, IS_SAMPLED, OLD_LOG_PROBS, SAMPLING
from stillhouse.parallel import Layout, Mesh, ShardedMicroBatches, shard_micro_batches
from stillhouse.plan.fake_cuda import with_real_tensors
from stillhouse.rollout.documents import POLICY_VERSION
from stillhouse.signals import SignalStore, StoredTeacher
from stillhouse.signals.signal_source import DeferredSignals
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec


class PlannedStore(SignalStore):
    """A server's signals of the kind `teacher.signal`, which nobody reads."""

    def __init__(self, teacher: TeacherConfig, temperature: float):
        if teacher.url is None or teacher.signal == "hidden":
            raise ValueError("a dry run of a teacher on a server: expected teacher.signal=top_k, chosen or sampled")
        self.signal = SignalSpec(teacher.signal, "float32", teacher.top_k, temperature)
        self.identity = self.name = "planned"

    def require(self, documents: Documents, what: str, media_inputs: MediaInputs | None = None) -> None: ...

    def read(self, wanted: Sequence[DocumentRows]) -> Sequence[dict[str, Tensor]]:
        raise NotImplementedError


def planned_signals(source: StoredTeacher, micro_batches: ShardedMicroBatches) -> DeferredSignals:
    """Replaces `StoredTeacher.request`, whose threads read the store. The tensors go the same way to the device."""
    tensors = [source._empty(batch, "cpu") for batch in micro_batches] if source._student.has_results else []
    waited: Any = lambda reading: tensors  # noqa: E731
    source._waited = waited  # type: ignore[method-assign]
    return DeferredSignals(lambda: source._received(None, micro_batches))


def planned_micro_batches(
    config: RunConfig, layout: Layout, mesh: Mesh, document_tokens: int, tokens_per_step: int
) -> ShardedMicroBatches:
    """Return the micro-batches of a step on this rank."""
    train = config.train.model_copy(update={"tokens_per_step": tokens_per_step})
    max_tokens = config.data.max_tokens
    rows = max(1, train.tokens_per_step // max_tokens)
    packed = PackedSequences(
        _documents(max_tokens, rows, document_tokens, on_policy=config.rollout is not None),
        max_tokens=max_tokens,
        seed=0,
    )
    schedule = make_step_schedule(train, len(packed), max_tokens, layout.degrees.data, layout.stages)
    return planned_shards(schedule.micro_batches(packed, 0), mesh, uniform_shapes=layout.stages > 1)


def planned_shards(step: StepMicroBatches, mesh: Mesh, *, uniform_shapes: bool = False) -> ShardedMicroBatches:
    """As `shard_micro_batches`, which reads values: the micro-batches have values until they are on the device."""
    host: Any = SimpleNamespace(degrees=mesh.degrees, coordinate=mesh.coordinate, device=torch.device("cpu"))
    on_cpu = with_real_tensors(unwrap(shard_micro_batches))(step, host, uniform_shapes=uniform_shapes)
    moved = [part.to(mesh.device) for part in on_cpu]
    return ShardedMicroBatches(moved, step, uniform_shapes=uniform_shapes, on_cpu=list(on_cpu))


def _documents(max_tokens: int, rows: int, document_tokens: int, *, on_policy: bool) -> Documents:
    """Return documents that fill packed rows; the last document of a row is shorter if necessary."""
    lengths = [document_tokens] * (max_tokens // document_tokens)
    if rest := max_tokens % document_tokens:
        lengths.append(rest)
    starts = np.concatenate([[0], np.cumsum(lengths * rows)]).astype(np.int64)
    targets_N = np.ones(starts[-1], dtype=bool)
    targets_N[starts[:-1]] = False
    count = len(starts) - 1
    sources = [f"planned:{number}" for number in range(count)]
    tokens_N = np.zeros(starts[-1], dtype=np.int32)
    documents = Documents(
        tokens_N, targets_N, starts, np.arange(count, dtype=np.uint64), sources, DataReport("planned")
    )
    if not on_policy:
        return documents
    zeros_N = np.zeros(starts[-1], dtype=np.float32)
    columns = (ADVANTAGES, OLD_LOG_PROBS, IS_SAMPLED, POLICY_VERSION, SAMPLING)
    return replace(documents, per_token=dict.fromkeys(columns, zeros_N), weights_N=zeros_N + 1)
