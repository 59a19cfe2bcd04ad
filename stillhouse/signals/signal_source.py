"""The interface of all sources of teacher signals.

pending = source.request(micro_batches)     may be called up to `steps_ahead` steps before the signals are needed
signals = pending.result()                  for each of this process's micro-batches, by the teachers' names
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from stillhouse.models import Decoder
from stillhouse.objective import Signals
from stillhouse.parallel import ShardedMicroBatches


class PendingSignals(Protocol):
    """Signals that were requested but are possibly not computed yet."""

    def result(self) -> Sequence[Signals]:
        """Wait for the signals of this process's micro-batches, and return them by the teachers' names."""


class SignalSource(ABC):
    """A teacher, or several teachers.

    steps_ahead: how many steps in advance requests are made
    decoders: the teachers' models outside the student's stages, by the keys of their config sections
    """

    steps_ahead: int = 0
    decoders: Mapping[str, Decoder] = {}

    @abstractmethod
    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        """Request the signals of a step's micro-batches. A collective of all processes of the run."""

    def request_some(self, micro_batches: ShardedMicroBatches, numbers: Sequence[int]) -> PendingSignals:
        """As `request`, but only the micro-batches with these numbers (among those of all ranks) need signals."""
        return self.request(micro_batches)

    def close(self) -> None:  # noqa: B027 (most sources have nothing to abandon)
        """Abandon the requests in progress."""


class RequestedSteps(Iterator[tuple[ShardedMicroBatches, PendingSignals]]):
    """Each step's micro-batches and their signals, requested `source.steps_ahead` steps in advance.

    steps: builds the micro-batches of a step when it is asked for them. None: those of a later step than the present
        one do not exist yet; it is asked again at the next step.
    """

    def __init__(self, source: SignalSource, steps: Iterable[ShardedMicroBatches | None]):
        self._source, self._steps = source, iter(steps)
        self._built: deque[ShardedMicroBatches | None] = deque()
        self._requested: deque[tuple[ShardedMicroBatches, PendingSignals]] = deque()

    def build_next(self) -> None:
        """Build the micro-batches that the next `__next__` needs, while the device computes the present step.

        Their signals are not requested yet: a request may need the weights after the present step.
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


@dataclass(frozen=True)
class ReadySignals:
    """Signals that are available at once."""

    signals: Sequence[Signals]

    def result(self) -> Sequence[Signals]:
        return self.signals


@dataclass(frozen=True)
class DeferredSignals:
    """Signals that `result` computes or waits for."""

    result: Callable[[], Sequence[Signals]]


class NoTeacher(SignalSource):
    """The source for objectives without a divergence: no micro-batch has a signal."""

    def request(self, micro_batches: ShardedMicroBatches) -> ReadySignals:
        return ReadySignals([{}] * len(micro_batches))
