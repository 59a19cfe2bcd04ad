"""An on-policy job on two hosts whose cables are pulled: the trainer on both, its servers on one each.

The hosts are network namespaces on one machine, each with a cable to two networks; a third one holds the bridges of
the networks. A pulled cable loses all packets, and closes no connection. Needs the programs `ip` (iproute2) and
`nsenter` (util-linux), and root with CAP_SYS_ADMIN and CAP_NET_ADMIN. The weights go to the writer through a folder.
torchrun and its ranks are first started as docs/cluster.md starts them.
"""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from kit.on_policy_runs import SAME, assert_same_figures, write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import last_step, run, wait_for
from kit.serving import Server
from safetensors.torch import load_file
from torch import Tensor

#: the network of the ranks' collectives, and that of requests to servers, as many clusters have them
NETWORKS = {"fabric": "10.77.1", "ethernet": "10.77.2"}
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """A network namespace.

    number: the last number of its addresses. switch: the namespace with the bridges, where its cables end.
    """

    namespace: str
    number: int
    switch: str

    def address(self, network: str) -> str:
        return f"{NETWORKS[network]}.{self.number}"

    @property
    def path(self) -> str:
        return f"/run/netns/{self.namespace}"

    def start(self, *command: Any, **options: Any) -> subprocess.Popen[str]:
        """Start a program on this host. options: of `subprocess.Popen`."""
        return subprocess.Popen(["nsenter", f"--net={self.path}", *map(str, command)], text=True, **options)

    def set_cables(self, state: str, *networks: str) -> None:
        """Pull the cables to these networks ("down"), or put them in again ("up")."""
        for network in networks:
            _ip("-n", self.switch, "link", "set", f"{network}-{self.number}", state)


def enter(path: str) -> None:
    """Move this process to a host. A hook for `Command`: call it before the process has other threads."""
    with open(path) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts, or skip the test where namespaces cannot be made."""
    name = f"stillhouse-{os.getpid()}"
    switch, hosts = f"{name}-switch", (Host(f"{name}-1", 1, f"{name}-switch"), Host(f"{name}-2", 2, f"{name}-switch"))
    namespaces = [switch, *(host.namespace for host in hosts)]
    try:
        try:
            for namespace in namespaces:
                _ip("netns", "add", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            for network in NETWORKS:
                _ip("-n", switch, "link", "add", network, "type", "bridge")
                _ip("-n", switch, "link", "set", network, "up")
                for host in hosts:
                    _connect(host, network)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        yield hosts
    finally:
        for namespace in namespaces:
            if Path(f"/run/netns/{namespace}").exists():
                _ip("netns", "delete", namespace)


def _connect(host: Host, network: str) -> None:
    port = f"{network}-{host.number}"
    ends = ["link", "add", port, "type", "veth", "peer", "name", network, "netns", host.namespace]
    _ip("-n", host.switch, *ends)
    _ip("-n", host.switch, "link", "set", port, "master", network, "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address(network)}/24", "dev", network)
    _ip("-n", host.namespace, "link", "set", network, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


pytestmark = pytest.mark.slow
#: `train.timeout`, and the seconds for which a cable may be pulled without an end of the run
SECONDS, PAUSE = 10, 3
LIMIT = 180


class Job:
    """A torchrun on each host, with one rank each. Ends with the block."""

    def __init__(self, hosts: tuple[Host, Host], log: Path, *arguments: str):
        self.errors = [log.with_name(f"{log.name} {host.number}") for host in hosts]
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "fabric"}
        environment = os.environ | variables | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address('fabric')}:29500"),
        ]
        self.agents = []
        for host, errors in zip(hosts, self.errors, strict=True):
            # both hosts have the name of this machine, by which torchrun would know the first one
            place = ["--local-addr", host.address("fabric"), "--rdzv-conf", f"is_host={int(host is hosts[0])}"]
            command = [*launcher, *place, "-m", "stillhouse", "distill", *arguments]
            with errors.open("w") as stderr:
                self.agents.append(host.start(*command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()

    def reach(self, out: Path, step: int) -> None:
        """Wait until the log of the run has this step."""
        wait_for(lambda: last_step(out) >= step or not self.runs, LIMIT)
        assert self.runs, self.err

    @property
    def runs(self) -> bool:
        return all(agent.poll() is None for agent in self.agents)

    def wait(self) -> list[int]:
        return [agent.wait(LIMIT) for agent in self.agents]

    @property
    def err(self) -> str:
        return "".join(path.read_text() for path in self.errors)


def served(host: Host, folder: Path, *options: str) -> Server:
    """A `stillhouse serve` on a host."""
    address = ("--host", host.address("ethernet"), "--no-token")
    return Server(folder, *address, *options, hook=enter, hook_arguments=(host.path,))


def enter_host_of_rank(*paths: str) -> None:
    enter(paths[int(os.environ["RANK"])])


def flat_weights(folder: Path) -> Tensor:
    return torch.cat([weight.flatten() for _, weight in sorted(load_file(folder / "model.safetensors").items())])


def test_cables_are_pulled(tmp_path: Path) -> None:
    """Each rank has one server on its own host, and one on the other host.

    First, the second host loses its servers' network, then both networks, and is back before any time limit: the run
    waits, and goes on. Then it loses the ranks' network: both ranks end with an error that names the other one. The
    same command ends like a run of one process that writes and scores the completions by itself.
    """
    out, expected = tmp_path / "two hosts", tmp_path / "one process"
    settings = {"train.steps": 12, "checkpoint.every": 2, "rollout.max_new_tokens": 9, "train.timeout": SECONDS}
    write_on_policy_run(tmp_path, out=str(expected), **settings)
    run("distill", tmp_path / "run.yaml")
    with (
        two_hosts() as (first, second),
        served(first, tmp_path / "teacher") as teacher,
        served(second, tmp_path / "student", "--generate") as writer,
    ):
        arguments = [str(tmp_path / "run.yaml"), f"out={out}", "parallel.fsdp=2"]
        arguments += ["teacher.model=null", f"teacher.url={teacher.url}"]
        arguments += ["rollout.engine=stillhouse", f"rollout.url={writer.url}"]
        with Job((first, second), tmp_path / "first start", *arguments) as job:
            job.reach(out, 2)
            for networks in (("ethernet",), ("ethernet", "fabric")):
                second.set_cables("down", *networks)
                step = last_step(out)
                time.sleep(PAUSE)
                assert last_step(out) <= step + 1, "the run goes on although each rank has lost a server"
                second.set_cables("up", *networks)
                job.reach(out, step + 3)
            second.set_cables("down", "fabric")
            wait_for(lambda: all("(train.timeout)" in path.read_text() for path in job.errors), LIMIT)
            second.set_cables("up", "fabric")
            assert job.wait() == [1, 1], job.err
            errors = [path.read_text() for path in job.errors]
            assert "error: rank 1 (" in errors[0]
            assert f"has sent no heartbeat for {SECONDS} s (train.timeout)" in errors[0]
            assert f"error on rank 1: rank 0 on {first.address('fabric')}, which holds the job's store" in errors[1]
        assert last_step(out) < 12
        # quicker than with torchrun
        job_variables = {"MASTER_ADDR": first.address("fabric"), "GLOO_SOCKET_IFNAME": "fabric"}
        hook = {"hook": enter_host_of_rank, "hook_arguments": (first.path, second.path)}
        run_ranks(2, "distill", *arguments, store_in_rank_0=True, environment=job_variables, **hook)
    assert_same_figures(out, expected, SAME, "loss/total_nats_per_token")
    begin, end, expected_end = map(flat_weights, (tmp_path / "student", out / "model", expected / "model"))
    # not element by element: AdamW moves an element whose gradient is nearly 0 by its rounding. One step of twelve is
    # about 8 % of the update, and another size of micro-batches changes the update by 0.04 %
    assert (end - expected_end).norm() < 0.01 * (expected_end - begin).norm()
