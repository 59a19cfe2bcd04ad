"""Several teachers as one source: each teacher scores all documents, or each document has one teacher.

T tokens of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stillhouse.objective import RoutedSignal, Signals
from stillhouse.parallel import DistributedStudent, ShardedMicroBatches, shard_micro_batches
from stillhouse.signals.separate_teacher import SeparateTeacher
from stillhouse.signals.signal_source import DeferredSignals, PendingSignals, SignalSource
from stillhouse.signals.signal_store import StoredTeacher


class SeveralTeachers:
    """The source of the signals of all teachers.

    teachers: the sources of their signals, by their names
    route: the column of the data that names each document's teacher; None: each teacher scores all documents
    heads_are_sharded: whether FSDP shards output heads of teachers, on the student's last stage
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

    @property
    def steps_ahead(self) -> int:
        return max(teacher.steps_ahead for teacher in self.teachers.values())

    def request(self, micro_batches: ShardedMicroBatches) -> DeferredSignals:
        """Request the signals. Teachers that use the job's own devices begin only when the signals are needed."""
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
        self, pending: Mapping[str, PendingSignals], micro_batches: int, rows: list[dict[str, Tensor]] | None
    ) -> Sequence[Signals]:
        """The signals of so many micro-batches, by the teachers' names."""
        by_teacher = {name: signals.result() for name, signals in pending.items()}
        by_micro_batch = [
            {name: signal for name, signals in by_teacher.items() for signal in signals[number].values()}
            for number in range(micro_batches)
        ]
        if rows is None:
            return by_micro_batch
        return [self._routed(signals, of_batch) for signals, of_batch in zip(by_micro_batch, rows, strict=True)]

    def _signals_of(self, name: str, view: ShardedMicroBatches) -> Sequence[Signals]:
        """The signals of a teacher in this job for its view of the micro-batches."""
        source = self.teachers[name]
        if isinstance(source, SeparateTeacher) and self._route is not None:
            return source.request_some(view, self._chosen(view, name)).result()
        return source.request(view).result()

    def _routed(self, signals: Signals, rows: Mapping[str, Tensor]) -> Signals:
        """The signals with the rows that they score. A teacher without rows is left out, but at least one stays.

        Where FSDP shards the heads, none is left out: all processes gather the heads together, in the same order.
        """
        routed = {name: RoutedSignal(signal, rows[name]) for name, signal in signals.items()}
        if self._heads_are_sharded:
            return routed
        return {name: signal for name, signal in routed.items() if len(signal.index)} or dict(
            list(routed.items())[:1]
        )

    def close(self) -> None:
        for teacher in self.teachers.values():
            if isinstance(teacher, StoredTeacher):
                teacher.close()

    def _rows(self, micro_batches: ShardedMicroBatches, route: str) -> list[dict[str, Tensor]]:
        """For each of this process's micro-batches: each teacher's rows with a weight."""
        rows_by_teacher = []
        for batch in micro_batches:
            index, document_T = batch.valid_index.cpu(), batch.document_T.cpu()
            documents, place_C = document_T[index].unique(return_inverse=True)
            names = [micro_batches.whole.value(document, route) for document in documents.tolist()]
            rows_by_teacher.append(
                {
                    name: index[torch.tensor([teacher == name for teacher in names], dtype=torch.bool)[place_C]].to(
                        batch.valid_index.device
                    )
                    for name in self.teachers
                }
            )
        return rows_by_teacher

    def _chosen(self, view: ShardedMicroBatches, name: str) -> list[int]:
        """The numbers of the whole step's micro-batches with a document of this teacher."""
        assert self._route is not None
        all_micro_batches, chosen = view.whole, []
        for number in range(len(all_micro_batches)):
            documents = all_micro_batches.documents_of(number)
            if any(all_micro_batches.value(document, self._route) == name for document in documents):
                chosen.append(number)
        return chosen

    def _view(
        self, micro_batches: ShardedMicroBatches, name: str, rows: list[dict[str, Tensor]] | None
    ) -> ShardedMicroBatches:
        """The micro-batches as one teacher reads them: with its inputs, and only its rows."""
        step, view = micro_batches.whole.for_teacher(name), micro_batches
        if step is not micro_batches.whole:
            view = shard_micro_batches(step, self._student.mesh, uniform_shapes=micro_batches.uniform_shapes)
        if rows is None:
            return view
        routed = [replace(batch, valid_index=rows_of[name]) for batch, rows_of in zip(view, rows, strict=True)]
        return ShardedMicroBatches(routed, view.whole, uniform_shapes=view.uniform_shapes)
