"""Six runs of `benchmarks/unchanged` give what its golden.json has, which this command writes:

    python -m benchmarks.unchanged record --tree . --commit golden --out benchmarks/unchanged/golden.json \\
        --only dense,moe,lora,cache_top_k,tensor_2,pipeline_2_1f1b
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
from kit.runs import ROOT

from benchmarks.unchanged import records
from benchmarks.unchanged.__main__ import measured
from benchmarks.unchanged.compare import compare
from benchmarks.unchanged.runs import Tree

FILE = records.read(ROOT / "benchmarks" / "unchanged" / "golden.json")
#: the peaks of memory depend on the load of the machine
CASES: dict[str, dict[str, Any]] = {name: case | {"peak_bytes": []} for name, case in FILE["cases"].items()}


def differences(cases: dict[str, Any], machine: dict[str, str]) -> list[str]:
    """To the bit in one process of the file's machine, within 1e-6 under its layouts, within 1e-5 elsewhere."""
    return list(compare(CASES, cases, 0.0 if machine == FILE["machine"] else 1e-5))


@pytest.mark.slow
def test_losses_gradient_norms_and_weights_are_those_of_the_file(tmp_path: Path) -> None:
    cases = {name: case | {"peak_bytes": []} for name, case in measured(list(CASES), Tree(ROOT, tmp_path))}
    assert not differences(cases, records.machine())


def test_a_difference_is_noticed() -> None:
    assert set(CASES) == {"dense", "moe", "lora", "cache_top_k", "tensor_2", "pipeline_2_1f1b"}
    assert not any("error" in case for case in CASES.values())
    assert not differences(copy.deepcopy(CASES), FILE["machine"])
    for name, change in (("dense", 1e-12), ("pipeline_2_1f1b", 1e-4), ("tensor_2", math.nan)):
        changed = copy.deepcopy(CASES)
        changed[name]["metrics"]["loss/total_nats_per_token"][3] += change
        assert any(name in difference for difference in differences(changed, FILE["machine"])), name
    changed = copy.deepcopy(CASES)
    changed["cache_top_k"]["cache"] = ""
    assert len(differences(changed, FILE["machine"])) == 1
    elsewhere = copy.deepcopy(CASES)
    elsewhere["dense"]["metrics"]["loss/total_nats_per_token"][3] += 1e-9
    elsewhere["dense"]["weights_sha256"] = elsewhere["cache_top_k"]["cache"] = ""
    assert not differences(elsewhere, {})
