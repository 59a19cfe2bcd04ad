"""The registered add-ons: of this project, of distributions that clash or are damaged, and of a checkout alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.add_ons import write_distribution
from kit.config_cases import refused_calls
from kit.runs import ROOT

from benchmarks import gpu
from stillhouse.objective.divergence_parameters import PARAMETERS
from stillhouse.objective.divergences import DIVERGENCES
from stillhouse.registry import GROUPS, load_all, registered

CSV = {"stillhouse.trackers": {"csv": "curves:Csv"}}
CURVES = {"curves.py": "class Csv:\n    capabilities = ('appends', 'one file')\n"}


def run_python(code: str, *folders: Path, isolated: bool = False) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose path begins with these folders. isolated: without installed distributions."""
    before = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]}\n"
    options = ["-S", "-I"] if isolated else ["-I"]
    return subprocess.run([sys.executable, *options, "-c", before + code], capture_output=True, text=True)


def test_the_projects_add_ons_are_light_and_complete() -> None:
    assert load_all("stillhouse.divergences") == PARAMETERS
    assert DIVERGENCES.keys() == PARAMETERS.keys()
    code = "from stillhouse.registry import *\nfor group in GROUPS: load_all(group)\nprint('torch' in sys.modules)"
    assert run_python(code, ROOT).stdout == "False\n"


def test_info_lists_all_add_ons_with_their_distributions(tmp_path: Path) -> None:
    write_distribution(tmp_path, CSV, CURVES, "stillhouse-curves")
    code = "from stillhouse.cli import run\nprint(run(['info']), 'torch' in sys.modules)"
    lines = run_python(code, tmp_path, ROOT).stdout.splitlines()
    assert re.fullmatch(r"python 3\S+, stillhouse 0\S+, torch 2\S+, transformers 5\S+", lines[0])
    at = lines.index("  csv                stillhouse-curves 1.0")
    assert lines[at + 1].strip() == "appends, one file"
    assert lines[-1] == "0 False"
    for group in GROUPS:
        for name, point in registered(group).items():
            assert point.dist is not None
            assert any(line.startswith(f"  {name:<18} stillhouse {point.dist.version}") for line in lines)


@pytest.mark.parametrize(("call", "error"), refused_calls("add-ons"))
def test_add_ons_that_clash_or_are_damaged_are_named(tmp_path: Path, call: str, error: str) -> None:
    groups, modules = eval(call)
    write_distribution(tmp_path, groups, modules, "add-on")
    failed = run_python("from stillhouse.registry import load_all\nload_all('stillhouse.trackers')", tmp_path, ROOT)
    assert re.search(f"^ValueError: {error}$", failed.stderr, re.MULTILINE), failed.stderr


def test_unknown_names_and_earlier_metadata_are_refused(tmp_path: Path) -> None:
    code = "from stillhouse.registry import load\nload('stillhouse.trackers', 'csv')"
    error = (
        "ValueError: got 'csv': expected one of mlflow, tensorboard, trackio, wandb; these are the installed trackers"
    )
    assert error in run_python(code, ROOT).stderr
    write_distribution(tmp_path, CSV, {}, "stillhouse")
    done = run_python("import stillhouse.config", tmp_path, ROOT)
    assert "ValueError: no kinds of environments and tools are registered (stillhouse.environments)" in done.stderr


def test_a_checkout_has_the_same_add_ons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    gpu.write_entry_points()
    code = "from stillhouse.registry import *\nprint({group: [*registered(group)] for group in GROUPS})"
    listed = run_python(code, tmp_path / ".gpu", ROOT, isolated=True)
    assert ast.literal_eval(listed.stdout) == {group: [*registered(group)] for group in GROUPS}, listed.stderr


@pytest.mark.parametrize(
    ("group", "key"),
    [
        ("stillhouse.environments", "rollout.temperature"),
        ("stillhouse.environments", "rollout.limit"),  # of the section rollout alone, not of sources of prompts
        ("stillhouse.parts", "objective.tokens"),
        ("stillhouse.engines", "parallel.fsdp"),
        ("stillhouse.sources", "teacher.revision"),
        ("stillhouse.sources", "teacher.json"),  # a method of pydantic's BaseModel
        ("stillhouse.sources", "teacher.removed"),
    ],
)
def test_an_add_on_with_the_name_of_another_key_is_refused(tmp_path: Path, group: str, key: str) -> None:
    """Otherwise it would take that key's value for its own, such as a temperature for an environment."""
    name = key.partition(".")[2]
    write_distribution(tmp_path, {group: {name: "kinds:Kind"}}, {"kinds.py": "class Kind: field = int, 0"})
    done = run_python("import stillhouse.config", tmp_path, ROOT)
    error = f"add_on 1.0 registers {name!r} in {group}, and {key} is the name of a key or an attribute "
    error += "already: register it under another name"
    assert f"ValueError: {error}\n" in done.stderr


def test_an_add_on_without_a_key_of_its_own_may_have_any_name(tmp_path: Path) -> None:
    text_environment = {"environment": "stillhouse.agents.environments:TextEnvironment"}
    write_distribution(tmp_path, {"stillhouse.environments": text_environment}, {}, "stillhouse-fork")
    kind = {"kinds.py": "class Kind:\n    field, rules = None, tuple\n"}
    write_distribution(tmp_path, {"stillhouse.parts": {"loss": "kinds:Kind"}}, kind)
    done = run_python("import stillhouse.config", tmp_path, ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("call", "error"), refused_calls("commands with an add-on"))
def test_a_command_names_a_refused_add_on(tmp_path: Path, call: str, error: str) -> None:
    arguments, code = eval(call)
    kind = {"kinds.py": "class Kind: field = int, 0"}
    write_distribution(tmp_path, {"stillhouse.engines": {"fsdp": "kinds:Kind"}}, kind)
    done = run_python(f"from stillhouse.cli import run\nprint(run({arguments.split()}))", tmp_path, ROOT)
    assert done.stdout == f"{code}\n", done.stderr
    assert re.fullmatch(error, done.stderr), done.stderr
