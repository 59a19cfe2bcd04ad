"""Exchanges values and errors between the processes of a group."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store, _get_default_store

from stillhouse.config import ConfigError
from stillhouse.dry_run import replaceable
from stillhouse.parallel.host_memory import copied_to

#: the sizes in bytes of the two parts of the first message of `Ranks.exchange`: the content's length, and the first
#: bytes of the content. A step's metrics fit into the second part
LENGTH_BYTES, FIRST_BYTES = 8, 1016
_SECONDS_BETWEEN_LOOKS = 0.02

Item = TypeVar("Item")


class Ranks:
    """The processes of a group, or a single process without a group. The methods that exchange values are collectives
    of the group. Values other than tensors, numbers and bytes are sent as JSON.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device):
        self.group, self.device = group, device

    @classmethod
    def all_of_job(cls, device: torch.device) -> "Ranks":
        """Return all processes of the job, which must be connected already."""
        return cls(dist.group.WORLD if dist.is_initialized() else None, device)

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this process's share of a list that all processes have: each `size`-th item, from item `rank` on."""
        return items[self.rank :: self.size]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self.group is None:
            return [value]
        return [json.loads(content) for content in self.exchange(json.dumps(value).encode())]

    @replaceable
    def exchange(self, content: bytes) -> list[bytes]:
        """Return the contents of all processes of a group, by rank. The first message has a content's length and its
        first `FIRST_BYTES` bytes. A second message follows only if a process has a longer content.
        """
        header = len(content).to_bytes(LENGTH_BYTES, "little")
        texts = self.exchange_padded(header + content[:FIRST_BYTES], LENGTH_BYTES + FIRST_BYTES).numpy()
        lengths = [int.from_bytes(text[:LENGTH_BYTES].tobytes(), "little") for text in texts]
        if max(lengths) > FIRST_BYTES:
            rest = self.exchange_padded(content[FIRST_BYTES:], max(lengths) - FIRST_BYTES).numpy()
            texts = np.concatenate([texts, rest], axis=1)
        ends = [LENGTH_BYTES + length for length in lengths]
        return [text[LENGTH_BYTES:end].tobytes() for text, end in zip(texts, ends, strict=True)]

    def exchange_padded(self, content: bytes, longest: int) -> Tensor:
        """Return the contents of all processes, padded with zeros to `longest` bytes [ranks, longest], on the CPU.
        The call waits for the device once.
        """
        encoded = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
        sent = copied_to(encoded, self.device)
        texts = sent.new_empty(self.size, longest)
        dist.all_gather(list(texts), sent, group=self.group)
        return texts.cpu()

    def from_first(self, value: Any) -> Any:
        """Return the first process's value on all processes. The values of all other processes are ignored."""
        if self.group is None:
            return value
        content = json.dumps(value).encode() if self.is_first else b""
        length = torch.tensor([len(content)], device=self.device)
        dist.broadcast(length, group=self.group, group_src=0)
        text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if self.is_first:
            text.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(text, group=self.group, group_src=0)
        return value if self.is_first else json.loads(text.cpu().numpy().tobytes())

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, on the device of `values`."""
        if self.group is None:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def largest(self, number: int) -> int:
        """Return the maximum of the processes' numbers, by an all-reduce of one integer."""
        if self.group is None:
            return number
        numbers = torch.tensor(number, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return int(numbers)

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    @contextmanager
    def all_raise(self, *kinds: type[BaseException]) -> Iterator[list[Any]]:
        """If the block raises an error of one of these kinds on any process, raise it on all processes.

        So no process waits in its next collective for a process that has failed. If several processes fail, the
        error whose kind is first in `kinds` is raised; if several errors have this kind, the error of the lowest
        rank. Yields a list to which the block can add results. After the block, the list has the results of all
        processes, by rank.
        """
        results: list[Any] = []
        if self.size == 1:
            yield results
            return
        failure: BaseException | None = None
        try:
            yield results
        except kinds as error:
            failure = error
        encoded = None if failure is None else _encoded(failure, kinds)
        answers = self.gather([encoded, results])
        failed = [rank for rank, (error, _) in enumerate(answers) if error is not None]
        if failed:
            rank = min(failed, key=lambda rank: answers[rank][0][0])
            kind, arguments = answers[rank][0]
            # the failed rank raises the same type as all others, because callers may treat a subclass differently
            raise kinds[kind](*arguments) from (failure if rank == self.rank else None)
        results[:] = [result for _, rank_results in answers for result in rank_results]

    @contextmanager
    def shared(self, *kinds: type[BaseException]) -> Iterator["Shared"]:
        """Yield a `Shared`. After the block, all processes have the value that the first process has set in the
        block. If the block raises an error of one of these kinds on the first process, raise the error on all
        processes. On all other processes, the block must not communicate.
        """
        shared = Shared()
        if self.size == 1:
            yield shared
            return
        failure: BaseException | None = None
        try:
            yield shared
        except kinds as error:
            if not self.is_first:
                raise
            failure = error
        encoded = None if failure is None else _encoded(failure, kinds)
        encoded, shared.value = self.from_first([encoded, shared.value if failure is None else None])
        if encoded is not None:
            kind, arguments = encoded
            raise kinds[kind](*arguments) from failure


@dataclass
class Shared:
    """The value of a block of `Ranks.shared`."""

    value: Any = None


#: this process alone, even if the job has several processes
ONE_PROCESS = Ranks(None, torch.device("cpu"))


def _encoded(error: BaseException, kinds: Sequence[type[BaseException]]) -> list[Any]:
    """Return the index of the error's kind, and the arguments with which the kind creates an equal error."""
    kind = next(number for number, kind in enumerate(kinds) if isinstance(error, kind))
    if isinstance(error, ConfigError) and kinds[kind] is ConfigError:
        return [kind, [error.key, error.problem]]
    if isinstance(error, OSError) and error.errno is not None:
        return [kind, [error.errno, error.strerror]]
    return [kind, [str(error) or type(error).__name__]]


class EarlyMessages:
    """Sends messages to the first rank through the job's store, while the ranks' main threads compute. A message that
    arrives after the block of `received` is lost. So a later collective must send the content of each message again.
    """

    def __init__(self) -> None:
        # a separate connection, because the main thread blocks the group's connection to the store during a request
        self._store: Store = _get_default_store().clone()  # type: ignore[attr-defined]  # torch's stubs lack it (2.13)

    def send(self, box: str, value: Any) -> None:
        """Send a message to the first rank. box: a name that the ranks have agreed on."""
        number = self._store.add(f"{box}/count", 1)
        self._store.set(f"{box}/{number}", json.dumps(value))

    @contextmanager
    def received(self, box: str, count: int, put: Callable[[Any], object]) -> Iterator[None]:
        """Call `put` with each message that arrives, in another thread, until the block ends. Only the first rank
        calls this. A block without an error must end with a collective that all ranks enter after they have sent
        their messages.

        box: a name that is used only once.
        count: the maximum number of messages; further messages are lost.
        put: a function whose ValueErrors are ignored.
        """
        stopped, left = threading.Event(), list(range(1, count + 1))

        def receive_all() -> None:
            try:
                while left:
                    while not self._store.check([f"{box}/{left[0]}"]):
                        if stopped.wait(_SECONDS_BETWEEN_LOOKS):
                            return
                    value = json.loads(self._store.get(f"{box}/{left[0]}"))
                    self._store.delete_key(f"{box}/{left.pop(0)}")
                    with suppress(ValueError):
                        put(value)
            except RuntimeError:  # torch's DistNetworkError, DistStoreError: the next collective fails, too
                return

        thread = threading.Thread(target=receive_all, name="early messages", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
        for name in [*left, "count"]:
            self._store.delete_key(f"{box}/{name}")
