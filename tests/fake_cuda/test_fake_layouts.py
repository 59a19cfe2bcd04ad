"""Steps of one rank of a layout on fake CUDA tensors, as in `test_fake_objectives.py`."""

from typing import Any

import pytest
from compare import GOLDEN, entries_of, require_same
from fake_cases import CASES, LAYOUTS, PER_MICRO_BATCH
from fake_steps import BEGIN, END, PAGE, table


@pytest.fixture(scope="module")
def entries() -> tuple[dict[str, Any], str]:
    return entries_of(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_step_of_a_rank(name: str, entries: tuple[dict[str, Any], str]) -> None:
    require_same(name, *entries)


def test_no_wait_per_micro_batch() -> None:
    assert list(GOLDEN["cases"]) == list(CASES)
    assert [name for name, entry in GOLDEN["cases"].items() if "waits_of_half" in entry] == list(PER_MICRO_BATCH)


def test_docs_have_the_table() -> None:
    assert BEGIN + table(GOLDEN["cases"]) + END in PAGE.read_text(encoding="utf-8")


def test_no_copy_from_pageable_memory() -> None:
    assert not [name for name, entry in GOLDEN["cases"].items() if entry["pageable"]]
