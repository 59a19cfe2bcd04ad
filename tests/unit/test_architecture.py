"""Rules that import-linter cannot express: who may import torch.distributed, no pickle, no imports of tests.

The layers themselves are checked by `lint-imports` in `make lint`.
"""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from kit.step_walk import PIPELINE, walk, walk_on_policy

import stillhouse

PACKAGE = Path(stillhouse.__file__).parent
ROOT = Path(__file__).parents[2]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_only_vocab_imports_torch_distributed_in_the_objective() -> None:
    knowing = {
        path.name
        for path in (PACKAGE / "objective").glob("*.py")
        if any(name.startswith("torch.distributed") for name in imported_modules(path))
    }
    assert knowing == {"vocab.py"}


#: names the error of a record that cannot be sent from the run to its own worker; nothing is read from others
PICKLES = {"worker.py"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_pickle(path: Path) -> None:
    source = path.read_text()
    assert path.name in PICKLES or "pickle" not in {name.partition(".")[0] for name in imported_modules(path)}
    assert "pickle.load" not in source
    assert "torch.load(" not in source
    assert "torch.save(" not in source


def test_the_modules_of_a_package_have_no_import_cycle() -> None:
    """Nor do those of different packages. Imports inside of functions count, but not those for types alone."""
    grimp = pytest.importorskip("grimp", reason="import-linter is not installed")
    graph = grimp.build_graph("stillhouse", exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert imports["stillhouse.config.read_config"] >= {
        f"stillhouse.config.{name}" for name in ("explain_errors", "check_rules")
    }
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules of a cycle


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_nothing_imports_a_module_of_tests(folder: str) -> None:
    importing = {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*.py")
        if any(part.startswith("test_") for name in imported_modules(path) for part in name.split("."))
    }
    assert not importing


def test_no_object_by_text_and_no_broad_except() -> None:
    """The registry loads what pyproject.toml and other distributions name; no other text stands for an object."""
    for path in PACKAGE.rglob("*.py"):
        texts = [node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        assert not [text for text in texts if re.fullmatch(r"stillhouse(\.\w+)+:\w[\w.]*", text)], path
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler):
                caught = (
                    {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {"all"}
                )
                assert not caught & {"all", "Exception", "BaseException"}, f"{path}:{node.lineno}"


def test_no_two_modules_of_tests_have_the_same_name() -> None:
    """Pages and results name them without their folders."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("__init__.py", "conftest.py")]
    assert len(names) == len(set(names))


HEAD = ["TeacherStudentPair.forward", "Decoder.forward", "Head.forward", "StepLoss.__call__", "linear_objective"]


def test_in_one_process(tmp_path: Path) -> None:
    assert walk(tmp_path) == ["train", "TorchEngine.forward_backward", *HEAD]


@pytest.mark.slow
def test_in_a_pipeline(tmp_path: Path) -> None:
    stages = ["Pipeline.forward_backward", "_Stage.forward"]
    assert walk(tmp_path, **PIPELINE) == ["train", "TorchEngine.forward_backward", *stages, *HEAD]


def test_the_samples_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = walk_on_policy(tmp_path, monkeypatch)
    take = ["train", "Rollout.take"]
    generate = ["InJobEngine.generate", "Generator.generate", "Generator.batch", "Generator._run"]
    score = [f"Samples.{name}" for name in ("next_requests", "receive", "_call_about", "_request_rewards")]
    assert samples.token == [*take, "InJobEngine.complete", *generate, "TokenSampler.__call__"]
    assert samples.reward == [*take, "InJobEngine.complete", *score, "RewardSum.request", "FunctionCalls.request"]
    assert samples.switches <= 60, (tmp_path / "switches.txt").read_text()
    assert samples.closures == []
