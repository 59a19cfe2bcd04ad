"""On-policy runs in which the student writes in this process: schedules, resuming, layouts, objectives."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.families import build
from kit.layout_runs import weights
from kit.on_policy_runs import assert_same_under_layouts, rollout_figures, write_module, write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import contents, refused, refused_runs, run, write_records
from kit.serving import Server
from kit.signal_hooks import kill_at
from kit.toy_tokenizer import toy_tokenizer
from safetensors.torch import load_file

from stillhouse.checkpoint.resume import decisive_values
from stillhouse.config.read_config import dotted_values
from stillhouse.run.run import distill, prepare

HOOKS = """
def length(prompt, completion, record):
    assert prompt.endswith("is") and record["completion"]
    return float(len(completion))

def echo(prompt, completion, record):
    return None if completion.count("!") >= 2 else " no!"
"""


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, "hooks", HOOKS)


@pytest.mark.parametrize(
    ("schedule", "staleness", "expected"),
    [
        ("sync", 2, [0, 0, 0, 0, 0, 0]),
        ("one_step_off", 2, [0, 1, 1, 1, 1, 1]),
        ("two_step_off", 2, [0, 1, 2, 2, 2, 2]),
        ("async", 2, [0, 1, 1, 1, 1, 1]),
        ("async", 4, [0, 1, 2, 2, 2, 2]),
    ],
)
def test_the_weights_that_wrote_a_token_are_as_old_as_the_schedule_says(
    tmp_path: Path, schedule: str, staleness: int, expected: list[int]
) -> None:
    config = write_on_policy_run(tmp_path, **{"rollout.schedule": schedule, "rollout.max_staleness": staleness})
    lines = rollout_figures(distill(config))
    assert [line["rollout/staleness_max"] for line in lines] == expected
    for line in lines:
        assert (line["rollout/log_ratio_max"] > 1e-4) == (line["rollout/staleness_max"] > 0), line["step"]


def test_without_staleness_every_schedule_is_sync_to_the_bit(tmp_path: Path) -> None:
    sync = distill(write_on_policy_run(tmp_path, out=str(tmp_path / "sync")))
    for schedule in ("one_step_off", "two_step_off", "async"):
        settings = {"rollout.schedule": schedule, "rollout.max_staleness": 0, "out": str(tmp_path / schedule)}
        other = distill(write_on_policy_run(tmp_path, **settings))
        assert rollout_figures(other) == rollout_figures(sync), schedule
        assert contents(other / "model") == contents(sync / "model"), schedule


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        *(("one_step_off", 3), ("async", 3)),
        *(slow("sync", 1), slow("async", 1), slow("one_step_off", 4), slow("two_step_off", 4)),
    ],
)
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path, schedule: str, at: int) -> None:
    """The run is killed after step `at` is logged; its last checkpoint is of an earlier step, or there is none."""
    settings = {"rollout.schedule": schedule, "rollout.max_staleness": 4, "checkpoint.every": 2}
    undisturbed = distill(write_on_policy_run(tmp_path, **settings, out=str(tmp_path / "undisturbed")))
    write_on_policy_run(tmp_path, **settings)
    out, run_yaml = tmp_path / "out", tmp_path / "run.yaml"
    kill_at(at, out, run_yaml)
    again = run("distill", run_yaml)
    assert ("has no checkpoint of this run yet: the run starts anew, at step 1" in again.out) == (at < 2)
    assert rollout_figures(out) == rollout_figures(undisturbed)
    assert contents(out / "model") == contents(undisturbed / "model")


def test_a_checkpoint_without_its_samples_is_refused(tmp_path: Path) -> None:
    write_on_policy_run(tmp_path, **{"rollout.schedule": "one_step_off", "checkpoint.every": 2})
    kill_at(5, tmp_path / "out", tmp_path / "run.yaml")
    kept = tmp_path / "out" / "checkpoints" / "step-00000004" / "rollouts.safetensors"
    content = kept.read_bytes()
    kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = run("distill", tmp_path / "run.yaml", "checkpoint.fallback=false", code=1)
    assert "rollouts.safetensors" in again.err


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on_policy")
    settings = {"rollout.schedule": "one_step_off", "checkpoint.every": 3}
    distill(write_on_policy_run(folder, out=str(folder / "one"), **settings))
    return folder


@pytest.mark.parametrize("layout", ["fsdp=2", *(slow(f"{axis}=2") for axis in ("pipeline", "tensor"))])
def test_two_processes_train_on_the_completions_of_one(one_process: Path, layout: str) -> None:
    out = one_process / layout
    run_ranks(2, "distill", one_process / "run.yaml", f"parallel.{layout}", f"out={out}")
    for line, expected in zip(rollout_figures(out), rollout_figures(one_process / "one"), strict=True):
        for key in ("rollout/completion_tokens", "rollout/staleness"):
            assert line[key] == expected[key]
        assert line["loss/total_nats_per_token"] == pytest.approx(expected["loss/total_nats_per_token"], rel=1e-4)
        assert line["train/gradient_norm"] == pytest.approx(expected["train/gradient_norm"], rel=1e-3)
        assert ("rollout/log_ratio_fresh" in line) == (line["step"] == 1)
        assert line.get("rollout/log_ratio_fresh", 0.0) < 1e-5
        assert line["rollout/log_ratio"] == pytest.approx(expected["rollout/log_ratio"], rel=1e-2, abs=1e-5)
    for name, weight in weights(one_process / "one").items():
        assert torch.allclose(weights(out)[name], weight, atol=1e-3), name


def test_a_run_goes_on_under_another_layout_with_the_samples_of_the_first(one_process: Path) -> None:
    out = one_process / "moved"
    shutil.copytree(one_process / "one", out)
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    config = (out / "config.yaml").read_text().replace(str(one_process / "one"), str(out))
    (out / "config.yaml").write_text(config)
    run_ranks(2, "distill", one_process / "run.yaml", "parallel.fsdp=2", f"out={out}")
    for line, expected in zip(rollout_figures(out), rollout_figures(one_process / "one"), strict=True):
        assert line["rollout/completion_tokens"] == expected["rollout/completion_tokens"]


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("sampled_kl(k3) + 0.01*entropy", {"rollout.correction": "masked"}),
        ("policy_gradient(clip_low=0.2, clip_high=0.3)", {"rollout.reward": "hooks:length", "rollout.top_k": 5}),
        (
            "policy_gradient(ratio=sequence, clip_low=3e-4, dual_clip=3, kl_scale=0.01)",
            {"rollout.reward": "hooks:length", "rollout.schedule": "one_step_off", "train.precision": "bf16"},
        ),
        ("jsd(0.5)", {"rollout.environment": "hooks:echo", "rollout.stop": ["e"]}),
        ("cross_entropy + jsd(0.5)", {"rollout.share": 0.5, "rollout.position_decay": 0.9}),
    ],
)
@pytest.mark.usefixtures("hooks")
def test_every_kind_of_objective(tmp_path: Path, loss: str, settings: dict[str, Any]) -> None:
    out = distill(write_on_policy_run(tmp_path, **{"objective.loss": loss, "train.steps": 3} | settings))
    lines = rollout_figures(out)
    assert len(lines) == 3
    for line in lines:
        assert line["train/gradient_norm"] > 0
        assert ("rollout/reward" in line) == ("rollout.reward" in settings)
        assert line["rollout/share"] == settings.get("rollout.share", 1.0)
    before, after = load_file(tmp_path / "student" / "model.safetensors"), weights(out)
    assert any(not torch.equal(before[name], weight) for name, weight in after.items())


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(("settings", "key", "text"), refused_runs("on_policy"))
def test_what_does_not_fit_is_refused_by_its_key(
    tmp_path: Path, settings: dict[str, Any], key: str, text: str
) -> None:
    with refused(key, text):
        prepare(write_on_policy_run(tmp_path, **settings), announce=False)


def save_padded_student(folder: Path) -> None:
    """The student's head has rows of padding that the teacher's lacks, so that a divergence does not count them."""
    student = build("llama", seed=1, vocab_size=len(toy_tokenizer()) + 60, tied=False)
    student.save_pretrained(folder / "student")
    toy_tokenizer().save_pretrained(folder / "student")


@pytest.mark.parametrize(("teacher", "processes"), [("in the job", 1), slow("served", 2)])
def test_the_writers_log_probs_are_over_the_trained_rows(tmp_path: Path, teacher: str, processes: int) -> None:
    save_padded_student(tmp_path)
    settings = {"objective.loss": "reverse_kl + sampled_kl(k2)", "train.steps": 2, "parallel.fsdp": processes}
    write_on_policy_run(tmp_path, **settings)
    with ExitStack() as servers:
        if teacher == "served":
            server = servers.enter_context(Server(tmp_path / "teacher"))
            write_on_policy_run(tmp_path, cached=True, **settings, **{"teacher.url": server.url})
        run_ranks(processes, "distill", tmp_path / "run.yaml")
    assert all(line["rollout/log_ratio_max"] < 1e-4 for line in rollout_figures(tmp_path / "out"))


@pytest.mark.slow
def test_a_server_that_counts_rows_of_padding_is_warned_of(tmp_path: Path) -> None:
    save_padded_student(tmp_path)
    with Server(tmp_path / "student", "--generate") as server:
        write_on_policy_run(tmp_path, **{"rollout.engine": "stillhouse", "rollout.url": server.url, "train.steps": 1})
        shown = run("distill", tmp_path / "run.yaml").out
    rows = len(toy_tokenizer())
    assert f"over all {rows + 60} rows of the student's head, but training only over the {rows} rows" in shown


def test_a_decay_changes_no_mean_of_entropies(tmp_path: Path) -> None:
    """The first step has the same completions, and the entropies of random models hardly depend on the place."""
    settings = {"train.steps": 1, "objective.loss": "jsd(0.5)"}
    lines = []
    for decay in (1.0, 0.5, 1e-9):
        changes = {"rollout.position_decay": decay, "out": str(tmp_path / f"{decay}")}
        lines += rollout_figures(distill(write_on_policy_run(tmp_path, **settings, **changes)))
    plain, *others = lines
    for line in others:
        assert line["tokens"] == plain["tokens"]
        for key in ("train/student_entropy_nats", "train/teacher_entropy_nats"):
            assert line[key] == pytest.approx(plain[key], rel=0.25)
        assert line["loss/jsd(0.5)_nats_per_token"] < 0.5 * plain["loss/jsd(0.5)_nats_per_token"]
        assert line["train/agreement"] <= 1


def test_runs_of_versions_without_a_key_go_on(tmp_path: Path) -> None:
    config = write_on_policy_run(tmp_path)
    assert "rollout.deviation" not in decisive_values(dotted_values(config))
    assert config.rollout is not None
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"deviation": "sample"})})
    assert decisive_values(dotted_values(other))["rollout.deviation"] == "sample"


def test_prompts_alone_need_no_completions(tmp_path: Path) -> None:
    prompts = [{"prompt": f"Two and {number} is"} for number in range(15)]
    config = write_on_policy_run(tmp_path, **{"data.eval": 0, "train.steps": 2})
    write_records(tmp_path / "train.jsonl", prompts)
    assert len(rollout_figures(distill(config))) == 2
    run("export", tmp_path / "out", "--out", tmp_path / "made")
    size = f"4 prompts with {config.rollout.samples_per_prompt} completions of each"
    assert f"2 optimizer steps of {size}; " in (tmp_path / "made" / "README.md").read_text()
    held_out = write_on_policy_run(tmp_path / "held_out", **{"data.eval": 0.3})
    write_records(tmp_path / "held_out" / "train.jsonl", prompts)
    with refused("data.eval", "data.eval: got 0.3, but held-out metrics need completions"):
        prepare(held_out, announce=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (
            "0.5*reverse_kl + policy_gradient + sampled_kl(k2)",
            {"rollout.reward": "hooks:length", "rollout.position_decay": 0.9, "rollout.temperature": 0.7},
        ),
        ("policy_gradient(teacher_kl=1) + jsd(0.5)", {}),
    ],
)
@pytest.mark.usefixtures("hooks")
def test_gradients_of_the_same_completions_under_every_layout(
    tmp_path: Path, loss: str, settings: dict[str, Any]
) -> None:
    write_on_policy_run(tmp_path, **{"objective.loss": loss, "data.eval": 0} | settings)
    assert_same_under_layouts(tmp_path)
