"""README's claims point at tests that exist, its links at files, and its configuration loads."""

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from families import build

import stillhouse.objective
from stillhouse import CrossEntropy, Decoder, Distill, jsd, linear_objective
from stillhouse.config import load_config
from stillhouse.demo.student import TEACHER, save_new_student
from stillhouse.models import processors
from stillhouse.objective.recipe import parse_recipe

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
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
        assert links or page.parent.name == "docs"
        for link in links:
            assert (page.parent / link.partition("#")[0]).exists(), (page, link)


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


def test_the_processors_of_the_page_run() -> None:
    """Those for a decoder, one after the other, on one batch."""
    page = (ROOT / "docs" / "output_processor.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", page.partition("## The processors")[2], flags=re.DOTALL)
    decoder, ids = Decoder(build("llama", seed=1)), torch.randint(3, 251, (2, 17))
    labels = ids.roll(-1, 1)
    numbers = -5 + torch.zeros(2, 17)
    given = vars(stillhouse.objective) | vars(processors) | {"parse_recipe": parse_recipe, "decoder": decoder}
    given |= {"teacher": Decoder(build("llama", seed=2)), "ids": ids, "labels": labels, "drawn": labels}
    given |= {"advantages": numbers, "old": numbers, "reference": numbers, "tokens_of_the_step": 34}
    run = [each for each in shown if "decoder(" in each]
    assert len(run) == 5
    for each in run:
        exec(each, given)
    (own,) = (each for each in shown if each.startswith("def process("))
    exec(own, given)
    context = SimpleNamespace(labels_T=labels.flatten(), teacher_log_probs_T=numbers.flatten(), weights_T=None)
    decoder(ids, processor=given["process"], context=context).loss.backward()


def test_the_own_loop_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_new_student(tmp_path / "student", seed=0)
    main = runpy.run_path(str(ROOT / "examples" / "own_loop.py"))["main"]
    main(str(TEACHER), str(tmp_path / "student"), "Return the next item from the iterator, or raise StopIteration.")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.8 * losses[0]
