"""docs/claims.md and docs/results/real.md are what the result files say, and the rule decides as it is stated."""

import json
from pathlib import Path

import pytest

from benchmarks.claims.__main__ import measure
from benchmarks.claims.catalog import CLAIMS
from benchmarks.claims.claim import HOLDS, OPEN, WRONG, Claim, Difference, verdict_of
from benchmarks.claims.page import NOT_MEASURED, PAGE, TEXTS, page
from benchmarks.real.page import FOLDER, pages
from benchmarks.record import RESULTS

MEASURED = [name for name, claim in CLAIMS.items() if claim.measure is not None]


def test_the_page_is_what_the_result_files_say(tmp_path: Path) -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    assert page(tmp_path).count(f"**Verdict: {NOT_MEASURED}") == len(TEXTS)
    assert {*CLAIMS} <= {*TEXTS}
    assert all(name in CLAIMS or "needs" in texts for name, texts in TEXTS.items())


def test_the_page_of_real_models_is_what_the_result_files_say() -> None:
    assert {name: (FOLDER / name).read_text(encoding="utf-8") for name in pages()} == pages()


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.2, 0.01, 0.3), HOLDS),
        ((0.2, -0.01, 0.3), OPEN),  # a seed with the other sign
        ((0.05, 0.01, 0.03), OPEN),  # a mean below the margin
        ((-0.2, -0.01, -0.3), WRONG),
        ((-0.2, 0.01, -0.3), OPEN),
    ],
)
def test_the_verdict_of_a_difference(values: tuple[float, ...], verdict: str) -> None:
    difference = Difference("a − b", lambda figures: figures["a"]["x"] - figures["b"]["x"], 0.1)
    seeds = [{"a": {"x": 1 + value}, "b": {"x": 1.0}} for value in values]
    assert verdict_of(Claim("test", {}, [difference]), seeds) == verdict


def test_one_contradicted_difference_makes_a_claim_wrong() -> None:
    differences = [Difference("a", lambda figures: figures["a"]["x"], 0.1)]
    differences.append(Difference("−a", lambda figures: -figures["a"]["x"], 0.1))
    seeds = [{"a": {"x": 1.0}}, {"a": {"x": 2.0}}]
    assert verdict_of(Claim("test", {}, differences[:1]), seeds) == HOLDS
    assert verdict_of(Claim("test", {}, differences), seeds) == WRONG


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim is measured with a hundredth of its steps; a second call reads what the first one has kept."""
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path / "results")
    measure(CLAIMS["one-prompt"], [0], tmp_path, divisor=100)
    (path,) = (tmp_path / "results").iterdir()
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {*result["seeds"]} == {"0"}
    assert f"**Verdict: {result['verdict']}" in page(tmp_path / "results")
    (tmp_path / "one-prompt" / "seed-0").rename(tmp_path / "moved")
    measure(CLAIMS["one-prompt"], [0], tmp_path, divisor=100)
    assert json.loads(path.read_text(encoding="utf-8"))["seeds"] == result["seeds"]


@pytest.mark.parametrize("name", MEASURED)
def test_a_result_file_has_the_verdict_of_its_figures(name: str) -> None:
    path = CLAIMS[name].result_file(RESULTS)
    if path is not None:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert result["verdict"] == verdict_of(CLAIMS[name], CLAIMS[name].figures(result))
