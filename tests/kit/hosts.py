"""Two hosts on one machine: network namespaces, each with a cable to two networks, which can be pulled.

    with two_hosts() as (first, second):
        first.start("python", "server.py", first.address("ethernet"))
        second.unplug("ethernet")

A third namespace holds the bridges of the networks. A pulled cable loses all packets, and closes no connection.
Needs the programs `ip` (iproute2) and `nsenter` (util-linux), and root with CAP_SYS_ADMIN and CAP_NET_ADMIN.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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

    def unplug(self, *networks: str) -> None:
        self._set(networks, "down")

    def plug(self, *networks: str) -> None:
        self._set(networks, "up")

    def _set(self, networks: Sequence[str], state: str) -> None:
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
