"""Runs cases in a child process, and compares their counts with golden.json."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("fake_steps.py")
GOLDEN: dict[str, Any] = json.loads(SCRIPT.with_name("golden.json").read_text(encoding="utf-8"))
#: what does not depend on torch's version as kernels do; only waits of this package's own calls
PORTABLE = ("micro_batches", "waits", "waits_of_half", "pageable")
OF_TORCH = ("× torch:", "× stillhouse/parallel/older_torch_stage.py:")


def entries_of(names: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Return the entries of the cases that run, and the errors of the others."""
    # Triton is not imported in its interpreter's mode, as a run would not
    child = subprocess.run([sys.executable, str(SCRIPT), *names], capture_output=True, text=True, timeout=600)
    entries: dict[str, Any] = {}
    for line in child.stdout.splitlines():
        if line.startswith("{"):
            entries |= json.loads(line)
    return entries, child.stderr


def require_same(name: str, entries: dict[str, Any], errors: str) -> None:
    """Compare a case with golden.json. Only the version of torch that the file names has the same kernels."""
    assert name in entries, f"the case '{name}' failed:\n{errors[-6000:]}"
    expected, actual = GOLDEN["cases"].get(name, {}), entries[name]
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
        [
            *differences,
            "If this is intended, run python tests/fake_cuda/fake_steps.py and read the difference.",
        ]
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
