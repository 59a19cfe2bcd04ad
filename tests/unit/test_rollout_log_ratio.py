"""The warning of an engine that computes other log-probabilities than training does, under every schedule."""

from pathlib import Path
from typing import Any

import pytest
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.stub_servers import StubHandler, stub_server
from kit.stub_vllm import Vllm

from stillhouse.run.run import distill
from stillhouse.serving.client.served_weights import PROBE_TOKENS


def shifted(handler: StubHandler, content: dict[str, Any]) -> None:
    """An engine that computes otherwise only where the probe after each update does not look: late in a text."""
    [choice] = content["choices"]
    if len(choice["token_ids"]) > PROBE_TOKENS:
        for entry in choice["logprobs"]["content"]:
            entry["logprob"] -= 0.5
    handler.reply(200, content)


@pytest.mark.parametrize(
    ("schedule", "options", "learning_rate", "warning"),
    [
        ("sync", {}, 0.01, "with the same weights"),
        pytest.param("one_step_off", {}, 0.005, "", marks=pytest.mark.slow),
        pytest.param("async", {"mixes_weights": True}, 0.01, "with the same weights", marks=pytest.mark.slow),
        pytest.param("one_step_off", {}, 0.02, "at most 1 steps older, differ by", marks=pytest.mark.slow),
    ],
)
def test_an_engine_with_other_log_probabilities_is_warned_of(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    schedule: str,
    options: dict[str, Any],
    learning_rate: float,
    warning: str,
) -> None:
    """Of a step's tokens, those that the present weights have written must have the same log-probabilities."""
    settings: dict[str, Any] = {"data.eval": 0.0, "rollout.engine": "vllm", "rollout.url": "http://127.0.0.1:1"}
    write_on_policy_run(tmp_path, **settings)  # the student, which the server has from the start
    with stub_server(Vllm, tmp_path / "student", processed=True, **options) as server:
        settings |= {"rollout.url": server.url, "rollout.schedule": schedule, "train.learning_rate": learning_rate}
        if warning == "with the same weights":
            server.faults = [shifted] * 9999
        lines = rollout_figures(distill(write_on_policy_run(tmp_path, **settings)))
    warnings = [line for line in capsys.readouterr().out.splitlines() if "the engine's log-probabilities" in line]
    assert bool(warnings) == bool(warning)
    assert sum(warning in line for line in warnings) == bool(warning)  # once, beside that of older weights
    fresh = [line.get("rollout/log_ratio_fresh") for line in lines]
    assert fresh[0] is not None
    assert any(schedule is not None for schedule in fresh[1:]) == (schedule != "one_step_off")
    if warning != "with the same weights":
        assert max(log_ratio for log_ratio in fresh if log_ratio is not None) < 1e-5
        assert max(line["rollout/log_ratio"] for line in lines) > 1e-2


def test_an_engine_that_keeps_its_first_head_ends_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data.eval": 0.0, "rollout.engine": "vllm", "train.learning_rate": 0.01}
    write_on_policy_run(tmp_path, **settings, **{"rollout.url": "http://127.0.0.1:1"})
    with stub_server(Vllm, tmp_path / "student", processed=True, keeps_head=True) as server:
        config = write_on_policy_run(tmp_path, **settings, **{"rollout.url": server.url})
        with pytest.raises(ValueError, match="and its log-probabilities are those of other weights"):
            distill(config)
