"""Runs with an objective for each origin of a document: metrics, layouts, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.layout_runs import weights
from kit.on_policy_runs import assert_same_under_layouts, rollout_figures, write_on_policy_run
from kit.runs import refused, refused_runs
from kit.tensors import assert_equal_tensors

from stillhouse.config import RunConfig
from stillhouse.run.run import distill, prepare

DISTILLM = {"dataset": "skew_forward_kl(0.1)", "student": "skew_reverse_kl(0.1)"}


def write(folder: Path, by_origin: dict[str, str], **settings: Any) -> RunConfig:
    defaults = {"objective.loss": "forward_kl", "rollout.share": 0.5, "train.steps": 2}
    return write_on_policy_run(folder, **defaults | {"objective.by_origin": by_origin or None} | settings)


OF_TEACHER = {"dataset": "0.3*cross_entropy + forward_kl", "teacher": "cross_entropy"}


@pytest.mark.parametrize(("by_origin", "settings"), [(DISTILLM, {}), slow(OF_TEACHER, {"rollout.writer": "teacher"})])
def test_metrics_have_the_terms_of_each_origin(
    tmp_path: Path, by_origin: dict[str, str], settings: dict[str, Any]
) -> None:
    out = distill(write(tmp_path, by_origin, **settings))
    lines = rollout_figures(out)
    names = {name for line in lines for name in line}
    for origin, loss in by_origin.items():
        for term in loss.replace("0.3*", "").split(" + "):
            assert f"loss/{term}/{origin}_nats_per_token" in names
    for line in lines:
        assert line["train/gradient_norm"] > 0
        assert line["rollout/share"] == 0.5


def test_equal_objectives_are_the_plain_run_to_the_bit(tmp_path: Path) -> None:
    same = dict.fromkeys(DISTILLM, "jsd(0.5)")
    out = distill(write(tmp_path / "by origin", same))
    plain = distill(write(tmp_path / "plain", {}, **{"objective.loss": "jsd(0.5)"}))
    assert_equal_tensors(weights(out), weights(plain))
    assert rollout_figures(out) == rollout_figures(plain)


@pytest.mark.slow
def test_gradients_are_those_of_one_process_under_every_layout(tmp_path: Path) -> None:
    write(tmp_path, DISTILLM, **{"data.eval": 0})
    assert_same_under_layouts(tmp_path)


@pytest.mark.parametrize(("by_origin", "key", "text"), refused_runs("objective of an origin"))
def test_a_term_that_rows_of_an_origin_cannot_have_is_refused_by_its_key(
    tmp_path: Path, by_origin: dict[str, str], key: str, text: str
) -> None:
    with refused(key, text):
        prepare(write(tmp_path, by_origin), announce=False)
