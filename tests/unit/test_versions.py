"""pyproject.toml, the constraints and docs/versions.md agree, and features name the version that they need."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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
        name: Version(bound) for name, bound in bounds().items()
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
