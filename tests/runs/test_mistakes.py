"""Mistakes that users make, each in a process of its own: one line that says what to do, the right exit code.

tests/kit/mistakes/*.yaml lists them. `run` is the command line in a folder with run.yaml, the models `student` and
`teacher`, train.jsonl and eval.jsonl; `files` are written first (a value of null removes a file), and `environment`
are variables. `fresh` asks for a process that has imported nothing yet. `error` is a part of what is printed on
stderr, or a list of parts, and `code` the exit code. Nothing that was in the folder may change.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.runs import Command, contents, write_run
from ruamel.yaml import YAML

LISTS = sorted((Path(__file__).parents[1] / "kit" / "mistakes").glob("*.yaml"))
MISTAKES = [
    (f"{path.stem}: {mistake['name']}", mistake)
    for path in LISTS
    for mistake in YAML(typ="safe").load(path.read_text(encoding="utf-8"))
]
#: every so many-th mistake is tried in `make test`, if it needs no fresh process, and those that are marked `quick`
QUICK = 12


def is_quick(number: int, mistake: dict[str, Any]) -> bool:
    return "quick" in mistake or (number % QUICK == 0 and "fresh" not in mistake)


CASES = [
    pytest.param(mistake, id=name, marks=() if is_quick(number, mistake) else pytest.mark.slow)
    for number, (name, mistake) in enumerate(MISTAKES)
]
RUN = """
student: {model: student}
teacher: {model: teacher}
data: {train: train.jsonl, eval: eval.jsonl, max_tokens: 32}
objective: {loss: 0.3*cross_entropy + 0.7*jsd(0.5)}
train: {tokens_per_step: 128, micro_batch_tokens: 64, steps: 2, learning_rate: 1e-3, precision: fp32}
device: cpu
out: runs/a
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    write_run(folder)
    (folder / "run.yaml").write_text(RUN, encoding="utf-8")
    return folder


def in_process(
    arguments: list[str], place: Path, environment: dict[str, str], *, is_fresh: bool
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command. is_fresh: in a process that has imported nothing yet."""
    if is_fresh:
        command_line, variables = [sys.executable, "-m", "stillhouse", *arguments], os.environ | environment
        done = subprocess.run(command_line, cwd=place, env=variables, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr
    command = Command(*arguments, hook=os.chdir, hook_arguments=(place,), environment=environment)
    return command.wait(120), command.out, command.err


@pytest.mark.parametrize("mistake", CASES)
def test_a_mistake_is_one_line(folder: Path, tmp_path: Path, mistake: dict[str, Any]) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name, content in mistake.get("files", {}).items():
        path = tmp_path / name
        if content is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    before = contents(tmp_path)
    environment = {name: str(value) for name, value in mistake.get("environment", {}).items()}
    arguments = [str(argument) for argument in mistake["run"]]
    code, out, err = in_process(arguments, tmp_path, environment, is_fresh=mistake.get("fresh", False))
    shown = f"{' '.join(arguments)}\nexit code {code}, expected {mistake['code']}\n{out}\n{err}"
    assert code == mistake["code"], shown
    parts = [mistake["error"]] if isinstance(mistake["error"], str) else mistake["error"]
    assert all(part in err for part in parts), shown
    assert "Traceback" not in err + out, shown
    assert len(err.splitlines()) <= 10, shown
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before, shown
