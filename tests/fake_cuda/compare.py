"""Runs cases in a process of their own, and compares their counts with golden.json."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import torch

SCRIPT = Path(__file__).with_name("fake_steps.py")
GOLDEN: dict[str, Any] = json.loads(SCRIPT.with_name("golden.json").read_text(encoding="utf-8"))
#: what does not depend on torch's version as kernels do; only waits of this package's own calls
PORTABLE = ("micro_batches", "waits", "waits_of_half", "pageable")
OF_TORCH = ("× torch:", "× stillhouse/parallel/older_torch_stage.py:")


class FakeSteps:
    """A process that counts the steps of cases. It ends with the block."""

    def __enter__(self) -> Self:
        pipe, self._errors = subprocess.PIPE, tempfile.TemporaryFile("w+")
        # Triton is not imported in its interpreter's mode, as a run would not
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "-"], stdin=pipe, stdout=pipe, stderr=self._errors, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._errors.close()

    def entry(self, name: str) -> dict[str, Any]:
        """Return what a case counts. Raises AssertionError with the errors so far if it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        lines = (json.loads(line) for line in self._process.stdout if line.startswith("{"))
        entry: dict[str, Any] | None = next(lines, {name: None})[name]
        self._errors.seek(0)
        assert entry is not None, f"the case '{name}' failed:\n{self._errors.read()[-6000:]}"
        return entry


def require_same(name: str, actual: dict[str, Any]) -> None:
    """Compare a case with golden.json. Only the version of torch that the file names has the same kernels."""
    expected = GOLDEN["cases"].get(name, {})
    keys = expected.keys() | actual.keys()
    if torch.__version__.partition("+")[0] != GOLDEN["torch"]:
        keys = keys.intersection(PORTABLE)
        expected, actual = _without_torch(expected), _without_torch(actual)
    differences = [
        f"{key}: expected {expected.get(key)}\n{' ' * len(key)}       got {actual.get(key)}"
        for key in sorted(keys)
        if expected.get(key) != actual.get(key)
    ]
    assert not differences, "\n".join(
        [*differences, "If this is intended, run python tests/fake_cuda/fake_steps.py and read the difference."]
    )


def _without_torch(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out the waits of calls that torch makes itself. A step with half of the micro-batches is only listed if
    its waits differ.
    """
    lists = {key: values[key] for key in ("waits", "waits_of_half", "pageable") if values.get(key) is not None}
    shown = {
        key: [line for line in lines if not any(place in line for place in OF_TORCH)] for key, lines in lists.items()
    }
    if shown.get("waits_of_half") == shown.get("waits"):
        shown["waits_of_half"] = None
    return values | shown
