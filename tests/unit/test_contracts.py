"""The public names and signatures, which must not change because other projects rely on them."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import stillhouse
import stillhouse.models
import stillhouse.objective
from stillhouse.objective.reference import dense_objective

ROOT = Path(__file__).parents[2]
SIGNATURES = YAML(typ="safe").load(Path(__file__).with_name("signatures.yaml").read_text(encoding="utf-8"))
CONTRACTS, OTHERS = SIGNATURES["objective"], SIGNATURES["others"]
#: modules beside `stillhouse` that examples import: a public module, and what only the demo has
MODULES = {"stillhouse.models.mtp"} | {f"stillhouse.tools.demo.{name}" for name in ("corpus", "student")}


def shown(call: object) -> str:
    """Return a signature without annotations, `self` and private markers."""
    assert callable(call)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(call).parameters.values()
        if parameter.name != "self"
    ]
    return str(inspect.Signature(parameters))[1:-1]


@pytest.mark.parametrize("name", [*CONTRACTS, *OTHERS])
def test_signature(name: str) -> None:
    assert shown(getattr(stillhouse, name)) == (CONTRACTS | OTHERS)[name]
    assert name in OTHERS or getattr(stillhouse, name) is getattr(stillhouse.objective, name)


@pytest.mark.parametrize("package", ["stillhouse.objective", "stillhouse.data"])
def test_names_that_are_imported_at_their_first_use_are_listed(package: str) -> None:
    """For `from stillhouse.objective import *` and a shell's completion, in a process without these names."""
    code = f"import {package} as package\nlisted = dir(package)\nfrom {package} import *\n"
    code += "assert set(package.__all__) <= {*dir()} and set(package.__all__) <= {*listed}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_listed() -> None:
    page = (ROOT / "docs" / "output_processor.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(\w+)`", page.partition("## Public names")[2].partition("\n## ")[0]))
    assert listed == set(stillhouse.__all__)
    assert all(getattr(stillhouse, name) is not None for name in stillhouse.__all__)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_import_public_names(example: Path) -> None:
    nodes = list(ast.walk(ast.parse(example.read_text(encoding="utf-8"))))
    imported = {node.module: [name.name for name in node.names] for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {module: names for module, names in imported.items() if module and module.startswith("stillhouse")}
    assert set(ours.pop("stillhouse")) <= set(stillhouse.__all__)
    assert set(ours) <= (MODULES if example.stem == "mtp" else set())


def test_signatures_of_methods_and_of_the_reference() -> None:
    assert shown(dense_objective) == CONTRACTS["linear_objective"]
    decoder = stillhouse.models.Decoder
    assert shown(decoder.from_pretrained).startswith("name_or_path, revision=None, dtype=None, *")
    assert shown(decoder.forward) == (
        "input_ids, position_ids=None, attention_mask=None, *, processor=None, context=None, head=True, "
        "mtp_input_ids=None, is_padding=None, lengths=None, images=None, **backbone_kwargs"
    )
    assert shown(decoder.signal).startswith("input_ids, ")
    assert shown(stillhouse.models.OutputProcessor.__call__) == "*, hidden_states, head, context, depth=0"
