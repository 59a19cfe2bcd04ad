"""On-policy runs on Megatron-Core equal those of torch, with servers as writers and with the job's own processes."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.megatron_runs import LAYOUTS, megatron, without_cuda
from kit.on_policy_runs import SAME, assert_same_rollouts, rollout_figures, write_on_policy_run
from kit.runs import run
from kit.serving import Server
from kit.signal_hooks import record_trained, trained, wrong_in
from kit.tensors import tensors_in

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.slow

STEPS, SAMPLES_PER_STEP, LOSS = 6, 8, "loss/total_nats_per_token"
SIGNALS = {"top_k": ["teacher.signal=top_k", "teacher.top_k=8"], "hidden": ["teacher.signal=hidden"]}


@pytest.fixture(scope="module", params=LAYOUTS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(family)
    settings: dict[str, Any] = {"train.steps": STEPS, "checkpoint.every": STEPS - 1, "checkpoint.keep": 9}
    write_on_policy_run(folder, family=family, **settings)
    return folder


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[str]]:
    """Overrides of a run: `stillhouse serve --generate` writes the completions, `stillhouse serve` scores them."""
    with ExitStack() as stack:
        writer = stack.enter_context(Server(folder / "student", "--generate"))
        teacher = stack.enter_context(Server(folder / "teacher"))
        yield ["rollout.engine=stillhouse", f"rollout.url={writer.url}", f"teacher.url={teacher.url}"]


def recorded(path: str) -> None:
    without_cuda()
    record_trained(path)


def run_recorded(folder: Path, out: str, staleness: int, *overrides: str) -> Path:
    """Run on Megatron-Core, and assert that each sample was trained once, with versions that are not too old."""
    record = folder / f"{out}.trained"
    path = megatron(folder, out, 2, *overrides, hook=recorded, hook_arguments=(str(record),))
    assert not wrong_in(trained(record), STEPS, STEPS * SAMPLES_PER_STEP, staleness)
    return path


@pytest.mark.parametrize(
    ("family", "signal"), [("qwen3", "top_k"), ("llama", "hidden"), ("qwen3_moe", "hidden")], indirect=["family"]
)
def test_a_run_with_servers_is_that_of_torch(family: str, folder: Path, servers: list[str], signal: str) -> None:
    overrides = [*servers, *SIGNALS[signal]]
    expected = folder / f"torch {signal}"
    run("distill", folder / "run.yaml", f"out={expected}", *overrides)
    out = run_recorded(folder, signal, 0, *LAYOUTS[family], *overrides)
    assert_same_rollouts(out, expected, SAME, LOSS)
    assert all(line["rollout/log_ratio_max"] < 1e-4 for line in rollout_figures(out))
    assert_published(out)


def assert_published(out: Path, dtype: torch.dtype = torch.float32) -> None:
    """The last version that was published has the bytes of the same step's export, rounded to a dtype."""
    run("export", out, "--step", STEPS - 1, "--out", out / "exported")
    exported, published = tensors_in(out / "exported"), tensors_in(out / "weights" / f"version-{STEPS - 1:08d}")
    assert published.keys() == exported.keys()
    for name, tensor in exported.items():
        assert published[name].dtype == tensor.dtype
        assert published[name].equal(tensor.to(dtype).to(tensor.dtype)), name


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_one_step_off_with_servers(family: str, folder: Path, servers: list[str]) -> None:
    schedule = ["rollout.schedule=one_step_off", *SIGNALS["top_k"]]
    out = run_recorded(folder, "one_step_off", 1, *LAYOUTS[family], *servers, *schedule)
    assert [line["rollout/staleness_max"] for line in rollout_figures(out)] == [0] + (STEPS - 1) * [1]


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_in_bfloat16_servers_get_the_weights_with_which_the_trainer_computes(
    family: str, folder: Path, servers: list[str]
) -> None:
    out = run_recorded(folder, "bf16", 0, *LAYOUTS[family], *servers, "train.precision=bf16")
    assert_published(out, torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_one_process_generates_with_a_copy_of_its_student(family: str, folder: Path) -> None:
    run("distill", folder / "run.yaml", f"out={folder / 'torch alone'}", "train.steps=3")
    out = megatron(folder, "alone", 1, "train.steps=3")
    assert_same_rollouts(out, folder / "torch alone", SAME, LOSS)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"], indirect=True)
def test_a_run_that_generates_and_evaluates_in_its_processes_is_that_of_torch(family: str, folder: Path) -> None:
    settings = ["train.steps=3", "eval.samples=2", "eval.task_tokens=6", "eval.tasks=[sums(2:2)]"]
    run("distill", folder / "run.yaml", f"out={folder / 'torch in job'}", *settings)
    out = megatron(folder, "in job", 2, *LAYOUTS[family], *settings)
    assert_same_rollouts(out, folder / "torch in job", SAME, LOSS)
    shown = (folder / "torch in job" / "eval_samples.jsonl").read_text()
    assert (out / "eval_samples.jsonl").read_text() == shown
