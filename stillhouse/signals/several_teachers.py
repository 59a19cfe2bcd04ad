"""Several teachers as one source: each teacher scores all documents, or each document has one teacher.

T tokens of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.objective import RoutedSignal, Signals
from stillhouse.parallel import DistributedStudent, ShardedMicroBatches, shard_micro_batches
from stillhouse.parallel.host_memory import copied_to
from stillhouse.signals.signal_source import DeferredSignals, PendingSignals, SignalSource


class SeveralTeachers(SignalSource):
    """The source of the signals of all teachers.

    teachers: each teacher's source of signals, by the teacher's name
    route: the column of the data that names each document's teacher; None: each teacher scores all documents
    heads_are_sharded: whether FSDP shards the teachers' output heads on the student's last stage
    """

    def __init__(
        self,
        teachers: Mapping[str, SignalSource],
        student: DistributedStudent,
        route: str | None = None,
        *,
        heads_are_sharded: bool = False,
    ):
        self.teachers, self._student, self._route = teachers, student, route
        self._heads_are_sharded = heads_are_sharded
        self.steps_ahead = max(teacher.steps_ahead for teacher in teachers.values())
        self.decoders = {
            f"teachers.{name}": decoder for name, source in teachers.items() for decoder in source.decoders.values()
        }

    def request(self, micro_batches: ShardedMicroBatches) -> DeferredSignals:
        """Request the signals. A teacher with `steps_ahead` = 0 gets its request only when `result` is called."""
        rows = None if self._route is None else self._rows(micro_batches, self._route)
        views = {name: self._view(micro_batches, name, rows) for name in self.teachers}
        pending: dict[str, PendingSignals] = {
            name: source.request(views[name])
            if source.steps_ahead
            else DeferredSignals(partial(self._signals_of, name, views[name]))
            for name, source in self.teachers.items()
        }
        return DeferredSignals(partial(self._result, pending, len(micro_batches), rows))

    def _result(
        self, pending: Mapping[str, PendingSignals], micro_batches: int, rows: "_Rows | None"
    ) -> Sequence[Signals]:
        by_teacher = {name: signals.result() for name, signals in pending.items()}
        by_micro_batch = [
            {name: signal for name, signals in by_teacher.items() for signal in signals[number].values()}
            for number in range(micro_batches)
        ]
        if rows is None:
            return by_micro_batch
        routed: list[Signals] = []
        for signals, rows_of in zip(by_micro_batch, rows.on_device, strict=True):
            named = {name: RoutedSignal(signal, rows_of[name]) for name, signal in signals.items()}
            if not self._heads_are_sharded:  # else all ranks must gather the heads in the same order
                # teachers without rows are dropped, but at least one is kept
                with_rows = {name: signal for name, signal in named.items() if len(signal.index)}
                named = with_rows or dict(list(named.items())[:1])
            routed.append(named)
        return routed

    def _signals_of(self, name: str, view: ShardedMicroBatches) -> Sequence[Signals]:
        """Compute the signals of a teacher with `steps_ahead` = 0. view: the result of `_view` for this teacher"""
        source = self.teachers[name]
        if self._route is None:
            return source.request(view).result()
        step, route = view.all_ranks, self._route
        numbers = [
            number
            for number in range(len(step))
            if any(step.value(document, route) == name for document in step.documents_of(number))
        ]
        return source.request_some(view, numbers).result()

    def close(self) -> None:
        for teacher in self.teachers.values():
            teacher.close()

    def _rows(self, micro_batches: ShardedMicroBatches, route: str) -> "_Rows":
        on_cpu = []
        for batch in micro_batches.on_cpu:
            index, document_T = batch.valid_index, batch.document_T
            documents, place_C = document_T[index].unique(return_inverse=True)
            names = [micro_batches.all_ranks.value(document, route) for document in documents.tolist()]
            is_of = {name: torch.tensor([other == name for other in names]) for name in self.teachers}
            on_cpu.append({name: index[is_of_D.bool()[place_C]] for name, is_of_D in is_of.items()})
        device = self._student.device
        moved = [{name: copied_to(index, device) for name, index in rows_of.items()} for rows_of in on_cpu]
        return _Rows(on_cpu, moved)

    def _view(self, micro_batches: ShardedMicroBatches, name: str, rows: "_Rows | None") -> ShardedMicroBatches:
        """The micro-batches with one teacher's inputs and, with a route, only the rows of that teacher."""
        step, view = micro_batches.all_ranks.for_teacher(name), micro_batches
        if step is not micro_batches.all_ranks:
            view = shard_micro_batches(step, self._student.mesh, uniform_shapes=micro_batches.uniform_shapes)
        if rows is None:
            return view
        routed, on_cpu = (
            [replace(batch, valid_index=rows_of[name]) for batch, rows_of in zip(batches, rows_by_batch, strict=True)]
            for batches, rows_by_batch in ((view, rows.on_device), (view.on_cpu, rows.on_cpu))
        )
        return ShardedMicroBatches(routed, view.all_ranks, uniform_shapes=view.uniform_shapes, on_cpu=on_cpu)


class _Rows(NamedTuple):
    """For each micro-batch of this process: the rows with a non-zero weight, by the name of their teacher."""

    on_cpu: list[dict[str, Tensor]]
    on_device: list[dict[str, Tensor]]
