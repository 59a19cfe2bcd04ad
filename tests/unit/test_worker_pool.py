"""Calls of a reward and an environment in worker processes: results, errors, lost workers, limits, nothing left."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit.add_ons import write_distribution
from kit.config_cases import refused_calls
from kit.runs import wait_for

import stillhouse
from stillhouse.user_code import function_calls, worker
from stillhouse.user_code.function_calls import FunctionCalls
from stillhouse.user_code.functions import UserFunctionError

CODE = """
import json, os, signal, struct, subprocess, sys, time
from pathlib import Path

def length(prompt, completion, record):
    assert "torch" not in sys.modules and "stillhouse.config" not in sys.modules
    record["seen"] = record.get("seen", 0) + 1
    return float(len(completion) + record["seen"])

def half(prompt, completion, record): return " a" + chr(0xd800)
def echo(prompt, completion, record): return None if completion else prompt + str(record["raw"])
def slow(prompt, completion, record): time.sleep(0.3); return 1.0
def nan(prompt, completion, record): return float("nan")
def raises(prompt, completion, record): raise KeyboardInterrupt
def ends(prompt, completion, record): os._exit(3)
def is_killed(prompt, completion, record): os.kill(os.getpid(), 9)
def hangs(prompt, completion, record): time.sleep(1000)
def holds_the_lock(prompt, completion, record): return 9**9**9
def leaks(prompt, completion, record): return len(bytearray(2**30))

def pid(prompt, completion, record): return os.getpid()

def answers_half(prompt, completion, record):
    marker = Path(record["marker"])
    if not marker.exists():
        marker.touch()
        os.write(descriptor := json.loads(sys.argv[1])["descriptor"], struct.pack("!Q", 100) + b'{"value"')
        if record["then"] == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(80):
            os.write(descriptor, b" ")
            time.sleep(0.2)
    return 2.0

def starts_a_program(prompt, completion, record):
    program = subprocess.Popen(["sleep", "1000"])
    Path(record["marker"]).write_text(f"{os.getpid()} {program.pid}")
    while True: time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker_functions.py").write_text(CODE)
    # an add-on that no function here uses, so that no worker may import it
    write_distribution(tmp_path, {"stillhouse.environments": {"gym": "no_such_module:Gym"}}, {})
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def pools() -> Iterator[list[FunctionCalls]]:
    opened: list[FunctionCalls] = []
    yield opened
    for pool in opened:
        pool.close()


def opened(pools: list[FunctionCalls], name: str, key: str = "rollout.reward", count: int = 1, **limits: Any) -> Any:
    path = f"worker_functions:{name}"
    pools.append(FunctionCalls([(key, path)], count, **limits))
    return partial(pools[-1].request, key, path)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_calls_get_copies_of_records_with_values_that_json_lacks(pools: list[FunctionCalls]) -> None:
    call = opened(pools, "length", count=2)
    record: dict[str, Any] = {"raw": b"bytes"}
    assert [call("", text, record, "a:1").result(60) for text in ("one", "three")] == [4.0, 6.0]
    reply = opened(pools, "echo", "rollout.environment")
    assert reply("2 + 2", "", record, "a:1").result(60) == "2 + 2b'bytes'"
    assert reply("2 + 2", "4", record, "a:1").result(60) is None
    assert record == {"raw": b"bytes"}
    with pytest.raises(ValueError, match=r"^a:1: the record cannot be sent to a process of rollout\.workers"):
        call("", "one", {"raw": lambda: 0}, "a:1").result(60)


def test_many_calls_run_at_once(pools: list[FunctionCalls]) -> None:
    call = opened(pools, "slow", count=4)
    call("", "", {}, "a:1").result(60)
    [future.result(60) for future in [call("", "", {}, "a:1") for _ in range(4)]]  # all are started
    started = time.monotonic()
    assert [future.result(60) for future in [call("", "", {}, "a:1") for _ in range(8)]] == [1.0] * 8
    assert time.monotonic() - started < 8 * 0.3


@pytest.mark.parametrize(("call", "words"), refused_calls("rewards in workers"))
def test_an_error_names_function_completion_and_line(pools: list[FunctionCalls], call: str, words: str) -> None:
    name, limits = eval(call)
    call = opened(pools, name, **limits)
    with pytest.raises(ValueError, match=rf"^rollout\.reward: worker_functions:{name} ") as raised:
        call("2 + 2 =", " 5", {"a": 4_000_000 * "1"}, "train.jsonl:3").result(60)
    assert words in str(raised.value)
    assert str(Path(stillhouse.__file__).parent) not in str(raised.value)


@pytest.mark.parametrize("size", [0, 400_000])
def test_a_stopped_worker_is_replaced(pools: list[FunctionCalls], size: int) -> None:
    call = opened(pools, "pid", seconds=1.0)
    stopped = int(call("", "", {}, "a:1").result(60))
    os.kill(stopped, signal.SIGSTOP)
    assert call("", "", {"text": size * "a"}, "a:1").result(10) != stopped
    assert not is_running(stopped)


@pytest.mark.parametrize("then", ["stops", "drips"])
def test_a_worker_with_half_an_answer_is_replaced(pools: list[FunctionCalls], tmp_path: Path, then: str) -> None:
    call = opened(pools, "answers_half", seconds=1.0)
    assert call("", "", {"marker": str(tmp_path / "marker"), "then": then}, "a:1").result(10) == 2.0


@pytest.mark.parametrize(
    ("signals", "of_run"),
    [((), None), ((), signal.SIGKILL), ((signal.SIGSTOP,), None), ((signal.SIGSTOP,), signal.SIGKILL)],
    ids=["closed", "killed", "closed while all is stopped", "killed while all is stopped"],
)
def test_nothing_is_left_of_a_pool_or_a_run(tmp_path: Path, signals: tuple[int, ...], of_run: int | None) -> None:
    """Neither the worker nor the program that the function has started, although the function hangs."""
    marker, ends = tmp_path / "marker", tmp_path / "ends"
    child = os.fork()
    if not child:
        path = "worker_functions:starts_a_program"
        pool = FunctionCalls([("rollout.reward", path)], 1)
        pool.request("rollout.reward", path, "", "", {"marker": str(marker)}, "a:1")
        while not ends.exists():
            time.sleep(0.05)
        pool.close()
        os._exit(0)
    wait_for(lambda: marker.exists() and " " in marker.read_text())
    processes = [int(pid) for pid in marker.read_text().split()]
    for number in signals:
        os.killpg(os.getpgid(processes[0]), number)
    assert all(map(is_running, processes))
    if of_run is None:
        ends.touch()
    else:
        os.kill(child, of_run)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -(of_run or 0)
    wait_for(lambda: not any(map(is_running, processes)))


def test_a_module_that_cannot_be_imported_any_more(
    pools: list[FunctionCalls], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker_functions.py").write_text("1 / 0")
    call = opened(pools, "length")
    with pytest.raises(ValueError, match="importing worker_functions raises ZeroDivisionError"):
        call("", "", {}, "a:1").result(60)
    (tmp_path / "worker_functions.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(worker, "SECONDS_TO_START", 0.5)
    late = r"worker_functions:length is not imported within 0\.5 s for the com"
    with pytest.raises(ValueError, match=late) as raised:
        opened(pools, "length")("", "", {}, "a:1").result(60)
    assert raised.type is UserFunctionError  # a `CallLostError` would become the reply of a tool


def test_a_machine_without_memory_for_a_process(pools: list[FunctionCalls], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(function_calls, "Worker", fails)
    message = "length needs a new process, which does not start .*Cannot allocate"
    with pytest.raises(ValueError, match=message) as raised:
        opened(pools, "length")("", "", {}, "a:1").result(60)
    assert raised.type is UserFunctionError
