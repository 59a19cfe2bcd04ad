"""How soon a command reports a typical mistake, before and after a change, and whether it names the mistake.

    git worktree add ../before aad7b6ec
    python -m benchmarks.feedback --before ../before --before-commit aad7b6ec

Each mistake is a command in a new process. The two source trees take turns, and the order is reversed in every
second round, because a shared machine's speed drifts. For each mistake: CPU seconds of the process and its children
(user and system) and wall seconds, as medians over the rounds, and the ratio of the CPU seconds. CPU seconds hardly
depend on other processes. Wall seconds do; of a server that never answers, they contain the wait.
Writes benchmarks/results/feedback-<date>.json.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from benchmarks.record import result_file, write_result

ROOT = Path(__file__).parents[1]
#: the seconds after which a command is stopped; a run waits for a server up to `teacher.timeout`, 600 by default
LIMIT = 45.0
FILES = {
    "broken.jsonl": '{"text": "a"\n',
    "answers.jsonl": '{"question": "a", "answer": "b"}\n',
    "types.yaml": "student: {model: student}\ndata: {train: train.jsonl}\ntrain: {steps: many}\nout: runs/a\n",
    "no_out.yaml": "student: {model: student}\nteacher: {model: student}\ndata: {train: train.jsonl}\n",
}
#: for each mistake, a command in the folder of `stillhouse demo --write text`, and a part of the message. {silent}
#: and {html} are the addresses of wrong servers
MISTAKES = {
    "misspelt key": ("distill run.yaml train.learning_rat=1e-3", "train.learning_rate"),
    "missing data file": ("distill run.yaml data.train=trian.jsonl", "no such file or folder: trian.jsonl"),
    "data without a usable column": (
        "distill run.yaml data.train=answers.jsonl",
        "answers.jsonl:1: no usable",
    ),
    "first record is broken": ("distill run.yaml data.train=broken.jsonl", "broken.jsonl:1: not valid JSON"),
    "unknown loss": ("distill run.yaml objective.loss=foward_kl", "did you mean forward_kl"),
    "wrong number in jsd()": ("distill run.yaml objective.loss=jsd(1.5)", "expected 0 < beta < 1"),
    "teacher without config.json": ("distill run.yaml teacher.model=empty", "empty is a folder without config.json"),
    "wrong YAML type": ("distill types.yaml", "train.steps: got 'many'"),
    "missing out": ("distill no_out.yaml", "out: required, but not given"),
    "unknown optimizer": ("distill run.yaml train.optimizer=adan", "train.optimizer: got 'adan'"),
    "server that never answers": ("distill run.yaml teacher.model=null teacher.url={silent}", "{silent}"),
    "server of HTML pages": ("distill run.yaml teacher.model=null teacher.url={html}", "{html}"),
    "no server": ("distill run.yaml teacher.model=null teacher.url=http://127.0.0.1:9", "http://127.0.0.1:9"),
}


class Report(NamedTuple):
    """How a command has ended. cpu, wall: seconds. is_named: whether it has printed one error with the mistake."""

    cpu: float
    wall: float
    is_named: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="root of the older source tree")
    parser.add_argument("--before-commit", required=True, help="its name in the result file")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    trees = {"before": arguments.before.resolve(), "after": ROOT}
    with tempfile.TemporaryDirectory() as scratch, servers() as addresses:
        folder = Path(scratch)
        write_folder(folder)
        cases = {}
        for name, (command, part) in MISTAKES.items():
            words, expected = command.format(**addresses).split(), part.format(**addresses)
            reports: dict[str, list[Report]] = {tree: [] for tree in trees}
            for turn in range(arguments.rounds):
                for tree in sorted(trees, reverse=turn % 2 == 0):
                    reports[tree].append(report(trees[tree], folder, words, expected))
            cases[name] = summary(reports)
            print(name, cases[name], flush=True)
    theme = "feedback: seconds until a typical mistake is reported"
    before = {"before": arguments.before_commit, "rounds": arguments.rounds, "limit_seconds": LIMIT}
    write_result(result_file("feedback"), {"theme": theme, **before, "cases": cases})


def write_folder(folder: Path) -> None:
    command = [sys.executable, "-m", "stillhouse", "demo", "--write", "text", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (folder / "empty").mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")


def report(tree: Path, folder: Path, words: list[str], expected: str) -> Report:
    """Run a command of a source tree in a new process."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "stillhouse", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            if time.monotonic() - started > LIMIT:
                process.kill()
            time.sleep(0.01)
        wall, (_, status, usage) = time.monotonic() - started, ended
        errors.seek(0)
        shown = errors.read().decode()
    is_named = os.WIFEXITED(status) and expected in shown and "Traceback" not in shown
    return Report(usage.ru_utime + usage.ru_stime, wall, is_named)


def summary(reports: dict[str, list[Report]]) -> dict[str, object]:
    cpu = {tree: statistics.median(one.cpu for one in ended) for tree, ended in reports.items()}
    return {
        "cpu_seconds": {tree: round(seconds, 2) for tree, seconds in cpu.items()},
        "cpu_after_over_before": round(cpu["after"] / cpu["before"], 3),
        "wall_seconds": {
            tree: round(statistics.median(one.wall for one in ended), 1) for tree, ended in reports.items()
        },
        "is_named": {tree: all(one.is_named for one in ended) for tree, ended in reports.items()},
    }


@contextmanager
def servers() -> Iterator[dict[str, str]]:
    """Wrong servers on this machine: one accepts connections and never answers, one answers with HTML."""

    class Html(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *arguments: object) -> None:
            pass

    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        html = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Html))
        Thread(target=html.serve_forever, daemon=True).start()
        stack.callback(html.shutdown)
        ports = {"silent": silent.getsockname()[1], "html": html.server_port}
        yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


if __name__ == "__main__":
    main()
