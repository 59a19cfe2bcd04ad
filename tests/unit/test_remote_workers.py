"""Calls in workers on another host, whose server is another process: results, records, sources, a lost host."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from kit.runs import wait_for
from kit.worker_processes import workers_of

from stillhouse.user_code import remote_workers
from stillhouse.user_code.functions import REWARD
from stillhouse.user_code.remote_workers import RemoteHost
from stillhouse.user_code.worker_pool import HostLostError, LostError, WorkerPool

FUNCTIONS = [(REWARD, "remote_functions:parent")]
CODE = """
import os, time

def parent(prompt, completion, record, turns=()):
    time.sleep(0.3)
    if turns:
        return len(turns[1]["text"])
    if completion == "dies":
        os._exit(0)
    return os.getppid()
"""
SERVER = """
import sys
sys.path[:0] = sys.argv[1:2]
from stillhouse.user_code.remote_workers import WorkerServer
functions, token = [tuple(sys.argv[2:4])], bytes.fromhex(sys.argv[4])
server = WorkerServer(functions, seconds=float(sys.argv[5]), memory_gib=None, host="127.0.0.1", token=token)
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""
TOKEN = secrets.token_bytes(32)


@contextmanager
def served(folder: Path, seconds: float = 60.0) -> Iterator[tuple[RemoteHost, subprocess.Popen[str]]]:
    """Another host, whose modules are in `folder`, and the process of its server."""
    command = [sys.executable, "-c", SERVER, str(folder), *FUNCTIONS[0], TOKEN.hex(), str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield RemoteHost("second", "127.0.0.1", int(process.stdout.readline()), TOKEN), process


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "remote_functions.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)


def test_both_hosts_answer_and_a_lost_host_is_replaced(tmp_path: Path) -> None:
    warnings: list[str] = []
    with served(tmp_path) as (host, process):
        host.require_server()
        with closing(WorkerPool(FUNCTIONS, 2, seconds=60.0, hosts=[host], warn=warnings.append)) as pool:
            call = pool.caller(REWARD)

            def parents() -> set[float]:
                return {future.result(60) for future in [call("", "", {"a": [1, None]}, "a:1") for _ in range(8)]}

            wait_for(lambda: len(parents()) == 2)
            assert process.pid in parents()
            turns = [{"role": "student", "text": "a"}, {"role": "environment", "text": "4 ×"}]
            assert {call("", "", {}, "a:1", turns).result(60) for _ in range(4)} == {3}
            with pytest.raises(ValueError, match=r"^a:1: the record cannot be sent as JSON .*JSON changes it"):
                call("", "", {"a": (1,)}, "a:1").result(60)
            with pytest.raises(ValueError, match="with exit code 0 for the completion 'dies' of a:2"):
                call("", "dies", {}, "a:2").result(60)
            process.kill()
            assert len(parents()) == 1
            assert [line.partition("workers on second (127.0.0.1)")[1] != "" for line in warnings] == [True]


@pytest.mark.parametrize("size", [0, 16_000_000])
@pytest.mark.parametrize(
    ("stopped", "words"),
    [("host", "^the workers on second .* have not answered for 1.5 s"), ("worker", "does not return within 1 s")],
)
def test_stopped_hosts_and_workers_are_lost_also_if_a_record_does_not_fit_into_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str, words: str, size: int
) -> None:
    monkeypatch.setattr(remote_workers, "_SECONDS_LATER", 0.5 if stopped == "host" else 30.0)
    with served(tmp_path, seconds=1.0) as (host, process):
        worker = host.start()
        worker.require_started()
        pid = process.pid if stopped == "host" else workers_of(process.pid)[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(LostError, match=words) as raised:
                worker.call(0, ("", "", {"text": size * "a"}, "a:1"), 1.0)
            assert isinstance(raised.value, HostLostError) == (stopped == "host")
        finally:
            worker.end()
            process.kill()


def test_who_lacks_the_token_gets_no_worker(tmp_path: Path) -> None:
    with served(tmp_path) as (host, _):
        address, port = host._address
        with pytest.raises(ValueError, match=rf"no connection to the workers on second .*port {port}"):
            RemoteHost("second", address, port, secrets.token_bytes(32)).require_server()


def test_hosts_with_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "remote_functions.py").write_text(f"{CODE}\n# changed\n")
    with (
        served(tmp_path / "other") as (host, _),
        closing(WorkerPool(FUNCTIONS, 1, seconds=60.0, hosts=[host])) as pool,
    ):
        calls = [pool.caller(REWARD)("", "", {}, "a:1") for _ in range(8)]
        errors = {str(error) for call in calls if (error := call.exception(60)) is not None}
        assert any("import another file as module remote_functions on" in error for error in errors), errors
