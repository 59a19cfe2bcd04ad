"""The wheel, in an environment without the checkout: it has all data files and nothing else, and its commands run.

The environment sees the libraries of the development environment through a .pth file, but not the editable package.
"""

import configparser
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import pytest
from kit.runs import write_run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import stillhouse

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without isolation, because an isolated build would install hatchling from the network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


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
