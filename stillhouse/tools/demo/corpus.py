"""The demo's text: documentation that is part of every CPython installation.

A document is one of two things: the docstrings and longer comments of one module, in source order with short
headings; or one page of `pydoc_data.topics` (the language reference). Modules are parsed, never imported.

The split of a document depends only on a hash of its *name*, so it is the same in all Python versions. The shipped
teacher was trained on the teacher split and on the source code of its modules. The demo's student trains on the
student split, and no model trains on the held-out split. The language reference repeats sections on several pages. A
repeated paragraph is kept only in the document with the smallest hash, so two splits have no common paragraph.
"""

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

Split = Literal["teacher", "student", "held_out"]

#: the end of each split's range of hashes; the range begins at the end of the previous split
ENDS: dict[Split, float] = {"held_out": 0.05, "student": 0.2, "teacher": 1.0}
COMMENT_LENGTH = 100  # characters; shorter blocks are left out, because they need their code to be understood
PARAGRAPH_LENGTH = 40  # characters; a repeated paragraph is kept if it is shorter ("Examples:")

SKIPPED = frozenset(
    {"__phello__", "__pycache__", "dist-packages", "encodings", "idle_test", "lib2to3", "pydoc_data"}
    | {"site-packages", "test", "tests"}
)
# Some distributions and newer Python versions do not have these modules. They belong to the teacher split, so that
# every installation has the same student and held-out splits.
NOT_EVERYWHERE = frozenset(
    {"aifc", "asynchat", "asyncore", "cgi", "cgitb", "chunk", "crypt", "distutils", "ensurepip", "idlelib", "imghdr"}
    | {"imp", "mailcap", "msilib", "nntplib", "pipes", "smtpd", "sndhdr", "sunau", "telnetlib", "tkinter", "turtle"}
    | {"turtledemo", "uu", "venv", "xdrlib"}
)


class NamedText(NamedTuple):
    name: str
    text: str


def split_of(name: str) -> Split:
    """Return the split of the document with this name."""
    if name.split(".")[0] in NOT_EVERYWHERE:
        return "teacher"
    return next(split for split, end in ENDS.items() if name_hash(name) < end)


def name_hash(name: str) -> float:
    """Return a number in [0, 1) that depends only on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def collect_documents(library: Path | None = None, end: float = 1.0) -> list[NamedText]:
    """Return the documents of this Python's standard library, in the order of their names' hashes.

    end: return only documents whose name has a smaller hash. Other documents do not affect the result.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    texts = dict[str, str]()
    for name, source in module_sources(library, end):
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        texts[name] = "\n\n".join(text for _, text in sorted([*docstrings(tree), *comments(source, tree)]))
    topics = library / "pydoc_data" / "topics.py"
    if topics.exists():  # some installations do not have this file
        for node in ast.parse(topics.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
                texts |= {f"topic:{topic}": text for topic, text in ast.literal_eval(node.value).items()}
    documents = [NamedText(name, text) for name, text in texts.items() if name_hash(name) < end]
    return without_repeats(sorted(documents, key=lambda document: (name_hash(document.name), document.name)))


def collect_split(split: Split) -> list[NamedText]:
    return [document for document in collect_documents(end=ENDS[split]) if split_of(document.name) == split]


def write_jsonl(documents: Iterable[NamedText], path: Path) -> None:
    """Write one JSON object per line, with the keys `name` and `text`."""
    path.write_text("".join(json.dumps(document._asdict()) + "\n" for document in documents), encoding="utf-8")


def module_sources(library: Path, end: float = 1.0) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the source of each module under a library folder, sorted by path.

    end: yield only modules whose name has a smaller hash.
    """
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if SKIPPED.isdisjoint(parts) and not any("-" in part for part in parts[:-1]):
            name = ".".join(parts).removesuffix(".__init__")
            if name_hash(name) < end:
                yield name, path.read_text(encoding="utf-8", errors="replace")


def docstrings(node: ast.AST, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each docstring inside a node. The text starts with the signature.

    prefix: the names of the definitions around the node, with a dot after each name.
    """
    if isinstance(node, ast.Module) and (text := ast.get_docstring(node)):
        yield 0, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(child):
                # `class Queue(Base)` or `def Queue.put(self, item)`
                kind, inside = ("class", child.bases) if isinstance(child, ast.ClassDef) else ("def", [child.args])
                yield child.lineno, f"{kind} {prefix}{child.name}({', '.join(map(ast.unparse, inside))})\n{text}"
            yield from docstrings(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):  # expressions contain no definitions
            yield from docstrings(child, prefix)


def comments(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each long block of whole-line comments."""
    strings = [node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    # the lines inside strings of several lines, which may begin with "#"
    quoted = {line for node in strings for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)}
    block: list[str] = []
    for number, line in enumerate([*source.split("\n"), ""], 1):
        stripped = line.strip()
        if stripped.startswith("#") and number not in quoted:
            block.append(stripped.removeprefix("#").removeprefix(" "))
            continue
        if len(text := "\n".join(block).strip()) >= COMMENT_LENGTH:
            yield number - len(block), text
        block = []


def without_repeats(documents: Iterable[NamedText]) -> list[NamedText]:
    """Remove paragraphs that have occurred before, and documents that then have no paragraphs."""
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
            kept.append(NamedText(document.name, text))
    return kept
