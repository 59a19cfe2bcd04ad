"""Files, modules, functions and tests that the documents name exist, and README.md leads to every document."""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "[!R]*.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
]
OTHERS = ["Makefile", "mkdocs.yml", "pyproject.toml", ".ci/run", "examples", "recipes", "benchmarks"]
#: files of other projects
FOREIGN = {"models/mcore/model_forward_fused.py", "models/mcore/mtp_patch.py", "distributed/model_utils.py"}
FOREIGN |= {"recipes/llm/kd.py", "megatron/core/models/hybrid/hybrid_model.py"}
FOLDERS = (ROOT, ROOT / "stillhouse", ROOT / "stillhouse" / "objective", ROOT / "tests")
NAMES = {
    path: {
        f"{outer}.{node.name}".lstrip(".")
        for outer, body in [
            ("", module.body),
            *((node.name, node.body) for node in module.body if isinstance(node, ast.ClassDef)),
        ]
        for node in body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    for folder in ("stillhouse", "tests")
    for path in (ROOT / folder).rglob("*.py")
    for module in [ast.parse(path.read_text(encoding="utf-8"))]
}


def text_of(name: str) -> str:
    """Return a text without the extensions of the package that `test_extending.py` applies."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"```(diff|toml)((?!```).)*```(\n\n```python.*?```)+", "", text, flags=re.DOTALL)


def named(dotted: str) -> Any:
    """Import a module, or an attribute of one."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", [*DOCUMENTS, *OTHERS])
def test_every_path_exists(name: str) -> None:
    place = ROOT / name
    for path in filter(Path.is_file, place.glob("*.*")) if place.is_dir() else [place]:
        text = text_of(str(path.relative_to(ROOT)))
        paths = set(re.findall(r"(?<![\w./$-])(?:[\w-]+/)+[\w-]+\.(?:py|sh|md)\b", text)) - FOREIGN
        paths |= set(re.findall(r"`((?:stillhouse|tests|benchmarks|docs|examples)/[\w./-]+)`", text))
        places = (path.parent, *FOLDERS)
        assert [name for name in paths if not any((folder / name).exists() for folder in places)] == [], path


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_module_function_and_test_exists(document: str) -> None:
    text = text_of(document)
    for dotted in re.findall(r"\bstillhouse(?:\.\w+)+(?::\w+)?", text):
        named(dotted.replace(":", "."))
    for module, names in re.findall(r"^from (stillhouse[\w.]*) import (\([^)]*\)|.*)", text, flags=re.MULTILINE):
        assert all(named(f"{module}.{name}") for name in re.findall(r"\w+", re.sub(r"#.*", "", names)))
    file = ""
    for name, test in re.findall(r"`(?:\w+/)*(test_\w+\.py)?(?:::(test_\w+))?`", text):
        file = name or file
        if name or test:
            (path,) = (path for path in NAMES if path.name == file)
            assert not test or test in NAMES[path], f"{file}::{test}"


def test_the_architecture_names_functions_where_they_are() -> None:
    page = text_of("docs/architecture.md")
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)`", page, flags=re.MULTILINE)
    assert len(rows) == 15  # the walk of a micro-batch, and that of a sample
    assert [row for row in rows if row[0] not in NAMES[ROOT / "stillhouse" / row[1]]] == []
    known = set().union(*NAMES.values())
    assert [name for name in re.findall(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)?)[`(]", page) if name not in known] == []


def test_the_readme_leads_to_every_document() -> None:
    assert [name for name in DOCUMENTS[1:] if f"]({name})" not in text_of("README.md")] == []
