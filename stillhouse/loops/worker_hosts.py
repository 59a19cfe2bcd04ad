"""The hosts of a job on which the user's functions run. All ranks together start and prove their servers."""

import os
import secrets
import socket
from collections.abc import Sequence

from stillhouse.config import RolloutConfig
from stillhouse.loops.completion_calls import worker_functions
from stillhouse.parallel import Ranks, local_rank
from stillhouse.user_code.remote_workers import RemoteHost, WorkerServer


class WorkerHosts:
    """The servers of workers of a job. Creating it is a collective of all ranks.

    hosts: on rank 0, the other hosts. Empty without workers and in a job on one host.

    Raises ValueError on all ranks if a host cannot listen, or if rank 0 cannot connect to it.
    """

    def __init__(self, rollouts: Sequence[RolloutConfig], ranks: Ranks):
        """rollouts: the section rollout for each source of prompts."""
        self.hosts: list[RemoteHost] = []
        self._server: WorkerServer | None = None
        if ranks.size == 1 or not (rollouts[0].workers and worker_functions(rollouts)):
            return
        token = bytes.fromhex(ranks.from_first(secrets.token_hex(32)))
        is_other = local_rank() == 0 and not ranks.is_first
        addresses = ranks.gather_results(
            lambda: self._listen(rollouts, token) if is_other else ("", "", 0), ValueError
        )
        if ranks.is_first:
            self.hosts = [RemoteHost(name, host, port, token) for name, host, port in addresses if name]
        ranks.on_first(self._require_servers, ValueError)

    def _listen(self, rollouts: Sequence[RolloutConfig], token: bytes) -> tuple[str, str, int]:
        rollout, host = rollouts[0], ""
        try:
            host = address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            self._server = WorkerServer(
                worker_functions(rollouts),
                seconds=rollout.worker_timeout,
                memory_gib=rollout.worker_memory,
                host=host,
                token=token,
            )
        except OSError as error:
            raise ValueError(f"rollout.workers: {socket.gethostname()} cannot listen on {host!r}: {error}") from error
        return socket.gethostname(), host, self._server.port

    def _require_servers(self) -> None:
        for host in self.hosts:
            host.require_server()

    def close(self) -> None:
        """End the workers of this host."""
        if self._server is not None:
            self._server.close()


def address_towards(host: str, port: int) -> str:
    """This machine's address on the network by which it reaches another one. Sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as end:
        end.connect(address)
        return str(end.getsockname()[0])
