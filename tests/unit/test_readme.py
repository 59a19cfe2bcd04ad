"""The documents name files, modules, functions and tests that exist, the site leads to them, and their code runs."""

import ast
import importlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.config_cases import MISTAKES, yaml_file
from kit.families import build
from kit.pages import code_blocks
from kit.tensors import assert_near
from proofs import proof_rows
from ruamel.yaml import YAML

import stillhouse.objective
from stillhouse import Decoder
from stillhouse.config import load_config
from stillhouse.models import processors
from stillhouse.objective.divergences import DIVERGENCES
from stillhouse.objective.spec import parse_objective
from stillhouse.tools.demo.student import TEACHER, save_new_student

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_row_names_its_proofs() -> None:
    for page, most in {"README.md": 10, "docs/proofs.md": 130}.items():
        rows = proof_rows((ROOT / page).read_text())
        assert most // 3 < len(rows) <= most
        assert all(row.proofs for row in rows)
    assert len(re.findall(r"\]\([^)]+\)", README.partition("## Read on")[2])) == 8


def test_the_numbers_of_the_page_are_true() -> None:
    lists = (ROOT / "tests" / "kit" / "mistakes").glob("*.yaml")
    in_processes = sum(len(YAML(typ="safe").load(path.read_text())) for path in lists)
    in_configurations = len(MISTAKES)
    assert f"{in_processes + in_configurations} mistakes give one line each" in README
    proofs = (ROOT / "docs" / "proofs.md").read_text()
    assert f"{in_processes} mistakes in configurations, objectives" in proofs
    assert f"{in_configurations} more in configurations" in proofs
    assert len(DIVERGENCES) == 7
    assert "seven\n[divergences]" in README
    assert len(README.splitlines()) <= 100


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
        assert links or page.parent.name == "docs"
        for link in links:
            assert (page.parent / link.partition("#")[0]).exists(), (page, link)


def test_the_configurations_load(tmp_path: Path) -> None:
    (shown,) = code_blocks(README, "yaml")
    assert load_config(yaml_file(tmp_path, shown)).objective.loss == "0.3*cross_entropy + 0.7*jsd(0.5)"


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_before_and_after_are_the_same_loss_and_gradients(dtype: torch.dtype, error: float) -> None:
    """Both blocks run as they are printed, one after the other, with the same models.

    In bfloat16, the second one is nearer to the loss of the same hidden states and heads in float64.
    """
    torch.manual_seed(0)
    student, teacher = (build("llama", seed=seed, dtype=dtype) for seed in (1, 2))
    ids, mask = torch.randint(3, 251, (2, 37)), torch.rand(2, 37) > 0.3
    names = {"student": student, "teacher": teacher, "torch": torch, "F": F, "ids": ids, "mask": mask}
    results = []
    for block in code_blocks(README, "python"):
        exec(block, names)
        names["loss"].backward()
        gradients = {name: parameter.grad.float() for name, parameter in student.named_parameters()}
        student.zero_grad()
        results.append((float(names["loss"].detach()), gradients))
    (loss, gradients), (our_loss, our_gradients) = results
    assert our_loss == pytest.approx(loss, rel=error)
    assert_near(our_gradients, gradients, 10 * error)
    log_q, log_p = (
        (model.base_model(ids).last_hidden_state.double() @ model.lm_head.weight.double().T).log_softmax(-1)
        for model in (student, teacher)
    )
    exact = float(F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)[mask].mean().detach())
    assert dtype == torch.float32 or abs(our_loss - exact) < 0.1 * abs(loss - exact)


def test_the_processors_of_the_page_run() -> None:
    page = (ROOT / "docs" / "output_processor.md").read_text()
    shown = code_blocks(page.partition("## The processors")[2], "python")
    decoder, ids = Decoder(build("llama", seed=1)), torch.randint(3, 251, (2, 17))
    labels = ids.roll(-1, 1)
    numbers = -5 + torch.zeros(2, 17)
    names = {name: getattr(stillhouse.objective, name) for name in stillhouse.objective.__all__}
    names |= vars(processors) | {"parse_objective": parse_objective, "decoder": decoder}
    names |= {"teacher": Decoder(build("llama", seed=2)), "ids": ids, "labels": labels, "sampled": labels}
    names |= {"advantages": numbers, "old": numbers, "reference": numbers, "tokens_of_the_step": 34}
    calls = [block for block in shown if "decoder(" in block]
    assert len(calls) == 5
    for block in calls:
        exec(block, names)
    (definition,) = (block for block in shown if block.startswith("def process("))
    exec(definition, names)
    context = SimpleNamespace(labels_T=labels.flatten(), teacher_log_probs_T=numbers.flatten(), weights_T=None)
    decoder(ids, processor=names["process"], context=context).loss.backward()


@pytest.mark.slow
def test_the_own_loop_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_new_student(tmp_path / "student", seed=0)
    main = runpy.run_path(str(ROOT / "examples" / "own_loop.py"))["main"]
    main(str(TEACHER), str(tmp_path / "student"), "Return the next item from the iterator, or raise StopIteration.")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.8 * losses[0]


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


def test_the_architecture_names_functions_and_the_site_all_documents() -> None:
    page = text_of("docs/architecture.md")
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)`", page, flags=re.MULTILINE)
    assert len(rows) == 15  # the walk of a micro-batch, and that of a sample
    assert [row for row in rows if row[0] not in NAMES[ROOT / "stillhouse" / row[1]]] == []
    known = set().union(*NAMES.values())
    assert [name for name in re.findall(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)?)[`(]", page) if name not in known] == []
    assert [name for name in DOCUMENTS if f": {name}\n" not in text_of("mkdocs.yml")] == []
