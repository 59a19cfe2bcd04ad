"""The interface of signal stores (such as a cache on disk, or servers), and the signal source that reads a store.

A store is read by documents, not by positions in a micro-batch. So a store does not depend on the order and packing
of a run, or on the number of epochs.

B rows of S tokens, C rows with a non-zero weight, E the teacher's width, K ids per token, N rows of a document.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.data import Documents, MicroBatch
from stillhouse.data.media import MediaInputs
from stillhouse.dry_run import replaceable
from stillhouse.models.processors import DistillTargets
from stillhouse.objective import TEACHER, OutputHead, Signals
from stillhouse.objective.signals import Tail
from stillhouse.parallel import DistributedStudent, ShardedMicroBatches, TeacherHead, TeacherHidden, watchdog
from stillhouse.parallel.host_memory import copied_to
from stillhouse.preemption import requested
from stillhouse.signals.extract import top_k_log_probs
from stillhouse.signals.in_stage_teachers import student_forward
from stillhouse.signals.signal_source import PendingSignals, SignalSource
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: the interval at which a process that waits for the teacher checks for a signal such as SIGTERM, and the time for
#: which the process still waits after such a signal
SECONDS_BETWEEN_LOOKS, SECONDS_TO_STOP = 0.5, 5.0
#: the tensors of a step's micro-batches
StepTensors = list[dict[str, Tensor]]


class StoreProof(Protocol):
    """A teacher's answers at the start of this process. `compare` raises ValueError if the saved answers differ."""

    def save(self, path: Path) -> None: ...
    def compare(self, path: Path) -> None: ...


class SignalStore(ABC):
    """A teacher's signals, by document.

    identity: a hash that changes if the teacher changes
    name: the name in messages: a folder, a URL or the name of a model
    model: the name of the teacher's model; "" if unknown
    width: E; used only with hidden states
    vocabulary: the number of rows of the teacher's head; None if unknown
    teacher_folder: a folder with the teacher's configuration and tokenizer, and for hidden states its output head
    may_take_long: whether the watchdog ignores the duration of `read`; the same value on all processes
    same_conversation: whether the teacher must have the student's chat template and end-of-sequence token
    proof: the answers to compare when a run resumes. If it is None, only the identity is compared.
    """

    signal: SignalSpec
    identity: str
    name: str
    model: str = ""
    width: int = 0
    vocabulary: int | None = None
    teacher_folder: Path | None = None
    may_take_long: bool = False
    same_conversation: bool = False
    proof: StoreProof | None = None
    warnings: Sequence[str] = ()

    def start(self, device: torch.device) -> None:  # noqa: B027 (most stores have nothing to load)
        """Prepare `read`. Called only on processes that read signals."""

    @abstractmethod
    def require(self, documents: Documents, what: str, media_inputs: MediaInputs | None = None) -> None:
        """Raise ValueError unless the store has signals for these documents, whose name in the message is `what`.

        media_inputs: makes the tensors of the documents' media; None if the data has no media
        """

    def require_positions(self, positions: Sequence[Tensor | None]) -> None:  # noqa: B027 (most stores have none)
        """Raise ValueError unless the teacher gives these rotary positions [S, A] to the `example_documents` of the
        processor of media.
        """

    @abstractmethod
    def read(self, wanted: Sequence[DocumentRows]) -> Sequence[dict[str, Tensor]]:
        """The signal's tensors for each document, on the CPU. Several threads may call this at once.

        Raises ValueError or OSError if the signals are not available.
        """

    def close(self) -> None:  # noqa: B027 (a store in this process has nothing to abandon)
        """Abandon the reads in progress, which then raise an error."""


class SignalWatch:
    """Raises an error `SECONDS_TO_STOP` after a signal such as SIGTERM. A loop that waits must call this object."""

    def __init__(self, error: Exception):
        self._error = error
        self._since: float | None = None

    def __call__(self) -> None:
        if requested():
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > SECONDS_TO_STOP:
                raise self._error


class SignalsLostError(ValueError):
    """The teacher's signals of a step are not available. All processes raise this error before the step begins."""


class StoredTeacher(SignalSource):
    """Reads the signals of the next steps in threads, while the engine computes.

    Only processes with the student's last stage need signals. Tensor-parallel ranks have the same tokens, so the
    first tensor rank reads the signals and broadcasts them. Only rows with a non-zero weight are read.

    tail: how the mass outside the ids of a sparse signal is treated
    name: the teacher's name if the run has several teachers, which may have different prefixes before a document
    head: the teacher's output head, if the store has hidden states and this process has the student's last stage
    """

    steps_ahead = 2

    def __init__(
        self,
        store: SignalStore,
        student: DistributedStudent,
        tail: Tail = "bucket",
        name: str = "",
        *,
        head: TeacherHead | None = None,
    ):
        self.store, self._student, self._tail, self._name, self._head = store, student, tail, name, head
        self._threads = ThreadPoolExecutor(self.steps_ahead + 1, thread_name_prefix="signals")

    @replaceable
    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        ids = self._ids(micro_batches)
        future = self._threads.submit(self._read, micro_batches, ids) if self._student.has_results else None
        return PendingSignals(partial(self._received, future, micro_batches))

    def _ids(self, micro_batches: ShardedMicroBatches) -> Sequence[Tensor]:
        """Return, for "chosen", the ids [C, K] of each micro-batch on the CPU; empty for other signals."""
        return ()

    def _received(self, reading: "Future[StepTensors] | None", micro_batches: ShardedMicroBatches) -> list[Signals]:
        """Wait until all processes have read, and move the tensors to the device. A collective of all processes.

        reading: the future result of `_read`, or None on a process that does not read
        Raises SignalsLostError on all processes if a process could not read.
        """
        error, tensors = "", StepTensors()
        with watchdog.nested("the teacher's signals", timed=False) if self.store.may_take_long else nullcontext():
            if reading is not None:
                require_no_signal = SignalWatch(OSError("a signal such as SIGTERM came before the teacher's answer"))
                try:
                    while not wait([reading], SECONDS_BETWEEN_LOOKS).done:
                        require_no_signal()
                    tensors = reading.result()
                # also RuntimeError, for torch's errors: this process must not fail while the others wait in `gather`
                except (ValueError, OSError, RuntimeError, CancelledError) as problem:
                    error = str(problem) or type(problem).__name__
            if error := next(filter(None, self._student.ranks.gather(error)), ""):
                raise SignalsLostError(error)
        return self.on_device(tensors, micro_batches)

    def on_device(self, tensors: StepTensors, micro_batches: ShardedMicroBatches) -> list[Signals]:
        """Return the signals of a step. tensors: this process's tensors; empty if it does not read."""
        if not self._student.has_last_stage:
            return [{}] * len(micro_batches)
        signals: list[Signals] = []
        for at, batch in enumerate(micro_batches):
            device, group = batch.labels_T.device, self._student.mesh.group("tensor")
            on_cpu = tensors[at] if tensors else self._empty(batch, device)
            moved = {name: copied_to(tensor, device) for name, tensor in on_cpu.items()}
            for tensor in () if group is None else moved.values():
                dist.broadcast(tensor, group=group, group_src=0)
            if self.store.signal.kind == "hidden":
                assert self._head is not None
                signals.append({TEACHER: TeacherHidden(moved["hidden"], self._head)})
            else:
                signals.append({TEACHER: self.store.signal.as_signal(moved, self._tail)})
        return signals

    def close(self) -> None:
        """Abandon the requests in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()
        self._threads.shutdown(wait=True)

    def _read(self, step: ShardedMicroBatches, ids: Sequence[Tensor]) -> StepTensors:
        """The tensors of a step's micro-batches on the CPU; rows with weight 0 are 0."""
        wanted: list[DocumentRows] = []
        places: list[tuple[dict[str, Tensor], Tensor, np.ndarray]] = []
        step_tensors = [self._empty(micro_batch, "cpu") for micro_batch in step]
        for number, (micro_batch, tensors) in enumerate(zip(step.on_cpu, step_tensors, strict=True)):
            valid_index = micro_batch.valid_index
            document_C = micro_batch.document_T[valid_index].numpy()
            position_C = micro_batch.position_ids_BS.flatten()[valid_index].numpy()
            for document in np.unique(document_C).tolist():
                chosen = np.flatnonzero(document_C == document)
                tokens, row_S = step.all_ranks.teacher_tokens(document, self._name)
                rows_C, ids_NK = row_S[position_C[chosen]], None
                rows = range(int(rows_C.min()), int(rows_C.max()) + 1)
                rows_C = rows_C - rows.start
                if ids:
                    ids_NK = torch.full((len(rows), ids[number].shape[1]), -1, dtype=torch.int32)
                    ids_NK[rows_C] = ids[number][chosen]
                media = step.all_ranks.document_media(document)
                wanted.append(DocumentRows(tokens, rows, ids_NK, media=media))
                places.append((tensors, valid_index[chosen], rows_C))
        for (tensors, index_C, rows_C), stored in zip(places, self.store.read(wanted), strict=True):
            for name, value in stored.items():
                tensors[name][index_C] = value[rows_C]
        return step_tensors

    def _empty(self, micro_batch: MicroBatch, device: torch.device | str) -> dict[str, Tensor]:
        """Return zeros for a micro-batch's tensors. On the CPU, they are pinned if the micro-batch is on a GPU."""
        pinned = torch.device(device).type == "cpu" and micro_batch.labels_T.device.type == "cuda"
        return {
            name: torch.zeros(len(micro_batch.labels_T), *shape, dtype=dtype, device=device, pin_memory=pinned)
            for name, (shape, dtype) in self.store.signal.tensors(self.store.width).items()
        }


class ChosenTeacher(StoredTeacher):
    """Requests the teacher's log-probabilities of the student's top-k ids, except ids that the teacher's head lacks.

    autocast: the dtype of the student's matrix products. If it is None, they have the dtype of its weights.
    """

    steps_ahead = 0

    def __init__(
        self,
        store: SignalStore,
        student: DistributedStudent,
        autocast: torch.dtype | None,
        tail: Tail = "bucket",
        name: str = "",
    ):
        super().__init__(store, student, tail, name)
        assert store.vocabulary is not None
        self._vocabulary, self._autocast = store.vocabulary, autocast

    def _ids(self, micro_batches: ShardedMicroBatches) -> list[Tensor]:
        """The student's top-k ids at the rows with a non-zero weight; empty on processes that do not read."""
        results = student_forward(self._student, micro_batches, self._top_k, self._autocast)
        ids = [tensors["ids"] for tensors in results] if self._student.has_results else []
        return [ids_CK.masked_fill(ids_CK >= self._vocabulary, -1) for ids_CK in ids]

    def _top_k(
        self, *, hidden_states: Tensor, head: OutputHead, context: DistillTargets, depth: int = 0
    ) -> dict[str, Tensor]:
        assert context.valid_index is not None
        hidden_CE = hidden_states.flatten(0, -2)[context.valid_index]
        return top_k_log_probs(hidden_CE, head, self.store.signal.entries, 1.0)
