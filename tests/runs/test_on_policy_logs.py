"""What on-policy runs write beside the model: samples, timeline, metrics and the completions of check."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import json_lines, metrics, run
from kit.stub_servers import QuietHandler, listen

from stillhouse.loops.greedy_evaluation import EvaluationContext
from stillhouse.output.records import TimelineSpan
from stillhouse.report.shown_records import timeline
from stillhouse.run.run import distill


def test_one_step_is_what_the_files_say(tmp_path: Path) -> None:
    settings = {"objective.loss": "reverse_kl + policy_gradient", "rollout.reward": f"{__name__}:letters"}
    out = distill(write_on_policy_run(tmp_path, **settings, **{"train.steps": 2, "rollout.samples": 4}))
    samples = json_lines(out / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [1, 1, 1, 1, 2, 2, 2, 2]
    prompts = [sample["prompt"] for sample in samples]
    assert prompts[::2] == prompts[1::2], "both completions of a prompt"
    assert len(set(prompts)) == 4
    for line in rollout_figures(out):
        least, mean, most = (line[f"rollout/completion_tokens{name}"] for name in ("_min", "", "_max"))
        assert 1 <= least <= mean <= most == 11
        assert line.get("rollout/ended_tokens", mean) <= mean
    assert all(line["speed/reward_seconds"] < 0.1 for line in metrics(out) if "speed/waiting" in line)
    for sample in samples:
        assert sample["source"] == "student"
        assert {token["version"] for token in sample["tokens"]} == {sample["step"] - 1}
        assert all(token["divergence"] > 0 for token in sample["tokens"])
        assert sample["prompt"].endswith("is")
    lanes = {span["lane"] for span in json_lines(out / "timeline.jsonl")}
    assert lanes == {"rollout", "teacher", "trainer", "weights"}


@pytest.mark.parametrize("schedule", ["one_step_off", slow("two_step_off"), slow("async")])
def test_console_timeline_and_metrics_count_the_same_seconds(tmp_path: Path, schedule: str) -> None:
    write_on_policy_run(tmp_path, **{"rollout.schedule": schedule, "eval.every": 2})
    shown = run("distill", tmp_path / "run.yaml").out
    lines = {line["step"]: line for line in metrics(tmp_path / "out") if "speed/waiting" in line}
    spans = json_lines(tmp_path / "out" / "timeline.jsonl")
    spans.sort(key=lambda span: span["start"])
    for step, line in lines.items():
        of_step = [span for span in spans if (span["lane"], span["step"]) == ("trainer", step)]
        for before, after in pairwise(of_step):
            assert after["start"] == pytest.approx(before["stop"], abs=4e-4), "no gap, and no overlap"
        seconds = sum(span["stop"] - span["start"] for span in of_step)
        waited = sum(span["stop"] - span["start"] for span in of_step if span["what"].startswith("wait"))
        assert seconds == pytest.approx(line["speed/step_seconds"], abs=2e-3)
        assert waited / seconds == pytest.approx(line["speed/waiting"], abs=0.02)
    last = lines[max(lines)]
    (printed,) = re.findall(rf"^step {last['step']}/.* waiting (\d+)%, .* left", shown, re.MULTILINE)
    assert int(printed) == round(100 * last["speed/waiting"])
    drawn = timeline([TimelineSpan(**span) for span in spans])
    assert drawn is not None
    weighted = sum(line["speed/waiting"] * line["speed/step_seconds"] for line in lines.values())
    seconds = sum(line["speed/step_seconds"] for line in lines.values())
    assert drawn.waiting == pytest.approx(weighted / seconds, abs=0.02)
    for lane in drawn.lanes:
        assert sum(percent for _, percent in lane.shares) == 100, lane.name


def letters(prompt: str, completion: str, record: dict[str, Any]) -> float:
    return float(len(completion))


def same(prompt: str, completion: str, record: dict[str, Any]) -> float:
    return 0.25


def fails(prompt: str, completion: str, record: dict[str, Any]) -> float:
    return float(record["answer"])


class Refuses:
    def reset(self, prompt: str, record: dict[str, Any]) -> None:
        self.turns = 0

    def step(self, turn: str) -> str | None:
        raise RuntimeError("no more than nothing")


def perplexity(context: EvaluationContext) -> dict[str, float]:
    (context.folder / "written").touch()
    return {"texts": len(context.generate(["a"])) / len(context.tokenizer.decode([]))}


def texts(context: EvaluationContext) -> dict[str, float]:
    (context.folder / "written").touch()
    return {"texts": len(context.generate(["a"]))}


def prompts(folder: Path, function: str) -> str:
    return f"eval.prompts={{data: {folder}/eval.jsonl, max_new_tokens: 5, reward: {__name__}:{function}}}"


class Describes(QuietHandler):
    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "student", "owned_by": "vllm"}]})


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[str | Path]]:
    """The arguments of a check of a run whose completions are written by a server, which only describes itself."""
    settings = {"objective.loss": "reverse_kl + policy_gradient", "rollout.reward": f"{__name__}:letters"}
    write_on_policy_run(tmp_path, **settings, **{"eval.task_tokens": 4})
    server = listen(Describes)
    yield [
        "check",
        tmp_path / "run.yaml",
        "rollout.engine=vllm",
        f"rollout.url=http://127.0.0.1:{server.server_port}",
    ]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_check_calls_each_function_of_the_run_once(tmp_path: Path, served: list[str | Path], processes: int) -> None:
    arguments = [*served, prompts(tmp_path, "same"), f"eval.callbacks=[{__name__}:texts]"]
    out = run(*arguments).out if processes == 1 else run_ranks(processes, *arguments)[0].out
    row = r"^functions +'A completion of stillhouse check\.' in place of .*train.jsonl:1 has the reward \d+$"
    assert re.search(row, out, re.MULTILINE)
    assert re.search(r"^evaluation .*eval/prompts/reward 0.25, .*eval/texts 1$", out, re.MULTILINE)
    assert not [*tmp_path.rglob("written")]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rollout.reward=HERE:fails", "rollout.reward: HERE:fails raises KeyError: 'answer' for the completion 'A c"),
        ("eval.callbacks=[HERE:perplexity]", "eval.callbacks: HERE:perplexity raises ZeroDivisionError: "),
        slow("rollout.environment=HERE:Refuses", "rollout.environment: HERE:Refuses.step raises RuntimeError: no mo"),
        slow("eval.prompts.reward=HERE:fails", "eval.prompts.reward: HERE:fails raises KeyError: 'answer' for the"),
        slow(
            "checkpoint.best=eval/text", "checkpoint.best: got eval/text, but the evaluation of step 0 has only eval/"
        ),
    ],
)
def test_check_fails_with_a_function_as_the_run_would(
    tmp_path: Path, served: list[str | Path], override: str, problem: str
) -> None:
    others = [prompts(tmp_path, "same"), f"eval.callbacks=[{__name__}:texts]", "checkpoint.greater_is_better=null"]
    if "best" in override:
        others[-1] = "checkpoint.greater_is_better=true"
    ended = run(*served, *others, override.replace("HERE", __name__), code=2 if "best" in override else 1)
    assert f"error: {problem.replace('HERE', __name__)}" in ended.err


def test_check_writes_completions_of_a_first_step(tmp_path: Path) -> None:
    """6 steps with 4 of 8 completions each from the dataset, which has 15 documents."""
    settings = {"objective.loss": "cross_entropy + reverse_kl + sampled_kl(k2) + policy_gradient"}
    settings |= {"rollout.reward": f"2*{__name__}:letters + {__name__}:same"}
    write_on_policy_run(tmp_path, **settings, **{"rollout.share": 0.5})
    command = run("check", tmp_path / "run.yaml")
    for expected in (
        "6; in each of them, prompts: 4 (rollout.prompts_per_step), completions: 8, 50% written by the student",
        "24 of the completions are from the dataset of 15 documents: 1.60 passes over it",
        *("one step", "sampled_kl(k2)", "reverse_kl"),
    ):
        assert expected in command.out
    assert not (tmp_path / "out").exists()
    facts = r"tokens, (?:ended by itself|cut at the limit), reward (\S+) \(letters (\S+), same 0.25\), advantage \S+,"
    row = rf"^completion +\S+train.jsonl:\d+, student's, \d+ {facts}.* in ⟦ ⟧:\n.*Two.* is⟦"
    shown = re.search(row, command.out, re.MULTILINE)
    assert shown is not None, command.out
    assert float(shown[1]) == 2 * float(shown[2]) + 0.25
    row = r"^rewards +of 4 completions: from \S+ to \S+, mean \S+, standard dev"
    assert re.search(row, command.out, re.MULTILINE)
