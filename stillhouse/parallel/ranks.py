"""Connects the processes that torchrun started, and exchanges values and errors between them."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world

from stillhouse.config import ConfigError
from stillhouse.display import print_escaped
from stillhouse.dry_run import replaceable
from stillhouse.parallel import watchdog
from stillhouse.parallel.host_memory import copied_to

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
#: in `Ranks.exchange`: bytes of a content's length, and of its first part. The metrics of a step fit into it
LENGTH_BYTES, FIRST_BYTES = 8, 1016
#: the minimum timeout of a collective, because rank 0 may take hours to write a large model. The watchdog finds hung
#: ranks earlier.
GROUP_SECONDS = 6 * 3600.0

Item = TypeVar("Item")


class Ranks:
    """The processes of a group. A single process has no group.

    Values must be representable in JSON. All methods except `share` are collectives of the group.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device):
        self.group, self.device = group, device

    @classmethod
    def all_of_job(cls, device: torch.device) -> "Ranks":
        """Return all processes of the job; they must be connected already."""
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
        """Return this process's share of a list that all processes have: every `size`-th item, from `rank` on."""
        return items[self.rank :: self.size]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank.

        The number of copies between device and host does not depend on the number of processes.
        """
        if self.group is None:
            return [value]
        return [json.loads(content) for content in self.exchange(json.dumps(value).encode())]

    @replaceable
    def exchange(self, content: bytes) -> list[bytes]:
        """Return the contents of all processes of a group, by rank.

        The first message has the length and the first bytes of a content. There is a second one only for more bytes.
        """
        header = len(content).to_bytes(LENGTH_BYTES, "little")
        first = _texts(self.exchange_padded(header + content[:FIRST_BYTES], LENGTH_BYTES + FIRST_BYTES))
        lengths = [int.from_bytes(text[:LENGTH_BYTES], "little") for text in first]
        rest = [b""] * self.size
        if max(lengths) > FIRST_BYTES:
            rest = _texts(self.exchange_padded(content[FIRST_BYTES:], max(lengths) - FIRST_BYTES))
        texts = [text[LENGTH_BYTES:] + more for text, more in zip(first, rest, strict=True)]
        return [text[:length] for text, length in zip(texts, lengths, strict=True)]

    def exchange_padded(self, content: bytes, longest: int) -> Tensor:
        """Return the contents of all processes [ranks, longest] in host memory. It waits for the device once."""
        encoded = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
        sent = copied_to(encoded, self.device)
        texts = sent.new_empty(self.size, longest)
        dist.all_gather(list(texts), sent, group=self.group)
        return texts.cpu()

    def from_first(self, value: Any) -> Any:
        """Return the first process's value on all processes; the values of all other processes are ignored."""
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
        """Return the largest number of all processes, by an all-reduce of one integer."""
        if self.group is None:
            return number
        numbers = torch.tensor(number, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return int(numbers)

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    @contextmanager
    def all_raise(self, *kinds: type[BaseException]) -> Iterator[None]:
        """If the block raises an error of one of these kinds on any process, raise it on all processes.

        Without this, the other processes would wait for the failed process in their next collective. If several
        processes fail, the kind that comes first in `kinds` decides, then the lowest rank.
        """
        if self.size == 1:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except kinds as error:
            failure = error
        self._raise(self.gather(None if failure is None else _encoded(failure, kinds)), failure, kinds)

    def gather_results(self, function: Callable[[], Any], *kinds: type[BaseException]) -> list[Any]:
        """Call a function on every process and return all results, by rank. Errors are raised as in `all_raise`."""
        if self.size == 1:
            return [function()]
        result, failure = None, None
        try:
            result = function()
        except kinds as error:
            failure = error
        answers = self.gather([None if failure is None else _encoded(failure, kinds), result])
        self._raise([encoded for encoded, _ in answers], failure, kinds)
        return [result for _, result in answers]

    def _raise(
        self, failures: Sequence[Any], local_failure: BaseException | None, kinds: Sequence[type[BaseException]]
    ) -> None:
        """Raise the error that `all_raise` describes, if any process has failed."""
        failed = [rank for rank, encoded in enumerate(failures) if encoded is not None]
        if not failed:
            return
        rank = min(failed, key=lambda rank: failures[rank][0])
        # the failed rank raises the same type as all other ranks, because callers may treat a subclass differently
        raise _decoded(failures[rank], kinds) from (local_failure if rank == self.rank else None)

    @contextmanager
    def shared(self, *kinds: type[BaseException]) -> Iterator["Shared"]:
        """Give all processes the value that the first one has at the end of the block.

        All processes raise its error if it is of one of these kinds. The block of the others must not communicate.
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
        if not self.is_first:
            message = self.from_first(None)
            if "error" in message:
                raise _decoded(message["error"], kinds)
            shared.value = message["result"]
        elif failure is None:
            self.from_first({"result": shared.value})
        else:
            encoded = _encoded(failure, kinds)
            self.from_first({"error": encoded})
            raise _decoded(encoded, kinds) from failure


@dataclass
class Shared:
    """The value of a block of `Ranks.shared`; it must be representable in JSON if there are several processes."""

    value: Any = None


#: only this process, also in a job of several processes
ONE_PROCESS = Ranks(None, torch.device("cpu"))


def _texts(encoded: Tensor) -> list[bytes]:
    return [text.tobytes() for text in encoded.numpy()]


def _encoded(error: BaseException, kinds: Sequence[type[BaseException]]) -> list[Any]:
    """Return the index of the error's kind, and the arguments from which `_decoded` creates the error again."""
    kind = next(number for number, kind in enumerate(kinds) if isinstance(error, kind))
    if isinstance(error, ConfigError) and kinds[kind] is ConfigError:
        return [kind, [error.key, error.problem]]
    if isinstance(error, OSError) and error.errno is not None:
        return [kind, [error.errno, error.strerror]]
    return [kind, [str(error) or type(error).__name__]]


def _decoded(encoded: Sequence[Any], kinds: Sequence[type[BaseException]]) -> BaseException:
    kind, arguments = encoded
    return kinds[kind](*arguments)


def process_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return this process's rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_processes() -> int:
    """Return the number of processes that torchrun started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def process_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_first() -> bool:
    """Whether this is rank 0 of the job, which writes and prints."""
    return process_rank() == 0


def log_rank0(line: str) -> None:
    """Print a line on rank 0 only. A line may quote a server or a file: it cannot control the terminal."""
    if is_first():
        print_escaped(line)


def start(device: torch.device, timeout: float) -> None:
    """Connect to the other processes that torchrun started.

    timeout: the watchdog regards a rank as hung after this number of seconds.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store, rank, processes = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun's store survives a restart and still has the addresses of dead processes (torch 2.13), so each
            # attempt gets another prefix. Only on a single machine, all processes have the same restart count.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        watchdog.start(store, rank, processes, timeout)
        # the watchdog finds a hung rank; a collective may also wait for a long save on rank 0
        limit = timedelta(seconds=max(2 * timeout, GROUP_SECONDS))
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=processes, timeout=limit)


def start_alone(device: torch.device) -> None:
    """Make a process group of this process alone, for a library that needs one."""
    if not dist.is_initialized():
        dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)


def wait_for_all() -> None:
    """Wait until all processes of the job have called this function."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def temporary_groups() -> Iterator[None]:
    """Destroy the process groups that the block creates. All processes must be ready with them at its end.

    A group keeps threads (gloo) or memory of the GPU (NCCL). Nothing else destroys the groups of a mesh or an engine.
    """
    before = set(_world.pg_map)
    yield
    wait_for_all()
    for group in [group for group in _world.pg_map if group not in before]:  # in the order of their creation
        dist.destroy_process_group(group)


def destroy_process_group() -> None:
    """Disconnect from the other processes, after all of them have finished."""
    if dist.is_initialized():
        dist.barrier()
        watchdog.stop()
        dist.destroy_process_group()
