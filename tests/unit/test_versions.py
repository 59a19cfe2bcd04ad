"""pyproject.toml, constraints and docs/versions.md agree, features name the version that they need, and the wheel.

The wheel runs in an environment without the checkout, which sees the libraries of the development environment through
a .pth file, but not the editable package.
"""

import configparser
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_string
from importlib.metadata import version
from pathlib import Path

import pytest
from kit.runs import write_run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import stillhouse
from stillhouse import libraries
from stillhouse.libraries import FEATURES, Needs, is_at_least, require_feature

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: extras for development alone, whose bounds are not tested
TOOLS = ("test", "dev", "site")


def bounds() -> dict[str, str]:
    """The oldest version of each library that a user can install; the tools of development are exempt."""
    extras = PROJECT["optional-dependencies"]
    lines = PROJECT["dependencies"] + [line for name, extra in extras.items() if name not in TOOLS for line in extra]
    requirements = [requirement for requirement in map(Requirement, lines) if requirement.name != PROJECT["name"]]
    oldest = {}
    for requirement in requirements:
        (bound,) = [part.version for part in requirement.specifier if part.operator == ">="]
        oldest[canonicalize_name(requirement.name)] = bound
    return oldest


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").split()
    return {canonicalize_name(name): pin for name, pin in (line.split("==") for line in lines)}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of docs/versions.md, without the table's head."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert len(lines) > 2, f"docs/versions.md has no table under '{heading}'"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_bounds_are_those_that_were_tested() -> None:
    documented = {canonicalize_name(name): oldest for name, oldest, *_ in rows("Oldest and newest versions")}
    assert documented == bounds()
    oldest = pinned("constraints-oldest.txt")
    assert oldest.keys() == bounds().keys()
    assert {name: Version(pin) for name, pin in oldest.items()} == {
        name: Version(pin) for name, pin in bounds().items()
    }
    pins = pinned("constraints.txt")
    assert all(Version(pins[name]) >= Version(bound) for name, bound in bounds().items() if name in pins)
    classified = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python ::" in line}
    assert classified == {python for python, *_ in rows("Installing")}
    assert f">={min(classified, key=Version)}" == PROJECT["requires-python"]


def test_features_that_need_later_versions_are_documented() -> None:
    documented = {feature: (library, oldest) for feature, library, oldest, *_ in rows("What needs a later version")}
    assert documented == {feature: (needs.library, needs.version) for feature, needs in FEATURES.items()}
    for library, oldest, _ in FEATURES.values():
        assert Version(oldest) > Version(bounds()[library]), f"{library} {oldest} is not later than the bound"


def test_a_feature_without_its_library_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEATURES, "a feature", Needs("torch", "99.1", "earlier versions lack it"))
    installed = re.escape(version("torch"))
    with pytest.raises(ValueError, match=rf"^a feature needs torch 99\.1 or later, and {installed} is installed: "):
        require_feature("a feature")


@pytest.mark.parametrize(
    ("installed", "oldest", "expected"),
    [
        *(("2.9.1", "2.13", False), ("2.13.0+cpu", "2.13", True), ("2.13.0a0+git1", "2.13", True)),
        ("2.12.1", "2.13", False),
    ],
)
def test_versions_are_numbers(monkeypatch: pytest.MonkeyPatch, installed: str, oldest: str, expected: bool) -> None:
    """2.9 is before 2.13, and an image's alpha of 2.13 has the code of 2.13."""
    monkeypatch.setattr(libraries, "version", lambda library: installed)
    assert is_at_least("torch", oldest) is expected


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without isolation, because an isolated build would install hatchling from the network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_has_the_package_its_data_and_the_projects_metadata(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "stillhouse"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = set(listed.stdout.split())
    new = ["git", "ls-files", "--others", "--exclude-standard", "stillhouse"]  # files that are not committed yet
    untracked = set(subprocess.run(new, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert tracked <= names, f"not in the wheel: {sorted(tracked - names)}"
    assert names <= tracked | untracked, f"only in the wheel: {sorted(names - tracked)}"
    assert {"stillhouse/py.typed", "stillhouse/report/assets/report.js"} <= names
    assert "stillhouse/plan/hooks.cpp" in names
    assert "stillhouse/tools/demo/teacher/model.safetensors" in names
    assert "version" not in PROJECT
    assert wheel.name == f"stillhouse-{stillhouse.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as files:
        parts = {name.partition(".dist-info/")[2]: name for name in files.namelist() if ".dist-info/" in name}
        metadata = message_from_string(files.read(parts["METADATA"]).decode())
        commands = configparser.ConfigParser()
        commands.read_string(files.read(parts["entry_points.txt"]).decode())
    assert metadata["Version"] == stillhouse.__version__
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == PROJECT["license"]
    assert "licenses/LICENSE" in parts
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    extras = PROJECT["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra")) == extras.keys()
    expected = {str(requirement) for requirement in map(read, PROJECT["dependencies"])}
    expected |= {f'{requirement}; extra == "{extra}"' for extra in extras for requirement in libraries_of(extra)}
    assert {str(requirement) for requirement in map(read, metadata.get_all("Requires-Dist"))} == expected
    assert dict(commands["console_scripts"]) == PROJECT["scripts"]


def read(line: str) -> Requirement:
    requirement = Requirement(line)
    requirement.name = canonicalize_name(requirement.name)
    return requirement


def libraries_of(extra: str) -> Iterator[Requirement]:
    """Yield the libraries of an extra, with those of the extras that it has."""
    for requirement in map(read, PROJECT["optional-dependencies"][extra]):
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                yield from libraries_of(other)
        else:
            yield requirement


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    libraries = folder / "libraries"
    libraries.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.suffix != ".pth" and "stillhouse" not in entry.name:
            (libraries / entry.name).symlink_to(entry)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)
    return folder / "bin"


def ran(installed: Path, folder: Path, *command: str) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    program, *arguments = command
    done = subprocess.run([installed / program, *arguments], cwd=folder, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_its_commands_run_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    location = ran(installed, tmp_path, "python", "-c", "import stillhouse; print(stillhouse.__file__)")
    assert Path(location.strip()).is_relative_to(installed.parent)
    assert ran(installed, tmp_path, "stillhouse", "--version") == f"stillhouse {stillhouse.__version__}\n"
    assert "stillhouse demo" in ran(installed, tmp_path, "stillhouse", "--help")
    write_run(tmp_path)
    run = str(tmp_path / "run.yaml")
    ran(installed, tmp_path, "stillhouse", "distill", run)
    ran(installed, tmp_path, "stillhouse", "report", str(tmp_path / "out"))
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "uPlot" in page
    teacher = "from stillhouse.tools.demo.student import TEACHER; print((TEACHER / 'model.safetensors').exists())"
    assert ran(installed, tmp_path, "python", "-c", teacher) == "True\n"
