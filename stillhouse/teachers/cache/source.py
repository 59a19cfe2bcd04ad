"""The signal source of a run whose teacher's signals are in a cache.

B rows of S tokens, T = B·S, E the teacher's width, K ids per token.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.objective import Signal, TopK
from stillhouse.objective.signals import Tail
from stillhouse.parallel import PairSignal, Runner, ShardedMicroBatches, TeacherHidden
from stillhouse.teachers.cache.format import document_id
from stillhouse.teachers.cache.reader import SignalCache
from stillhouse.teachers.source import PendingSignals, ReadySignals


class CachedTeacher:
    """Reads the signals of the coming steps in a thread, while the engine computes.

    Only processes with the student's last stage read. Each reads only the rows of its own tokens that have a weight.

    tail: how the mass outside of top-k ids counts.
    """

    steps_ahead = 2

    def __init__(self, cache: SignalCache, runner: Runner, tail: Tail = "bucket"):
        self.cache, self._tail = cache, tail
        self._reads = runner.has_last_stage
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")

    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        if not self._reads:
            return ReadySignals([None] * len(micro_batches))
        return _Reading(self._thread.submit(self._read, micro_batches), self._as_signal, micro_batches)

    def _read(self, step: ShardedMicroBatches) -> list[dict[str, Tensor]]:
        return [self._tensors(each, step) for each in step]

    def _tensors(self, micro_batch: MicroBatch, step: ShardedMicroBatches) -> dict[str, Tensor]:
        """The tensors of a micro-batch's signal on the CPU; rows without a weight are 0."""
        manifest, device = self.cache.manifest, micro_batch.labels_T.device
        found = {
            name: torch.zeros(len(micro_batch.labels_T), *shape, dtype=dtype, pin_memory=device.type == "cuda")
            for name, (shape, dtype) in manifest.signal.tensors(manifest.width).items()
        }
        valid_index = micro_batch.valid_index.cpu()
        document_C = micro_batch.document_T.cpu()[valid_index].numpy()
        position_C = micro_batch.position_ids_BS.cpu().flatten()[valid_index].numpy()
        for document in np.unique(document_C).tolist():
            chosen = np.flatnonzero(document_C == document)
            first, last = int(position_C[chosen].min()), int(position_C[chosen].max())
            stored = self.cache.read(document_id(step.whole.document_tokens(document)), range(first, last + 1))
            for name, value in stored.items():
                found[name][valid_index[chosen]] = value[position_C[chosen] - first]
        return found

    def _as_signal(self, found: dict[str, Tensor], micro_batch: MicroBatch) -> Signal | TeacherHidden:
        spec, device = self.cache.manifest.signal, micro_batch.labels_T.device
        found = {name: each.to(device, non_blocking=True) for name, each in found.items()}
        if spec.kind == "hidden":
            return TeacherHidden(found["hidden"].view(*micro_batch.shape_BS, -1))
        log_probs_TK = found["log_probs"].to(torch.float32)
        return TopK(found["ids"], log_probs_TK, self._tail, found["tail_log_prob"], spec.temperature)


@dataclass(frozen=True)
class _Reading:
    """Signals that a thread reads into host memory; they are moved to the device when they are needed."""

    future: "Future[list[dict[str, Tensor]]]"
    as_signal: Callable[[dict[str, Tensor], MicroBatch], Signal | TeacherHidden]
    micro_batches: ShardedMicroBatches

    def result(self) -> Sequence[PairSignal]:
        return [self.as_signal(*each) for each in zip(self.future.result(), self.micro_batches, strict=True)]
