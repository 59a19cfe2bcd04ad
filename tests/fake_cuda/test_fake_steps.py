"""Steps on fake CUDA tensors: every objective and source of signals in one process, and a rank of every layout.

A tensor on a wrong device is an error of the case itself. Nothing waits for the device once per micro-batch: with
twice as many micro-batches, the list of waits is the same.
"""

from collections.abc import Iterator

import pytest
from compare import GOLDEN, FakeSteps, require_same
from fake_cases import CASES, OBJECTIVES, PER_MICRO_BATCH
from fake_steps import BEGIN, END, PAGE, table
from kit import slow

#: one case for each way on which the tensors of a step reach the device
QUICK = [
    *("cross_entropy and jsd", "compiled", "top_k", "policy gradient", "experts", "multi-token prediction"),
    *("fsdp", "tensor", "context", "expert", "fsdp × pipeline", "zbv"),
]


@pytest.fixture(scope="module")
def steps() -> Iterator[FakeSteps]:
    with FakeSteps() as process:
        yield process


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in CASES])
def test_a_step_is_that_of_the_file(name: str, steps: FakeSteps) -> None:
    require_same(name, steps.entry(name))


def test_one_wait_in_a_step_of_one_process() -> None:
    once = ["1 × stillhouse/engine/engine.py:read: cuda to cpu"]
    assert not [name for name in OBJECTIVES if GOLDEN["cases"][name]["waits"] != once]


def test_no_wait_per_micro_batch() -> None:
    assert list(GOLDEN["cases"]) == list(CASES)
    assert [name for name, entry in GOLDEN["cases"].items() if "waits_of_half" in entry] == list(PER_MICRO_BATCH)


def test_docs_have_the_table() -> None:
    assert BEGIN + table(GOLDEN["cases"]) + END in PAGE.read_text(encoding="utf-8")


def test_no_copy_from_pageable_memory() -> None:
    assert not [name for name, entry in GOLDEN["cases"].items() if entry["pageable"]]
