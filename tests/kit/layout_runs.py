"""Runs of one configuration in one or several processes, and the comparison of what they write."""

import json
from pathlib import Path

import pytest
from kit.ranks import Ranks
from kit.runs import Ended, run
from kit.tensors import assert_near
from safetensors.torch import load_file
from torch import Tensor

LIMIT = 180


def distill(folder: Path, out: str, processes: int, *overrides: str, code: int = 0) -> Ended:
    """Run the configuration of a folder to its end, in this process or in several new ones."""
    arguments = ("distill", folder / "run.yaml", f"out={folder / out}", *overrides)
    if processes == 1:
        return run(*arguments, code=code)
    ranks = Ranks(processes, *arguments)
    codes = ranks.wait(LIMIT)
    ended = Ended(next(filter(None, codes), 0), "".join(rank.out for rank in ranks), ranks.err)
    assert ended.code == code, ended
    return ended


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_same_weights(run: Path, reference: Path, tolerance: float = 1e-4) -> None:
    """Compare each weight. tolerance: the largest difference, relative to the norm of the reference's weight."""
    assert_near(weights(run), weights(reference), tolerance)


def assert_same_model(one: Path, other: Path) -> None:
    """Compare the weights, configurations and held-out texts of two runs.

    The order of nearly equally likely tokens may differ.
    """
    assert_same_weights(other, one)
    for name in ("config.json", "generation_config.json"):
        assert (one / "model" / name).read_text() == (other / "model" / name).read_text()
    texts = [json.loads((run / "tokens.json").read_text())["documents"] for run in (other, one)]
    sources, expected_sources = ([document["source"] for document in documents] for documents in texts)
    assert sources == expected_sources
    tokens = ([token for document in documents for token in document["tokens"]] for documents in texts)
    for here, there in zip(*tokens, strict=True):
        assert (here["text"], here["target"]) == (there["text"], there["target"])
        assert here["kl"] == (None if there["kl"] is None else pytest.approx(there["kl"], rel=1e-2, abs=1e-3))
        for side in ("teacher", "student"):
            assert [value for _, value in here[side]] == pytest.approx([value for _, value in there[side]], abs=1e-3)
