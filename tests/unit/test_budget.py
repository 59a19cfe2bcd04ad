"""The size of the tree does not rise: tests/budget.yaml has the counts of the last commit that changed them.

A change may lower a count; `python tests/unit/test_budget.py` then writes the lower ones. A change that raises a
count raises it in that file by hand, in a commit of its own whose message says what was bought.
"""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
BUDGET = ROOT / "tests" / "budget.yaml"
#: packages that register themselves; the core does not name them
ADD_ONS = {"agents", "fetch", "images", "megatron", "plan", "report", "serving"}
#: pages of docs/ that are looked up, not read
REFERENCE = {"claims", "coming_from", "config", "glossary", "gpu", "log", "models", "proofs"}
#: the only count that must not fall
LEAST = "code lines per function"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module:
    """One module of the package: its text, its syntax tree, and the numbers of its lines of code."""

    def __init__(self, path: Path):
        self.path, self.text = path, path.read_text()
        self.nodes = list(ast.walk(ast.parse(self.text)))
        self.lines = self.text.splitlines()
        self.room = path.relative_to(ROOT / "stillhouse").parts[0]
        documented = (node for node in self.nodes if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)))
        docstrings = [node.body[0] for node in documented if ast.get_docstring(node)]
        comments = {
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
            if token.type == tokenize.COMMENT and token.line.strip().startswith("#")
        }
        self.code = {number for number, line in enumerate(self.lines, 1) if line.strip()} - comments
        self.code -= set(chain.from_iterable(range(node.lineno, node.end_lineno + 1) for node in docstrings))

    def code_lines(self, node: ast.AST) -> int:
        return len(self.code.intersection(range(node.lineno, node.end_lineno + 1)))

    def nodes_of(self, *kinds: type) -> list:
        return [node for node in self.nodes if isinstance(node, kinds)]


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def line_count(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def naming_rooms(modules: list[Module], word: str) -> int:
    """The number of packages of the core with a module that contains a word, a regular expression."""
    core = [module for module in modules if module.room not in ADD_ONS]
    return len({module.room for module in core if re.search(word, module.text.lower())})


def small_modules(modules: list[Module]) -> int:
    """The modules of less than 120 lines that only one module imports, which lies in the same folder."""
    paths = {".".join(m.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): m for m in modules}
    importers = defaultdict(set)
    for module in modules:
        for node in module.nodes_of(ast.ImportFrom):
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                if name in paths:
                    importers[paths[name]].add(module.path)
    return sum(
        len(module.lines) < 120 and len(users) == 1 and {user.parent for user in users} == {module.path.parent}
        for module, users in importers.items()
        if module.path.name != "__init__.py"
    )


def helpers_used_once(modules: list[Module]) -> int:
    """The private functions with a body of at most six lines of code whose name occurs only once."""
    uses = Counter(node.id for module in modules for node in module.nodes_of(ast.Name))
    uses.update(node.attr for module in modules for node in module.nodes_of(ast.Attribute))
    shortest: dict[str, int] = {}
    for module in modules:
        for function in module.nodes_of(*FUNCTIONS):
            if re.match(r"_(?!_)", function.name):
                body = sum(map(module.code_lines, function.body))
                shortest[function.name] = min(body, shortest.get(function.name, body))
    return sum(body <= 6 and uses[name] <= 1 for name, body in shortest.items())


def annotated_parameters(modules: list[Module], name: str) -> int:
    """The number of parameters whose annotation names a class."""
    parameters = (
        parameter
        for module in modules
        for function in module.nodes_of(*FUNCTIONS)
        for parameter in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    )
    return sum(name in re.findall(r"\w+", ast.unparse(p.annotation)) for p in parameters if p.annotation is not None)


def shared_names(modules: list[Module]) -> int:
    """The number of public functions and classes at the top level of several modules."""
    places = defaultdict(set)
    for module in modules:
        for node in ast.parse(module.text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                places[node.name].add(module.path)
    return sum(len(paths) > 1 for paths in places.values())


def counts() -> dict[str, float]:
    modules = [Module(path) for path in python_files("stillhouse")]
    functions = [module.code_lines(node) for module in modules for node in module.nodes_of(*FUNCTIONS)]
    names = {node.name for module in modules for node in module.nodes_of(ast.FunctionDef)}
    names |= {node.arg for module in modules for node in module.nodes_of(ast.arg)}
    names |= {node.id for module in modules for node in module.nodes_of(ast.Name)}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.stem not in REFERENCE]
    return {
        "lines of stillhouse/": line_count(python_files("stillhouse")),
        "files of stillhouse/": len(modules),
        "lines of tests/": line_count(python_files("tests")),
        "files of tests/kit/": len(python_files("tests/kit")),
        LEAST: round(sum(functions) / len(functions), 1),
        "modules under 120 lines with one importer, in the same package": small_modules(modules),
        "private functions used once, with a body of at most 6 lines": helpers_used_once(modules),
        "names that begin with of_": sum(bool(re.match("_?of_", name)) for name in names),
        "public top-level names defined in several modules": shared_names(modules),
        "parameters annotated Session": annotated_parameters(modules, "Session"),
        "parameters annotated RunConfig": annotated_parameters(modules, "RunConfig"),
        "packages of the core that name images": naming_rooms(modules, r"\bimages?\b"),
        "packages of the core that name Megatron": naming_rooms(modules, "megatron"),
        "words of README.md": len((ROOT / "README.md").read_text().split()),
        "words of docs/ without reference pages": sum(len(page.read_text().split()) for page in pages),
    }


def test_no_count_rises():
    current, budget = counts(), YAML(typ="safe").load(BUDGET)
    assert current.keys() == budget.keys()
    risen = [
        name for name in budget if (current[name] < budget[name] if name == LEAST else current[name] > budget[name])
    ]
    assert not risen, [f"{name}: {current[name]}, and at most {budget[name]} in {BUDGET.name}" for name in risen]


if __name__ == "__main__":
    budget = YAML(typ="safe").load(BUDGET) if BUDGET.exists() else {}
    best = {name: (max if name == LEAST else min)(count, budget.get(name, count)) for name, count in counts().items()}
    BUDGET.write_text("".join(f"{name}: {count}\n" for name, count in best.items()))
