"""The demo's text: what every CPython carries with it.

A document is one module's docstrings and longer comments in source order, under light headings, or
one page of `pydoc_data.topics` (the language reference). Modules are parsed, never imported.

Documents are split by a hash of their *name*, so that Python versions agree on who may read what: the
shipped teacher learnt from the teacher split (and from the source code of its modules), the demo's
student trains on the student split, and nobody trains on the held-out split. The reference repeats whole
sections on several pages: a repeated paragraph stays in the first document by hash only, so the splits
share no paragraph of prose either.
"""

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["teacher", "student", "held_out"]

HELD_OUT_SHARE = 0.05
STUDENT_SHARE = 0.15
COMMENT_LENGTH = 100  # characters: shorter comment blocks say too little without their code
PARAGRAPH_LENGTH = 40  # characters: shorter paragraphs ("Examples:") may repeat

SKIPPED = frozenset(
    {"__phello__", "__pycache__", "dist-packages", "encodings", "idle_test", "lib2to3", "pydoc_data"}
    | {"site-packages", "test", "tests"}
)
# Distributions leave these out, or a newer Python dropped them. They are the teacher's, so that every
# installation has the same student and held-out splits.
NOT_EVERYWHERE = frozenset(
    {"aifc", "asynchat", "asyncore", "cgi", "cgitb", "chunk", "crypt", "distutils", "ensurepip", "idlelib", "imghdr"}
    | {"imp", "mailcap", "msilib", "nntplib", "pipes", "smtpd", "sndhdr", "sunau", "telnetlib", "tkinter", "turtle"}
    | {"turtledemo", "uu", "venv", "xdrlib"}
)


@dataclass(frozen=True)
class Document:
    """A named piece of text; the name alone decides its split."""

    name: str
    text: str


def split_of(name: str) -> Split:
    """Who may read the document of this name."""
    if name.split(".")[0] in NOT_EVERYWHERE:
        return "teacher"
    position = name_hash(name)
    if position < HELD_OUT_SHARE:
        return "held_out"
    return "student" if position < HELD_OUT_SHARE + STUDENT_SHARE else "teacher"


def name_hash(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def collect_documents(library: Path | None = None) -> list[Document]:
    """Every document of this Python's standard library, in the order of their names' hashes."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    texts = {name: prose(source) for name, source in module_sources(library)}
    texts |= {f"topic:{topic}": text for topic, text in topics(library).items()}
    documents = [Document(name, text) for name, text in texts.items()]
    return without_repeats(sorted(documents, key=lambda document: (name_hash(document.name), document.name)))


def collect_split(split: Split, library: Path | None = None) -> list[Document]:
    """The documents of one split."""
    return [document for document in collect_documents(library) if split_of(document.name) == split]


def collect_teacher_sources(library: Path | None = None) -> list[Document]:
    """The source code of the modules in the teacher split: more text for the teacher alone."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    return [
        Document(f"source:{name}", source)
        for name, source in module_sources(library)
        if split_of(name) == "teacher" and source.strip()
    ]


def write_jsonl(documents: Iterable[Document], path: Path) -> None:
    """One JSON object per line, with the columns `name` and `text`."""
    lines = [json.dumps({"name": document.name, "text": document.text}) for document in documents]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def module_sources(library: Path) -> Iterator[tuple[str, str]]:
    """Dotted name and source of each module under a library folder, sorted by path."""
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if SKIPPED.isdisjoint(parts) and not any("-" in part for part in parts[:-1]):
            name = ".".join(parts).removesuffix(".__init__")
            yield name, path.read_text(encoding="utf-8", errors="replace")


def topics(library: Path) -> dict[str, str]:
    """The pages of `pydoc_data/topics.py`; none where an installation left it out."""
    path = library / "pydoc_data" / "topics.py"
    if not path.exists():
        return {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    return {}


def prose(source: str) -> str:
    """A module's docstrings and longer comments, in source order."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    blocks = sorted([*docstrings(tree), *comments(source, tree)])
    return "\n\n".join(text for _, text in blocks)


def docstrings(node: ast.AST, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Line and text of each docstring under a node, headed by its signature."""
    if isinstance(node, ast.Module) and (text := ast.get_docstring(node)):
        yield 0, text
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from docstrings(child, prefix)
            continue
        if text := ast.get_docstring(child):
            yield child.lineno, f"{heading(child, prefix)}\n{text}"
        yield from docstrings(child, f"{prefix}{child.name}.")


def heading(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> str:
    """`class Queue(Base)` or `def Queue.put(self, item)`."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {prefix}{node.name}({bases})"
    return f"def {prefix}{node.name}({ast.unparse(node.args)})"


def comments(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each block of whole-line comments that is long enough to be prose."""
    quoted = quoted_lines(tree)
    block: list[str] = []
    for number, line in enumerate([*source.split("\n"), ""], 1):
        stripped = line.strip()
        if stripped.startswith("#") and number not in quoted:
            block.append(stripped.removeprefix("#").removeprefix(" "))
            continue
        if len(text := "\n".join(block).strip()) >= COMMENT_LENGTH:
            yield number - len(block), text
        block = []


def quoted_lines(tree: ast.Module) -> set[int]:
    """The lines on which a string goes on that began on an earlier line."""
    strings = (node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr)))
    return {line for node in strings for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)}


def without_repeats(documents: Iterable[Document]) -> list[Document]:
    """The documents without paragraphs that an earlier one has, and without those left empty."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        fresh: list[str] = []
        for paragraph in document.text.split("\n\n"):
            key = " ".join(paragraph.split())
            if len(key) < PARAGRAPH_LENGTH or key not in seen:
                fresh.append(paragraph)
            seen.add(key)
        if text := "\n\n".join(fresh).strip():
            kept.append(Document(document.name, text))
    return kept
