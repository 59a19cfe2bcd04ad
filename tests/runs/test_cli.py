"""The command line: its imports, its arguments, and its exit codes."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stillhouse
from stillhouse import cli
from stillhouse.cli.arguments import settings_layer
from stillhouse.config import load_config

HEAVY = ["torch", "transformers", "datasets", "numpy", "pydantic", "ruamel.yaml", "stillhouse.config"]


def imported(code: str) -> list[str]:
    """Return the heavy modules that a new interpreter has loaded after `code`."""
    report = f"import atexit, sys; atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules]))\n"
    done = subprocess.run([sys.executable, "-c", report + code], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert imported("import stillhouse; stillhouse.__version__; dir(stillhouse)") == []


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"], ["distill", "--help"], ["demo", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys; sys.argv = ['stillhouse', *{arguments}]\nfrom stillhouse.cli import main; main()"
    assert imported(code) == []


def test_every_public_name_is_there() -> None:
    for name in stillhouse.__all__:
        value = getattr(stillhouse, name)
        assert isinstance(value, str) or value.__module__.startswith("stillhouse."), name
        assert name in dir(stillhouse)
    assert stillhouse.load_config is load_config


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stillhouse' has no attribute 'lineer_objective'"):
        _ = stillhouse.lineer_objective


def test_the_names_for_type_checkers_are_the_lazy_ones() -> None:
    tree = ast.parse(Path(stillhouse.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    nodes = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    static = {alias.name: node.module for node in nodes for alias in node.names}
    assert static == {name: stillhouse._MODULES.get(name, "stillhouse.objective") for name in static}
    assert sorted(static) == sorted(stillhouse.__all__)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"stillhouse {stillhouse.__version__}\n"
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.run(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in ("distill", "check", "report", "demo"))
        assert "..." not in out.partition("Commands:")[2]


def test_options_come_over_the_file_and_overrides_over_both(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("student: {model: file, revision: main}\nout: file\nseed: 1\ndata: {train: file, eval: 0}\n")
    flags = {name: f"flag-{name}" for name in ("teacher", "student", "data", "out")}
    flags |= {"loss": "jsd(0.25)", "eval": "0.25"}
    config = load_config(path, ["out=override", "teacher.dtype=float32"], settings=settings_layer(flags))
    assert config.teacher is not None
    assert (config.student.model, config.student.revision, config.seed) == ("flag-student", "main", 1)
    assert (config.teacher.model, config.teacher.dtype) == ("flag-teacher", "float32")
    assert (config.data.train, config.data.eval, config.out) == ("flag-data", 0.25, "override")
    assert config.objective.loss == "jsd(0.25)"
    assert load_config(path, settings=settings_layer({"eval": "held.jsonl"})).data.eval == "held.jsonl"
    config = load_config(None, settings=settings_layer({"student": "1e5", "data": "a: b", "out": "null"}))
    assert (config.student.model, config.data.train, config.out) == ("1e5", "a: b", "null")  # text, and no YAML


def test_a_file_whose_folder_has_an_equals_sign_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lr=2e-5" / "run.yaml"
    path.parent.mkdir()
    path.write_text("sed: 1\n")
    assert cli.run(["distill", str(path)]) == 2
    assert "sed: unknown key; did you mean seed?" in capsys.readouterr().err


@pytest.mark.parametrize("shown", [True, False])
def test_a_traceback_on_request(
    shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STILLHOUSE_TRACEBACK", "1" if shown else "")
    assert cli.run(["distill", "seed=a"]) == 2
    stderr = capsys.readouterr().err
    assert ("Traceback" in stderr) == shown
    assert "error: student.model: required" in stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_an_interrupted_run_says_how_to_continue(tmp_path: Path) -> None:
    pipe = tmp_path / "run config.yaml"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "stillhouse", "distill", str(pipe), "seed=1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    # this returns when the command opens its configuration; the command then waits for content forever
    with pipe.open("w"):
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"interrupted; `stillhouse distill '{pipe}' seed=1` continues from the run's last checkpoint" in stderr
    assert "Traceback" not in stderr


def test_no_output_of_a_command_controls_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of files, tasks, models and servers may hold escape sequences: one function prints them all."""
    assert cli.run(["task", "reversal", "--count", "2", "--out", f"{tmp_path}/a\x1b[2J\x9b.jsonl"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/a\\x1b[2J\\x9b.jsonl: 2 problems\n"
    package = Path(cli.__file__).parent
    modules = [*package.glob("*.py"), *package.parent.glob("*/command.py")]
    calls = re.findall(r"\b(?:echo|print)\(.*", "".join(path.read_text(encoding="utf-8") for path in modules))
    assert calls == ["echo(context.get_help())"]
