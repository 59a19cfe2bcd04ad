"""Only tests that ran and passed prove a row of a page."""

from pathlib import Path

import pytest
from proofs import proof_rows, read_outcomes, unproven

PAGE = """
| | | proven by |
| --- | --- | --- |
| One | what it does | `test_a.py::test_one`, `::test_two` |
| Other | it, too | `test_b.py` |

| another | table |
| --- | --- |
| `test_c.py` | is no proof |
"""
CASE = '<testcase classname="{}" name="{}">{}</testcase>'


def results(path: Path, *cases: tuple[str, str, str]) -> Path:
    text = "".join(CASE.format(*case) for case in cases)
    path.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    return path


def test_rows_are_read_and_a_test_that_passes_again_has_passed(tmp_path: Path) -> None:
    assert [(row.name, row.proofs) for row in proof_rows(PAGE)] == [
        ("One", (("test_a.py", "test_one"), ("test_a.py", "test_two"))),
        ("Other", (("test_b.py", ""),)),
    ]
    failed = results(tmp_path / "a.xml", ("tests.faults.test_b", "test_it[x]@torchrun", "<failure/>"))
    again = results(tmp_path / "b.xml", ("tests.faults.test_b", "test_it[x]", ""))
    (_, row) = proof_rows(PAGE)
    assert list(unproven(row, read_outcomes([failed]))) == ["test_b.py failed"]
    assert not list(unproven(row, read_outcomes([failed, again])))


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ([("tests.test_a", "test_one[x]", ""), ("tests.test_a", "test_two", "")], []),
        ([("tests.test_a", "test_one@torchrun", ""), ("tests.test_a", "test_two[a@b]@torchrun", "")], []),
        ([("tests.test_a", "test_one[x]", "")], ["test_a.py::test_two did not run"]),
        (
            [("tests.test_a", "test_one", ""), ("tests.test_a", "test_two", "<failure/>")],
            ["test_a.py::test_two failed"],
        ),
        (
            [("tests.test_a", "test_one", "<skipped/>"), ("tests.test_a", "test_two", "")],
            ["test_a.py::test_one was skipped"],
        ),
        (
            [
                ("tests.test_a", "test_one", '<skipped message="no CUDA device"/>'),
                ("tests.test_a", "test_two", '<skipped message="not today"/>'),
            ],
            ["test_a.py::test_two was skipped"],
        ),
        (
            [("tests.test_a", "test_one[x]", ""), ("tests.test_a", "test_one[y]", "<error/>")],
            ["test_a.py::test_one failed", "test_a.py::test_two did not run"],
        ),
    ],
)
def test_a_proof_has_run_and_passed(tmp_path: Path, cases: list[tuple[str, str, str]], expected: list[str]) -> None:
    outcomes = read_outcomes([results(tmp_path / "a.xml", *cases)])
    assert list(unproven(proof_rows(PAGE)[0], outcomes)) == expected
