"""The README's claims name tests that exist, its links name files that exist, and its configuration loads."""

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from families import build
from proofs import proof_rows

import stillhouse.objective
from stillhouse import Decoder
from stillhouse.config import load_config
from stillhouse.demo.student import TEACHER, save_new_student
from stillhouse.models import processors
from stillhouse.objective.spec import parse_objective

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def defined_tests(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test_that_exists() -> None:
    """After all tests, `proofs.py` checks that these tests ran and passed."""
    pages = {"README.md": 10, "docs/proofs.md": 100}
    for page, most in pages.items():
        rows = proof_rows((ROOT / page).read_text())
        assert most // 3 < len(rows) <= most
        for row in rows:
            assert row.proofs, row.text
            for file, test in row.proofs:
                assert (ROOT / "tests" / file).is_file(), row.text
                assert not test or test in defined_tests(ROOT / "tests" / file), f"{file}::{test}"


def test_the_readme_fits_two_screens() -> None:
    assert len(README.splitlines()) <= 100


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


def test_before_and_after_are_the_same_loss_and_gradients() -> None:
    before, after = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    ids, mask = torch.randint(3, 251, (2, 37)), torch.rand(2, 37) > 0.3
    plain, teacher = build("llama", seed=1), build("llama", seed=2)
    theirs = {"student": plain, "teacher": teacher, "ids": ids, "F": F, "mask": mask}
    exec(before, theirs)
    theirs["loss"].backward()

    student = Decoder(build("llama", seed=1))
    ours = {"teacher": Decoder(teacher), "student": student.pretrained, "ids": ids, "mask": mask.flatten().float()}

    def processor(*, hidden_states, head, context, depth=0):
        ours.update(hidden=hidden_states.flatten(0, 1))
        exec(after, ours)
        return ours["loss"]

    student(ids, processor=processor).backward()
    assert float(ours["loss"].detach()) == pytest.approx(float(theirs["loss"].detach()), rel=1e-6)
    for (name, found), expected in zip(student.pretrained.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad - expected.grad).norm() <= 1e-5 * expected.grad.norm(), name


def test_the_processors_of_the_page_run() -> None:
    """Run all processors for a decoder on one batch."""
    page = (ROOT / "docs" / "output_processor.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", page.partition("## The processors")[2], flags=re.DOTALL)
    decoder, ids = Decoder(build("llama", seed=1)), torch.randint(3, 251, (2, 17))
    labels = ids.roll(-1, 1)
    numbers = -5 + torch.zeros(2, 17)
    given = vars(stillhouse.objective) | vars(processors) | {"parse_objective": parse_objective, "decoder": decoder}
    given |= {"teacher": Decoder(build("llama", seed=2)), "ids": ids, "labels": labels, "sampled": labels}
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
