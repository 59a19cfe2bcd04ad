"""Checks that every test that a page names as a proof has run and passed.

    python tests/proofs.py results/quick.xml results/slow.xml ...

Reads pytest's JUnit files. A test that failed in one file and passed in a later one counts as passed.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/proofs.md")
#: the reasons of tests that are skipped because the machine lacks something; on other machines they must pass
MISSING_HERE = ("no CUDA device", "no chromium on the path", "no network namespaces here", " cannot download ")


@dataclass(frozen=True)
class Row:
    """A row of a table. proofs: (name of a file, name of a test or "" for all tests of the file)."""

    text: str
    proofs: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return self.text.split("|")[1].strip()


def main(paths: list[str]) -> int:
    outcomes = read_outcomes(Path(path) for path in paths)
    problems = [
        f"{page}: {row.name}: {problem}"
        for page in PAGES
        for row in proof_rows((ROOT / page).read_text(encoding="utf-8"))
        for problem in unproven(row, outcomes)
    ]
    print("\n".join(problems) or f"every row is proven, by {len(outcomes):,} tests")
    return bool(problems)


def proof_rows(page: str) -> list[Row]:
    """Return the rows of the tables whose last column has the heading "proven by"."""
    rows, inside = [], False
    for line in page.splitlines():
        if line.startswith("| ") and "proven by" in line:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and "---" not in line:
            rows.append(Row(line, tuple(_proofs(line))))
    return rows


def _proofs(line: str) -> Iterable[tuple[str, str]]:
    """Yield the tests of a row: `test_a.py::test_one`, `::test_two` of the same file, or only a file."""
    file = ""
    for path, test in re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", line.rpartition("| ")[2]):
        file = path or file
        yield file, test


def read_outcomes(paths: Iterable[Path]) -> dict[tuple[str, str], list[str]]:
    """Return the outcomes of all cases by file and test. For each case, the last file that contains it decides."""
    cases: dict[tuple[str, str, str], str] = {}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            file = case.get("classname", "").rpartition(".")[2] + ".py"
            name, _, parameters = without_group(case.get("name", "")).partition("[")
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            if any(reason in child.get("message", "") for child in case for reason in MISSING_HERE):
                outcome = "missing here"
            cases[file, name, parameters] = outcome
    outcomes: dict[tuple[str, str], list[str]] = {}
    for (file, name, _), outcome in cases.items():
        outcomes.setdefault((file, name), []).append(outcome)
    return outcomes


def without_group(name: str) -> str:
    """Return a test's name without the group that xdist appends: `test_it[case]@group`."""
    return re.sub(r"@[^@\]]*$", "", name)


def unproven(row: Row, outcomes: dict[tuple[str, str], list[str]]) -> Iterable[str]:
    """Yield the problems of a row's proofs. Each proof needs a case that passed, or that this machine cannot run, and
    no case that failed.
    """
    for file, test in row.proofs:
        cases = [results for (path, name), results in outcomes.items() if path == file and test in ("", name)]
        results = list(chain.from_iterable(cases))
        what = f"{file}::{test}" if test else file
        if "failed" in results:
            yield f"{what} failed"
        elif not {"passed", "missing here"} & set(results):
            yield f"{what} was skipped" if results else f"{what} did not run"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
