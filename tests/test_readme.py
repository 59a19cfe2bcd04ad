"""README's claims point at tests that exist, its links at files, and its configuration loads."""

import ast
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from families import build

from stillhouse import CrossEntropy, Decoder, Distill, jsd, linear_objective
from stillhouse.config import load_config
from stillhouse.demo.student import TEACHER, save_new_student

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def defined_tests(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_row_of_what_works_names_a_test_that_exists() -> None:
    table = README.partition("## What works")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) > 10
    for row in rows:
        proofs = re.findall(r"`((?:\w+/)?test_\w+\.py)?(?:::(test_\w+))?`", row)
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


def test_both_ways_of_the_readme_run_and_train_the_same_students_weights() -> None:
    before, after = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    ids = torch.randint(3, 251, (1, 37))
    theirs = {"student": build("llama", seed=1), "teacher": build("llama", seed=2), "ids": ids, "F": F}
    exec(before, theirs | {"mask": torch.ones(1, 37, dtype=torch.bool)})
    seen = {}

    def processor(*, hidden_states, head, context, depth=0):
        seen.update(hidden=hidden_states.flatten(0, 1), head=head)

    student = Decoder(build("llama", seed=1))
    student(ids, processor=processor)
    ours = {**seen, "teacher": Decoder(build("llama", seed=2)), "ids": ids, "labels": ids[0].roll(-1)}
    ours |= {"mask": torch.ones(37), "tokens": 37, "CrossEntropy": CrossEntropy, "Distill": Distill}
    ours |= {"jsd": jsd, "linear_objective": linear_objective}
    exec(after, ours)
    ours["loss"].backward()
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_the_own_loop_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_new_student(tmp_path / "student", seed=0)
    main = runpy.run_path(str(ROOT / "examples" / "own_loop.py"))["main"]
    main(str(TEACHER), str(tmp_path / "student"), "Return the next item from the iterator, or raise StopIteration.")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.8 * losses[0]
