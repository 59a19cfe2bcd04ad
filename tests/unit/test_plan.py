"""The parts of `stillhouse plan` that need no dry run: the ranks, the prediction, the table and refusals."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from kit.config_cases import refused_calls
from kit.documents import documents_of_length
from transformers import AutoConfig

from stillhouse import cli
from stillhouse.config import ConfigError, load_config
from stillhouse.data import PackedSequences
from stillhouse.engine.schedule import make_on_policy_schedule, make_step_schedule
from stillhouse.plan import prediction
from stillhouse.plan.command import does_not_fit, lines
from stillhouse.plan.devices import DEVICES, GIB, LINKS, PRODUCTS
from stillhouse.plan.dry_run import planned
from stillhouse.plan.layout_plan import Machine, Plan, planned_job
from stillhouse.plan.prediction import LayoutSize, RankCounts, message_seconds, planned_ranks, predict, rank_time
from stillhouse.rollout import PromptSource
from stillhouse.rollout.documents import StepPacker
from stillhouse.run.setup import configured_layout

H100 = DEVICES["h100"]
ONE = {"pipeline": 1, "replicate": 1, "fsdp": 1, "context": 1, "tensor": 1, "expert": 1}


def layout(schedule: str = "1f1b", stages: int | None = None, **degrees: int) -> LayoutSize:
    sizes = ONE | degrees
    last = 0 if schedule == "zbv" else sizes["pipeline"] - 1
    return LayoutSize(sizes, stages or sizes["pipeline"], schedule, last)


def counts(size: LayoutSize, **values: Any) -> RankCounts:
    zero: dict[str, Any] = {"rank": 0, "micro_batches": 8, "tokens": 65536}
    zero |= {"model_operations": 0.0, "kernels": 0, "traffic": 0.0}
    maps: dict[str, Any] = {name: {} for name in ("waits", "pageable", "products", "messages", "sent", "peak")}
    return RankCounts(**(zero | maps | values), layout=size)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (layout(), {"first": 0}),
        (layout(fsdp=8, tensor=4), {"first": 0}),
        (layout(pipeline=2, fsdp=4), {"first": 0, "last": 4}),
        (layout(pipeline=4, fsdp=8, tensor=2), {"first": 0, "inner": 32, "last": 48}),
        (layout("zbv", 8, pipeline=4, fsdp=2), {"first": 0, "inner": 4}),
    ],
)
def test_the_ranks_of_different_stages_are_planned(size: LayoutSize, expected: dict[str, int]) -> None:
    assert planned_ranks(size) == expected


def test_a_rank_is_as_slow_as_its_products_traffic_and_exposed_messages() -> None:
    operations = H100.bfloat16 * PRODUCTS  # a second
    rank = counts(layout(tensor=8), products={"bfloat16": operations}, traffic=H100.bandwidth * 0.64, kernels=10)
    assert rank_time(rank, H100, 8).seconds == pytest.approx(2.0)
    launched = rank_time(counts(layout(), kernels=10**6, traffic=1e9), H100, 8)
    assert (launched.bound, launched.seconds) == ("launches", pytest.approx(8.0))
    sent = 2e9
    rank = replace(rank, messages={"tensor allreduce": 100}, sent={"tensor allreduce": sent})
    exposed = rank_time(rank, H100, 8).exposed
    # a ring sends every byte twice, but its own share
    assert exposed == pytest.approx(2 * 7 / 8 * sent / (450e9 * LINKS) + 100 * 15e-6)


def test_fsdp_runs_beside_computation() -> None:
    gathers, sent = {"shard allgather_base": 100}, {"shard allgather_base": 40e9}
    rank = counts(layout(fsdp=8), products={"bfloat16": 989e12}, messages=gathers, sent=sent)
    hidden = rank_time(rank, H100, 8)
    assert hidden.overlapped == pytest.approx(7 / 8 * 40e9 / (450e9 * LINKS) + 100 * 15e-6)
    assert hidden.exposed == pytest.approx(hidden.overlapped / 100)
    slow = rank_time(replace(rank, sent={"shard allgather_base": 4e12}), H100, 8)
    assert (slow.exposed, slow.bound) == (pytest.approx(slow.overlapped - slow.products), "network")


def test_machines_are_connected_by_a_link_of_every_gpu() -> None:
    sent = {"shard allgather_base": 8e9}
    flat = counts(layout(fsdp=64), messages={"shard allgather_base": 1}, sent=sent)
    seconds = message_seconds(flat, "shard", "allgather_base", H100, 8) - 30e-6
    assert seconds == pytest.approx(63 / 64 * 8e9 / (8 * 50e9 * LINKS))
    beside_tensor = replace(flat, layout=layout(fsdp=8, tensor=8))
    seconds = message_seconds(beside_tensor, "shard", "allgather_base", H100, 8) - 30e-6
    assert seconds == pytest.approx(7 / 8 * 8e9 / (50e9 * LINKS))


@pytest.mark.parametrize(
    ("schedule", "share"),
    [("1f1b", 3 / 11), ("gpipe", 3 / 11), ("interleaved", 1.5 / 9.5), ("zero_bubble", 0.5 / 8.5), ("zbv", 0.0)],
)
def test_the_share_of_the_bubble(schedule: str, share: float) -> None:
    assert prediction.bubble_share(4, schedule, 8) == pytest.approx(share)


def test_a_step_waits_for_its_slowest_stage() -> None:
    size = layout(pipeline=2)
    work = {"bfloat16": H100.bfloat16 * PRODUCTS}
    first = counts(size, products={}, model_operations=H100.bfloat16)
    ranks = {"first": first, "last": replace(first, rank=1, products=work)}
    step = predict(ranks, H100, 8)
    assert (step.slowest, step.seconds) == ("last", pytest.approx(9 / 8))
    assert step.tokens_per_second == pytest.approx(65536 * 8 / 9)
    assert step.model_share == pytest.approx(8 / 9 / 2)


def test_the_table_and_a_plan_that_does_not_fit() -> None:
    size = layout(pipeline=2)
    ranks = {
        "first": counts(size, peak={"student weights": 10 * GIB, "activations": 67 * GIB}, waits={"a.py:f: x": 2}),
        "last": counts(size, rank=1, peak={"student weights": GIB}, kernels=1234),
    }
    plan = Plan(Machine(2, 8, "h100"), ranks)
    assert not plan.fits
    assert "needs 77.0 GiB on rank 0, and the H100 80 GB has 76.1 GiB" in does_not_fit(plan)
    text = "\n".join(lines(plan))
    for line in ("peak memory 77.0 GiB 1.0 GiB", "student weights 10.0 GiB 1.0 GiB", "kernels 0 1,234"):
        assert line in " ".join(text.split()), line
    assert "2 × a.py:f: x" in text
    assert "images" not in text
    assert plan.as_json()["counts_activations_of_images"]
    assert RankCounts.from_json(json.loads(json.dumps(asdict(ranks["last"])))) == ranks["last"]


def test_a_plan_of_a_vision_tower_says_that_images_are_not_counted(tmp_path: Path) -> None:
    for folder, has_tower in ((tmp_path / "texts", False), (tmp_path / "images", True)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"vision_config": {}} if has_tower else {}))
        config = load_config(None, settings=settings(tmp_path) | {"teacher": {"model": str(folder)}})
        assert planned_job(config, Machine(1, 8, "h100"), 32)["has_tower"] == has_tower
    ranks = {"first": counts(layout(), products={"bfloat16": H100.bfloat16})}
    plan = Plan(Machine(1, 8, "h100"), ranks, has_tower=True)
    assert "images not counted, nor the activations of the vision tower" in " ".join("\n".join(lines(plan)).split())
    assert not plan.as_json()["counts_activations_of_images"]


def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "model").mkdir(exist_ok=True)
    model = str(tmp_path / "model")
    data = {"train": "x", "max_tokens": 64}
    return {"student": {"model": model}, "teacher": {"model": model}, "data": data, "out": "runs/a"}


@pytest.mark.parametrize(("call", "key"), refused_calls("plans"))
def test_what_cannot_be_planned_is_refused_by_its_key(tmp_path: Path, call: str, key: str) -> None:
    config = load_config(None, eval(call), settings=settings(tmp_path))
    with pytest.raises(ConfigError) as error:
        planned_job(config, Machine(64, 8, "h100"), 512)
    assert error.value.key == key


@pytest.mark.parametrize(
    "overrides",
    [
        ["eval.samples=4", "data.eval=held_out.jsonl"],
        ["data.eval={sums: a.jsonl, words: b.jsonl}", "checkpoint.best=eval/sums/forward_kl"],
        ["eval.prompts.data=p.jsonl", "eval.prompts.max_new_tokens=8", "checkpoint.best=eval/prompts/reverse_kl"],
        ["eval.callbacks=[my:accuracy]", "checkpoint.best=eval/accuracy", "checkpoint.greater_is_better=true"],
        ["eval.tasks=[sums]", "checkpoint.best=eval/exact_match/sums", "checkpoint.resume=runs/other"],
    ],
)
def test_a_plan_needs_no_evaluation_and_no_checkpoint(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(None, overrides, settings=settings(tmp_path))
    job = planned_job(config, Machine(1, 8, "h100"), 32)
    assert load_config(None, settings=job["config"]).data.eval == 0


@pytest.mark.parametrize(
    ("ranks", "prompt", "overrides"),
    [
        (1, 10, ["rollout.prompts_per_step=5"]),
        (2, 3, ["rollout.prompts_per_step=8", "parallel.tensor=2"]),
        (4, 30, ["rollout.prompts_per_step=3", "rollout.samples_per_prompt=2"]),
        (4, 10, ["train.tokens_per_step=2048", "parallel.pipeline=2", "parallel.schedule=interleaved"]),
        (64, 10, ["rollout.prompts_per_step=2"]),
    ],
)
def test_a_planned_step_on_completions(tmp_path: Path, ranks: int, prompt: int, overrides: list[str]) -> None:
    """It has the micro-batches of a run with completions of the greatest length, behind prompts of one length."""
    overrides = ["rollout.max_new_tokens=20", "train.micro_batch_tokens=160", *overrides]
    config = load_config(None, overrides, settings=settings(tmp_path))
    job = planned_job(config, Machine(ranks, 8, "h100"), prompt)
    planned = load_config(None, settings=job["config"])
    length = job["document_tokens"]
    assert length == min(64, prompt + 20)
    layout = configured_layout(config.parallel, ranks)
    assert config.rollout is not None
    sources = [PromptSource(9, config.rollout.samples_per_prompt)]
    schedule, _ = make_on_policy_schedule(config.train, config.rollout, sources, 64, 0)
    assert job["completions"].startswith(f"{schedule.sequences_per_step} in a step, each of {length} tokens")
    documents = documents_of_length(schedule.sequences_per_step, length)
    packer = StepPacker(PackedSequences(documents, max_tokens=64, seed=0), config.train.micro_batch_tokens)
    step = packer.micro_batches(documents, layout.degrees.data * layout.stages)
    tokens = planned.data.max_tokens
    rows = planned.train.tokens_per_step // tokens
    steps = make_step_schedule(planned.train, rows, tokens, layout.degrees.data, layout.stages)
    assert -(-rows // steps.rows_per_micro_batch) == len(step)
    assert steps.rows_per_micro_batch * tokens == max(part.input_ids_BS.numel() for part in step)


def test_sources_with_rollouts_of_their_own_are_planned_by_the_longest(tmp_path: Path) -> None:
    sources = "data.train=[{source: a, weight: 3, rollout: {samples_per_prompt: 8}},"
    sources += "{source: b, rollout: {max_new_tokens: 40}}]"
    overrides = [sources, "rollout.prompts_per_step=4", "rollout.max_new_tokens=20"]
    config = load_config(None, overrides, settings=settings(tmp_path))
    job = planned_job(config, Machine(1, 8, "h100"), 9)
    assert job["completions"].startswith("28 in a step, each of 49 tokens")
    ranks = {"first": counts(layout(), products={"bfloat16": H100.bfloat16})}
    plan = Plan(Machine(1, 8, "h100"), ranks, completions=job["completions"])
    assert "only the training step is planned" in "\n".join(lines(plan))
    assert not plan.as_json()["counts_generation"]


def test_layers_that_need_kernels_for_packed_documents_are_refused_by_the_key(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"]
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    hybrid = AutoConfig.for_model("qwen3_5_text", **sizes, num_hidden_layers=2, layer_types=kinds)
    hybrid.save_pretrained(tmp_path / "model")
    config = load_config(None, settings=settings(tmp_path))
    job = planned_job(config, Machine(1, 8, "h100"), 64)
    with pytest.raises(
        ConfigError, match=r"student\.model has layers \(linear_attention\) .* data\.packing=rows"
    ) as error:
        planned(job)
    assert error.value.key == "data.packing"
    job["config"]["data"]["packing"] = "rows"
    assert planned(job).config.data.packing == "rows"


def test_an_unknown_device_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "run.yaml", "--device", "h300"]) == 2
    assert "--device: got 'h300', expected one of rtx4090, a100, h100, h200, b200" in capsys.readouterr().err
