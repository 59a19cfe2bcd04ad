"""On-policy runs with several weighted sources of prompts, each with its own reward, sampling and share."""

import math
import statistics
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.on_policy_runs import rollout_figures, write_module, write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import contents, json_lines, refused, refused_runs, run, write_records
from kit.serving import Server
from kit.signal_hooks import kill_at
from kit.teacher_gradients import assert_same_as_float64, named_gradients
from transformers import AutoModelForCausalLM

from stillhouse.config import RunConfig
from stillhouse.loops.rollouts import open_rollout
from stillhouse.output.folder import RunFolder
from stillhouse.output.rollout_log import RolloutLog
from stillhouse.run.run import distill, prepare

HOOKS = """
def length(prompt, completion, record):
    assert "completion" in record and "number" not in record
    return float(len(completion))

def short(prompt, completion, record):
    assert "number" in record
    return -float(len(completion))

def echo(prompt, completion, record):
    assert "number" in record
    return None if completion.count("!") >= 2 else " no!"
"""
#: what the second source sets
OF_COUNTS = {"reward": "hooks:short", "temperature": 0.6, "max_new_tokens": 7, "samples_per_prompt": 3}
LOSS = "policy_gradient(teacher_kl=0.3) + reverse_kl"


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, "hooks", HOOKS)


def write_mixture(
    folder: Path, of_counts: dict[str, Any] = OF_COUNTS, weight: float = 0.25, **more: Any
) -> RunConfig:
    """A run with two sources: `train`, with three quarters of the prompts, and `counts`."""
    folder.mkdir(exist_ok=True)
    records = [{"prompt": f"Say {number} and", "number": number} for number in range(9)]
    write_records(folder / "counts.jsonl", records)
    sources: list[dict[str, Any]] = [
        {"source": str(folder / "train.jsonl"), "weight": 1 - weight},
        {"source": str(folder / "counts.jsonl"), "weight": weight, "rollout": of_counts},
    ]
    defaults = {"rollout.reward": "hooks:length", "objective.loss": LOSS, "data.train": sources}
    return write_on_policy_run(folder, **defaults | more)


def shown(out: Path) -> list[dict[str, Any]]:
    return json_lines(out / "samples.jsonl")


@pytest.mark.usefixtures("hooks")
def test_every_source_has_a_reward_sampling_and_curves(tmp_path: Path) -> None:
    """Steps have few completions, so that samples.jsonl has all of them."""
    settings = {"rollout.prompts_per_step": 1, "train.steps": 8, "rollout.samples_per_prompt": 4}
    out = distill(write_mixture(tmp_path, OF_COUNTS | {"stop": ["a", "e"]}, **settings))
    figures, samples = rollout_figures(out), shown(out)
    by_step = [[sample for sample in samples if sample["step"] == line["step"]] for line in figures]
    assert Counter(of_step[0]["prompt_source"] for of_step in by_step) == {"train": 6, "counts": 2}
    for line, of_step in zip(figures, by_step, strict=True):
        name = of_step[0]["prompt_source"]
        assert all(sample["prompt"].startswith("<s>Two" if name == "train" else "<s>Say") for sample in of_step)
        keys = {key.split("/")[2] for key in line if key.startswith(f"rollout/{name}/")}
        assert not any(key.startswith(f"rollout/{'counts' if name == 'train' else 'train'}/") for key in line)
        assert keys == {
            *("completions", "completion_tokens", "truncated", "reward", "equal_rewards"),
            *("reverse_kl_nats_per_token", "policy_gradient_nats_per_token"),
        }
        of_source = {key: line[f"rollout/{name}/{key}"] for key in keys}
        assert of_source["completions"] == len(of_step) == (4 if name == "train" else 3)
        rewards = [sample["reward"] for sample in of_step]
        assert min(rewards) >= 0 if name == "train" else max(rewards) <= 0
        assert of_source["equal_rewards"] == (len(set(rewards)) == 1) == line["rollout/equal_rewards"]
        assert of_source["reward"] == pytest.approx(statistics.fmean(rewards))
        assert of_source["completion_tokens"] == statistics.fmean(sample["length"] for sample in of_step)
        assert of_source["truncated"] == statistics.fmean(sample["finish"] == "length" for sample in of_step)
        assert max(sample["length"] for sample in of_step) <= (11 if name == "train" else 7)
        divergences = [token["divergence"] for sample in of_step for token in sample["tokens"]]
        assert of_source["reverse_kl_nats_per_token"] == pytest.approx(statistics.fmean(divergences), rel=1e-5)
        # with the source's own temperature, the log-probabilities of training are those of the engine
        assert line["rollout/log_ratio_max"] < 1e-4
    assert any(sample["finish"] == "stop" for sample in samples if sample["prompt_source"] == "counts")


@pytest.mark.usefixtures("hooks")
def test_a_step_has_the_metrics_of_both_sources(tmp_path: Path) -> None:
    """`train` has a share of the dataset's completions, too, and `counts` an environment."""
    of_counts = OF_COUNTS | {"share": 1.0, "environment": "hooks:echo", "max_turns": 2, "stop": ["a", "e", "i"]}
    loss = "policy_gradient + reverse_kl + 0.5*cross_entropy"
    settings = {"rollout.share": 0.5, "rollout.prompts_per_step": 8, "train.steps": 3, "objective.loss": loss}
    out = distill(write_mixture(tmp_path, of_counts, weight=0.5, **settings | {"rollout.samples": "all"}))
    for line in rollout_figures(out):
        assert (line["rollout/train/completions"], line["rollout/counts/completions"]) == (4, 12)
        assert line["rollout/share"] == 16 / 20
        assert line["rollout/turns"] == pytest.approx((4 + 12 * line["rollout/counts/turns"]) / 16)
        assert "rollout/train/turns" not in line
        assert line["rollout/log_ratio_max"] < 1e-4
        means = [line[f"rollout/{name}/reverse_kl_nats_per_token"] for name in ("train", "counts")]
        assert min(means) < line["loss/reverse_kl_nats_per_token"] < max(means)
        hard = [line[f"rollout/{name}/cross_entropy_nats_per_token"] for name in ("counts", "train")]
        assert hard[0] == 0 < hard[1]
    of_source = [sample["tokens"] for sample in shown(out) if "Say" in sample["prompt"]]
    assert any(not token["target"] for tokens in of_source for token in tokens), "the replies"
    assert len(shown(out)) == 3 * 16


@pytest.mark.usefixtures("hooks")
def test_the_completions_of_a_source_are_those_of_a_run_with_it_alone(tmp_path: Path) -> None:
    """Seeds of the second source differ from those of a run with it alone, so its completions are greedy here."""
    of_counts = OF_COUNTS | {"samples_per_prompt": 2, "top_k": 1}
    settings = {"train.steps": 1, "objective.loss": LOSS}
    mixed = shown(distill(write_mixture(tmp_path, of_counts, 0.5, **settings | {"rollout.prompts_per_step": 2})))
    for name, keys in (("train", {"reward": "hooks:length"}), ("counts", of_counts)):
        of_one = {f"rollout.{key}": value for key, value in keys.items()} | {"rollout.prompts_per_step": 1}
        paths = {"data.train": str(tmp_path / f"{name}.jsonl"), "out": str(tmp_path / name)}
        expected = shown(distill(write_on_policy_run(tmp_path, **settings | of_one | paths)))
        of_source = [sample for sample in mixed if sample["prompt_source"] == name]
        for sample, same in zip(of_source, expected, strict=True):
            for key in ("prompt", "completion", "reward", "advantage", "finish"):
                assert sample[key] == same[key], key
        assert len(of_source) == 2


@pytest.mark.usefixtures("hooks")
def test_the_gradients_of_a_step_are_those_of_plain_autograd(tmp_path: Path) -> None:
    config = write_mixture(tmp_path, weight=0.5)
    session, timeline = prepare(config, announce=False), RolloutLog()
    with closing(session), open_rollout(session, RunFolder(tmp_path / "out")) as rollout:
        samples = rollout.take(0, timeline)
        (micro_batches,) = rollout.micro_batches([0], timeline)
        assert micro_batches is not None
        session.models.step(micro_batches)
        gradients = {name: gradient.clone() for name, gradient in named_gradients(session.models.student).items()}
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float64)
    student, teacher = (load(tmp_path / name) for name in ("student", "teacher"))
    assert session.rollout.prompts is not None
    losses, tokens = [], 0
    for sample in samples:
        source = session.rollout.prompts.source_of(sample.number)
        group = [other for other in samples if other.number // 3 == sample.number // 3]
        assert len(group) == (2, 3)[source]
        rewards = [other.reward for other in group]
        advantage = (sample.reward - statistics.fmean(rewards)) / (statistics.pstdev(rewards) or math.inf)
        prompt = session.data.train.documents.tokens(sample.prompt)
        ids = torch.tensor([*prompt.tolist(), *sample.completion.ids_N.tolist()])
        logits, of_teacher = (model(ids[None]).logits[0, len(prompt) - 1 : -1] for model in (student, teacher))
        temperature, labels = (1.0, 0.6)[source], ids[len(prompt) :, None]
        hot = [values.div(temperature).log_softmax(-1) for values in (logits, of_teacher)]
        log_q, log_p = (values.gather(1, labels)[:, 0] for values in hot)
        old = torch.from_numpy(sample.completion.log_probs_N).double()
        assert (log_q - old).abs().max() < 1e-5
        weight = (log_q - old).exp().clamp(max=2).detach()
        advantages = advantage + 0.3 * (log_p - old).detach()
        q, p = logits.log_softmax(-1), of_teacher.log_softmax(-1)
        losses.append((q.exp() * (q - p)).sum() - (weight * advantages * log_q).sum())
        tokens += len(labels)
    (torch.stack(losses).sum() / tokens).backward()
    here = {"lm_head.weight": "head.linear.weight"}
    expected = named_gradients(student).items()
    renamed = {here.get(name, name.replace("model", "backbone", 1)): gradient for name, gradient in expected}
    assert_same_as_float64(gradients, renamed)


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(("of_counts", "key", "text"), refused_runs("sources of prompts"))
def test_a_source_whose_functions_are_missing_is_refused_by_its_full_key(
    tmp_path: Path, of_counts: dict[str, Any], key: str, text: str
) -> None:
    with refused(key, text):
        config = write_mixture(tmp_path, OF_COUNTS | of_counts, **{"objective.loss": "policy_gradient"})
        prepare(config, announce=False)


@pytest.mark.slow
@pytest.mark.usefixtures("hooks")
def test_two_processes_have_the_figures_of_one(tmp_path: Path) -> None:
    expected = rollout_figures(distill(write_mixture(tmp_path, out=str(tmp_path / "one"))))
    run_ranks(2, "distill", tmp_path / "run.yaml", "parallel.fsdp=2", f"out={tmp_path / 'two'}")
    for line, same in zip(rollout_figures(tmp_path / "two"), expected, strict=True):
        assert line.keys() == same.keys()
        for key in (key for key in same if key.startswith(("rollout/train/", "rollout/counts/", "loss/"))):
            assert line[key] == pytest.approx(same[key], rel=1e-4, abs=1e-6), key


@pytest.mark.slow
@pytest.mark.usefixtures("hooks")
def test_a_killed_run_goes_on_to_the_bit_and_not_with_other_sources(tmp_path: Path) -> None:
    settings = {"rollout.schedule": "async", "rollout.max_staleness": 4, "checkpoint.every": 2}
    undisturbed = distill(write_mixture(tmp_path, **settings, out=str(tmp_path / "undisturbed")))
    write_mixture(tmp_path, **settings)
    out, run_yaml = tmp_path / "out", tmp_path / "run.yaml"
    kill_at(3, out, run_yaml)
    hotter = OF_COUNTS | {"temperature": 0.7}
    for of_counts, weight, key in (
        (OF_COUNTS, 0.5, "data.train[0].weight (0.75 in the folder, now 0.5)"),
        (hotter, 0.25, "data.train[1].rollout.temperature (0.6 in the folder, now 0.7)"),
    ):
        with pytest.raises(ValueError, match="contains another run") as raised:
            distill(write_mixture(tmp_path, of_counts, weight, **settings))
        assert key in str(raised.value)
    write_mixture(tmp_path, **settings)
    run("distill", run_yaml)
    assert rollout_figures(out) == rollout_figures(undisturbed)
    assert shown(out) == shown(undisturbed)
    assert contents(out / "model") == contents(undisturbed / "model")


@pytest.mark.slow
@pytest.mark.usefixtures("hooks")
def test_a_server_writes_with_the_sampling_of_every_source(tmp_path: Path) -> None:
    """A run with a server, killed and resumed, has the completions of a run in one process."""
    of_counts, settings = OF_COUNTS | {"stop": ["a", "e"], "top_p": 0.9}, {"checkpoint.every": 2}
    expected = shown(distill(write_mixture(tmp_path, of_counts, **settings, out=str(tmp_path / "one"))))
    with Server(tmp_path / "student", "--generate") as server:
        served = ["rollout.engine=stillhouse", f"rollout.url={server.url}", f"out={tmp_path / 'served'}"]
        kill_at(3, tmp_path / "served", tmp_path / "run.yaml", *served)
        run("distill", tmp_path / "run.yaml", *served)
    for sample, same in zip(shown(tmp_path / "served"), expected, strict=True):
        assert sample["completion"] == same["completion"]
    assert all(line["rollout/log_ratio_max"] < 1e-4 for line in rollout_figures(tmp_path / "served"))
