"""A few dozen damaged inputs of each kind. The campaign of fuzz.py tries thousands."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from fuzz import outcome, run
from kit.subjects import SUBJECTS

MUTATIONS = 30


@pytest.mark.parametrize("subject", SUBJECTS)
def test_damaged_input_is_loaded_or_refused(subject: str, tmp_path: Path) -> None:
    load = SUBJECTS[subject](tmp_path)
    kinds = []
    for number in range(MUTATIONS):
        kind, details = outcome(load, subject, 1, number)
        assert kind != "FAILED", f"mutation {number}: {details}"
        kinds.append(kind)
    assert len(set(kinds)) > 1, "expected some inputs to load and some to be refused"
    assert kinds.count("loaded") < MUTATIONS / 2


def fails(error: BaseException) -> Callable[[Random], None]:
    def load(_: Random) -> None:
        raise error

    return load


ERRORS = [
    *(AttributeError("x"), KeyError("x"), OSError("x"), MemoryError(), SystemExit(1)),
    *(json.JSONDecodeError("x", "y", 0), UnicodeDecodeError("utf-8", b"x", 0, 1, "y")),
    *(ValueError("\x1b[31m"), ValueError("\n" * 99), ValueError("x" * 9999)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: repr(error)[:30])
def test_any_other_end_is_a_failure(error: BaseException) -> None:
    assert outcome(fails(error), "data", 0, 0)[0] == "FAILED"
    assert outcome(fails(ValueError("no such file")), "data", 0, 0)[0] == "ValueError"
    assert outcome(lambda _: None, "data", 0, 0)[0] == "loaded"


@pytest.mark.slow
def test_two_thousand_damaged_images_and_records_with_images_are_loaded_or_refused() -> None:
    campaign = run("images", 2000, seed=1)
    assert not campaign.failures
    assert {"loaded", "DataError", "ValueError"} <= campaign.kinds.keys()


@pytest.mark.slow
def test_a_campaign_continues_after_an_input_that_ends_its_process() -> None:
    campaign = run("crashing", 9)
    assert campaign.mutations == 9
    assert campaign.kinds == {"loaded": 6, "FAILED": 3}
    assert [failure["mutation"] for failure in campaign.failures] == [2, 5, 8]
    assert all("status -9" in str(failure["details"]) for failure in campaign.failures)
