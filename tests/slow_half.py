"""Runs the slow half of the tests. A failing test runs a second time, and counts as flaky if it then passes.

python tests/slow_half.py [arguments of pytest, such as files]
"""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from proofs import without_group

#: more failures than this are not flaky, so the tests do not run again
MAX_RERUNS = 20
#: results for `proofs.py`: those of all tests, and those of tests that ran again
RESULTS = Path(".results/slow.xml"), Path(".results/slow_again.xml")


class Outcome:
    """A pytest plugin that records the failed tests and the number of tests with each outcome."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.counts: dict[str, int] = {}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        stats = terminalreporter.stats
        names = [without_group(report.nodeid) for key in ("failed", "error") for report in stats.get(key, [])]
        self.failed = list(dict.fromkeys(names))
        self.counts = {key: len(stats[key]) for key in ("passed", "skipped") if stats.get(key)}


def main(arguments: list[str]) -> int:
    started, first, second = time.monotonic(), Outcome(), Outcome()
    RESULTS[1].unlink(missing_ok=True)
    results = f"--junitxml={RESULTS[0]}"
    workers = ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
    code = pytest.main(["-m", "slow", *workers, results, *arguments], plugins=[first])
    if code != pytest.ExitCode.TESTS_FAILED or len(first.failed) > MAX_RERUNS:
        return code
    code = pytest.main(["-m", "slow", "-n", "0", f"--junitxml={RESULTS[1]}", *first.failed], plugins=[second])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code
    flaky = [name for name in first.failed if name not in second.failed]
    for name in flaky:
        print(f"FLAKY {name}")
    counts = {"failed": len(second.failed), **first.counts}
    counts["passed"] = counts.get("passed", 0) + len(flaky)
    words = [f"{count} {key}" for key, count in (counts | {"flaky": len(flaky)}).items() if count]
    print(f" {', '.join(words)} in {time.monotonic() - started:.2f}s ".center(80, "="))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
