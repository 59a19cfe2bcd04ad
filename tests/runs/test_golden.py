"""Six short runs give the same results as when `golden.json` was written (see `golden_runs.py`)."""

import copy
import json
import math

import pytest
from kit.golden_runs import FILE, all_runs, compare, machine


@pytest.mark.slow
def test_losses_gradient_norms_and_weights_are_those_of_the_file() -> None:
    assert not compare(json.loads(FILE.read_text(encoding="utf-8")), {"machine": machine(), "runs": all_runs()})


def test_a_difference_is_changed() -> None:
    expected = json.loads(FILE.read_text(encoding="utf-8"))
    assert set(expected["runs"]) == {"dense", "moe", "lora", "pipeline", "tensor", "top_k"}
    assert not compare(expected, copy.deepcopy(expected))
    for name, change in (("dense", 1e-12), ("pipeline", 1e-4), ("tensor", math.nan)):
        changed = copy.deepcopy(expected)
        changed["runs"][name]["losses"][3] += change
        assert any(name in difference for difference in compare(expected, changed)), name
    elsewhere = copy.deepcopy(expected) | {"machine": {}}
    elsewhere["runs"]["dense"]["losses"][3] += 1e-9
    elsewhere["runs"]["dense"]["weights_sha256"] = ""
    assert not compare(expected, elsewhere)
