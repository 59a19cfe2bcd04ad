"""README's claims point at tests that exist, its links at files, and its configuration loads."""

import ast
import re
from pathlib import Path

from stillhouse.config import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def defined_tests(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_row_of_what_works_names_a_test_that_exists() -> None:
    table = README.partition("## What works")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) > 10
    for row in rows:
        proofs = re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", row)
        assert proofs, row
        current = ""
        for file, test in proofs:
            current = file or current
            assert (ROOT / "tests" / current).is_file(), row
            if test:
                assert test in defined_tests(ROOT / "tests" / current), f"{current}::{test}"


def test_every_link_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_configurations_load(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(shown)
    assert load_config(path).objective.loss == "0.3*cross_entropy + 0.7*jsd(0.5)"
    assert load_config(ROOT / "examples" / "qwen3.yaml").out == "runs/qwen3"
