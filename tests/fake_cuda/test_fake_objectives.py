"""Steps of one process on fake CUDA tensors: every objective and every source of signals.

A tensor on a wrong device is an error of the case itself. Nothing waits for the device once per micro-batch: with
twice as many micro-batches, the list of waits is the same.
"""

from typing import Any

import pytest
from compare import GOLDEN, entries_of, require_same
from fake_cases import OBJECTIVES


@pytest.fixture(scope="module")
def entries() -> tuple[dict[str, Any], str]:
    return entries_of(OBJECTIVES)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_step_of_one_process(name: str, entries: tuple[dict[str, Any], str]) -> None:
    require_same(name, *entries)


def test_one_wait_in_a_step() -> None:
    once = ["1 × stillhouse/engine/engine.py:read: cuda to cpu"]
    assert not [name for name in OBJECTIVES if GOLDEN["cases"][name]["waits"] != once]
