"""The table of what can be fetched: `packages.yaml`."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Archive(_Record):
    """A package with its exact version, and the sha256 of its file."""

    package: str
    version: str
    sha256: str


class Gguf(_Record):
    """The file of a package that is converted to a plain folder, and its sha256."""

    file: str
    sha256: str


class Package(_Record):
    """What one name gives. See `packages.yaml` for the fields."""

    about: str
    registry: Literal["pip", "npm"]
    bytes: int
    licence: str
    terms: str
    archives: list[Archive]
    files: dict[str, list[str]]
    gguf: Gguf | None = None


def read_packages(path: Path) -> dict[str, Package]:
    """Return the packages of a table, by name."""
    content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    return {name: Package.model_validate(values) for name, values in content.items()}


PACKAGES = read_packages(Path(__file__).with_name("packages.yaml"))
