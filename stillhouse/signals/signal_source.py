"""The interface of all sources of teacher signals.

pending = source.request(micro_batches)     can be called up to `steps_ahead` steps before the signals are needed
signals = pending.result()                  the signals of each micro-batch of this process, by teacher name

Several teachers are one source, too: each teacher scores all documents, or each document has one teacher. A
`SourceKind` registers a source (`run/signal_source_kinds.py`); most sources read a `SignalStore` (`signal_store.py`).
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from stillhouse.models import Decoder
from stillhouse.objective import RoutedSignal, Signals
from stillhouse.parallel import DistributedStudent, ShardedMicroBatches, shard_micro_batches
from stillhouse.parallel.host_memory import copied_to


@dataclass(frozen=True)
class PendingSignals:
    """Signals that were requested, but are perhaps not computed yet.

    result: a function that computes the signals of this process's micro-batches, or waits for them, and returns
        them by teacher name.
    """

    result: Callable[[], Sequence[Signals]]

    @classmethod
    def ready(cls, signals: Sequence[Signals]) -> "PendingSignals":
        """Return signals that are available at once."""
        return cls(lambda: signals)


class SignalSource(ABC):
    """The source of the signals of a teacher, or of several teachers.

    steps_ahead: the number of steps by which requests are made in advance
    decoders: the teachers' models outside the student's stages, by the keys of their config sections
    """

    steps_ahead: int = 0
    decoders: Mapping[str, Decoder] = {}

    @abstractmethod
    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        """Request the signals of a step's micro-batches. A collective of all processes of the run."""

    def request_some(self, micro_batches: ShardedMicroBatches, numbers: Sequence[int]) -> PendingSignals:
        """Like `request`, but only the micro-batches with these numbers (among those of all ranks) need signals."""
        return self.request(micro_batches)

    def close(self) -> None:  # noqa: B027 (most sources have nothing to abandon)
        """Abandon the requests in progress."""


class RequestedSteps(Iterator[tuple[ShardedMicroBatches, PendingSignals]]):
    """Each step's micro-batches and their signals, requested `source.steps_ahead` steps in advance.

    steps: an iterable that builds the micro-batches of each step on demand. It yields None if the next step cannot be
        built yet; the iterable is then read again at the next step.
    """

    def __init__(self, source: SignalSource, steps: Iterable[ShardedMicroBatches | None]):
        self._source, self._steps = source, iter(steps)
        self._built: deque[ShardedMicroBatches | None] = deque()
        self._requested: deque[tuple[ShardedMicroBatches, PendingSignals]] = deque()

    def build_next(self) -> None:
        """Build the next step's micro-batches while the device computes the present step.

        Their signals are not requested yet, because a request can need the weights after the present step.
        """
        if not self._built:
            self._built.extend(islice(self._steps, 1))

    def __next__(self) -> tuple[ShardedMicroBatches, PendingSignals]:
        while len(self._requested) <= self._source.steps_ahead:
            self.build_next()
            if not self._built:
                break
            if (micro_batches := self._built.popleft()) is None:
                break
            self._requested.append((micro_batches, self._source.request(micro_batches)))
        if not self._requested:
            raise StopIteration
        return self._requested.popleft()


class NoTeacher(SignalSource):
    """The source for objectives without a divergence: no micro-batch has a signal."""

    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        return PendingSignals.ready([{}] * len(micro_batches))


class SeveralTeachers(SignalSource):
    """The source of the signals of all teachers, by the teachers' names.

    route: the column of the data with the name of each document's teacher. If it is None, all teachers score all
        documents.
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

    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        """Request the signals. A teacher with `steps_ahead` = 0 gets its request only when `result` is called."""
        rows = None if self._route is None else self._rows(micro_batches, self._route)
        views = {name: self._view(micro_batches, name, rows) for name in self.teachers}
        pending: dict[str, PendingSignals] = {}
        for name, source in self.teachers.items():
            deferred = PendingSignals(partial(self._signals_of, name, views[name]))
            pending[name] = source.request(views[name]) if source.steps_ahead else deferred
        return PendingSignals(partial(self._result, pending, len(micro_batches), rows))

    def _result(
        self, pending: Mapping[str, PendingSignals], micro_batches: int, rows: "_RoutedRows | None"
    ) -> Sequence[Signals]:
        teachers = {name: signals.result() for name, signals in pending.items()}
        results: list[Signals] = []
        for number in range(micro_batches):
            named = {name: signal for name, signals in teachers.items() for signal in signals[number].values()}
            if rows is not None:
                routed = {name: RoutedSignal(signal, rows[1][number][name]) for name, signal in named.items()}
                if not self._heads_are_sharded:  # sharded heads are all kept: every rank must gather them
                    # teachers without rows are dropped, but at least one is kept
                    with_rows = {name: signal for name, signal in routed.items() if len(signal.index)}
                    routed = with_rows or dict([*routed.items()][:1])
                named = dict(routed)
            results.append(named)
        return results

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

    def _rows(self, micro_batches: ShardedMicroBatches, route: str) -> "_RoutedRows":
        on_cpu = []
        for batch in micro_batches.on_cpu:
            index, document_T = batch.valid_index, batch.document_T
            documents, place_C = document_T[index].unique(return_inverse=True)
            names = [micro_batches.all_ranks.value(document, route) for document in documents.tolist()]
            is_of = {name: torch.tensor([other == name for other in names]) for name in self.teachers}
            on_cpu.append({name: index[is_of_D.bool()[place_C]] for name, is_of_D in is_of.items()})
        device = self._student.device
        return on_cpu, [{name: copied_to(index, device) for name, index in rows.items()} for rows in on_cpu]

    def _view(self, micro_batches: ShardedMicroBatches, name: str, rows: "_RoutedRows | None") -> ShardedMicroBatches:
        """The micro-batches with one teacher's inputs and, with a route, only the rows of that teacher."""
        step, view = micro_batches.all_ranks.for_teacher(name), micro_batches
        if step is not micro_batches.all_ranks:
            view = shard_micro_batches(step, self._student.mesh, uniform_shapes=micro_batches.uniform_shapes)
        if rows is None:
            return view
        on_cpu, routed = (
            [replace(batch, valid_index=rows_of[name]) for batch, rows_of in zip(batches, rows_by_batch, strict=True)]
            for batches, rows_by_batch in zip((view.on_cpu, view), rows, strict=True)
        )
        return ShardedMicroBatches(routed, view.all_ranks, uniform_shapes=view.uniform_shapes, on_cpu=on_cpu)

    def close(self) -> None:
        for teacher in self.teachers.values():
            teacher.close()


#: two lists, on the CPU and on the device. They have, for each micro-batch of this process, the indices of the rows
#: with a non-zero weight, by the name of their teacher
_RoutedRows = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]
