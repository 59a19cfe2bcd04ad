"""Wrong servers are reported before torch is imported, and servers that load their model are waited for."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kit import first_is_quick
from kit.ranks import free_port
from kit.runs import Command, wait_for, write_run
from kit.stub_servers import QuietHandler, listen

from stillhouse.config import load_config
from stillhouse.run.local_checks import check_local
from stillhouse.run.server_checks import server_mistakes

#: runs the command, and prints whether a library was imported that takes seconds
COMMAND = """
import sys
from stillhouse.cli import run
code = run(sys.argv[1:])
print(code, {"torch", "transformers", "numpy"} & {*sys.modules})
"""
RUN = """
student: {model: student}
teacher: {}
data: {train: train.jsonl, eval: 0}
out: runs/a
"""
#: the needs of `stillhouse distill`
NEW_RUN = ("data", "run", "servers of a new run")
#: the status and the body of all answers of a server, and a part of the error
ANSWERS: dict[str, tuple[int, Any, str]] = {
    "HTML": (
        200,
        b"<html>hello</html>",
        "whose answers are not those of `stillhouse serve`, vLLM or SGLang (/v1/info: 200",
    ),
    "no path": (404, {"detail": "Not Found"}, "/v1/models: 404"),
    "another API": (200, {"data": [{"id": "a", "owned_by": "somebody"}]}, "are not those of"),
    "a token is needed": (401, {"error": {"message": "no"}}, "answers 401: check the bearer token (token_variable)"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """The addresses of servers that accept connections and never answer."""
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        yield [f"http://127.0.0.1:{one.getsockname()[1]}" for one in bound]


def answering(status: int, content: Any) -> str:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.reply(status, content)

    return f"http://127.0.0.1:{listen(Handler).server_port}"


def problems(*overrides: str) -> list[str]:
    return [str(mistake) for mistake in server_mistakes(load_config("run.yaml", overrides), must_listen=True)]


@pytest.mark.parametrize("command", first_is_quick(["check", "distill"]))
def test_a_wrong_server_is_named_before_torch_is_imported(folder: Path, silent: list[str], command: str) -> None:
    """Two silent servers of a teacher and one of a reward: the time limit is that of all of them together."""
    reward = ["objective.loss=policy_gradient + reverse_kl", "rollout.max_new_tokens=8"]
    words = [f"teacher.url=[{silent[0]},{silent[1]}]", f"rollout.reward={silent[0]}/reward", *reward]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, command, "run.yaml", *words], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - started < 60  # one after the other, and with models, they would take longer
    assert done.stdout == "2 set()\n"
    lines = done.stderr.removeprefix("error: ").splitlines()
    keys = ["teacher.url", "teacher.url", "rollout.reward"]
    for line, key, url in zip(lines, keys, [*silent, silent[0]], strict=True):
        assert line.startswith(f"{key}: got {url}")
        assert re.search("which (accepts connections but does not answer /|has not answered within 5 seconds)", line)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_server_of_another_kind(folder: Path, name: str) -> None:
    status, content, error = ANSWERS[name]
    url = answering(status, content)
    [problem] = problems(f"teacher.url={url}")
    assert problem.startswith(f"teacher.url: got {url}, ")
    assert error in problem
    assert "\n" not in problem
    # a reward's server has no description, so any answer shows that it is there
    assert not problems("teacher.model=student", f"rollout.reward={url}/r", "objective.loss=policy_gradient")


@pytest.mark.parametrize(
    "overrides",
    [
        ["teacher.url=http://127.0.0.1:9"],
        ["teacher.url=http://no-such-host.invalid:8000"],
        [
            "teacher.model=student",
            "rollout.url=http://127.0.0.1:9",
            "rollout.engine=vllm",
            "objective.loss=reverse_kl",
        ],
        ["teacher.model=student", "eval.prompts={data: d.jsonl, reward: 'http://127.0.0.1:9/r'}"],
    ],
)
def test_a_server_that_is_not_there(folder: Path, overrides: list[str]) -> None:
    [problem] = problems(*overrides)
    assert re.search(r"where no server can be reached now \(.+\): start it first, or correct the address", problem)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_passes(folder: Path, status: int) -> None:
    assert not problems(f"teacher.url={answering(status, {'error': {'message': 'loading'}})}")


def test_a_named_kind_may_be_a_gateway(folder: Path) -> None:
    url = answering(200, {"data": [{"id": "a", "owned_by": "somebody"}]})
    assert not problems(f"teacher.url={url}", "teacher.api=vllm", "teacher.signal=top_k")
    assert problems(f"teacher.url={answering(200, b'<html>')}", "teacher.api=vllm", "teacher.signal=top_k")


def test_a_run_waits_for_servers_that_start_with_it(folder: Path) -> None:
    config = load_config("run.yaml", ["teacher.url=http://127.0.0.1:9"])
    check_local(config, NEW_RUN)
    with pytest.raises(ValueError, match="no server can be reached"):
        check_local(config, ("data", "run", "servers"))
    for url in ("http://no-such-host.invalid:8000", answering(200, b"<html>")):
        config = load_config("run.yaml", [f"teacher.url={url}"])
        with pytest.raises(ValueError, match=f"got {url}, wh"):
            check_local(config, NEW_RUN)
    (folder / "runs" / "a" / "checkpoints").mkdir(parents=True)
    check_local(config, NEW_RUN)


def load_later(gate: str) -> None:
    from stillhouse.serving.server import run_server

    served_teacher: Any = run_server.ServedTeacher

    def load(*arguments: Any) -> Any:
        while not Path(gate).exists():
            time.sleep(0.05)
        return served_teacher(*arguments)

    run_server.ServedTeacher = load  # type: ignore[assignment,misc]


@pytest.mark.slow
def test_check_waits_for_a_server_that_loads_its_model(tmp_path: Path) -> None:
    gate, port = tmp_path / "gate", free_port()
    url = f"http://127.0.0.1:{port}"
    write_run(tmp_path, **{"teacher.model": None, "teacher.url": url})
    arguments = ("serve", tmp_path / "teacher", "--port", str(port), "--device", "cpu")
    server = Command(*arguments, hook=load_later, hook_arguments=(str(gate),))
    wait_for(lambda: is_loading(url), 180)
    check = Command("check", tmp_path / "run.yaml")
    waiting = f"waiting up to 600 seconds for {url}/v1/info (503 the model is being loaded)"
    wait_for(lambda: waiting in check.out, 180)
    assert check.process.is_alive()
    gate.touch()
    assert check.wait(180) == 0, check.err
    assert "gradient norm" in check.out
    server.process.terminate()
    assert server.wait() == 0


def is_loading(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz").status_code == 503
    except httpx2.TransportError:
        return False
