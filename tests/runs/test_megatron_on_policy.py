"""On-policy runs on Megatron-Core equal those of torch, with servers and with the job's own processes as the writer."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kit.megatron_runs import megatron, without_cuda
from kit.on_policy_runs import SAME, assert_same_rollouts, rollout_figures, write_on_policy_run
from kit.runs import run
from kit.serving import Server
from kit.trained_record import record_trained, trained, wrong_in
from safetensors.torch import load_file

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.slow

STEPS, SAMPLES, LOSS = 10, 8, "loss/total_nats_per_token"
LAYOUTS = {
    "qwen3": ["parallel.tensor=2"],
    "llama": ["parallel.pipeline=2"],
    "qwen3_moe": ["parallel.fsdp=2", "parallel.expert=2"],
}
SIGNALS = {"top_k": ["teacher.signal=top_k", "teacher.top_k=8"], "hidden": ["teacher.signal=hidden"]}
#: the first one also runs with hidden states
CASES = [*((family, "top_k") for family in LAYOUTS), ("qwen3", "hidden")]


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


def assert_each_sample_once(folder: Path, out: str, staleness: int) -> None:
    assert not wrong_in(trained(folder / f"{out}.trained"), STEPS, STEPS * SAMPLES, staleness)


@pytest.mark.parametrize("signal", [TOP_K])
def test_a_run_with_servers_is_that_of_torch(
    family: str, folder: Path, servers: list[str], signal: list[str]
) -> None:
    run("distill", folder / "run.yaml", f"out={folder / 'torch'}", *servers, *signal)
    path = folder / "sync.trained"
    layout = [*LAYOUTS[family], *servers, *signal]
    out = megatron(folder, "sync", 2, *layout, hook=recorded, hook_arguments=(str(path),))
    assert_same_rollouts(out, folder / "torch", SAME, LOSS)
    assert all(line["rollout/log_ratio_max"] < 1e-4 for line in rollout_figures(out))
    assert_each_sample_once(folder, "sync", 0)
    # the last published version has the bytes of the export of the same step
    run("export", out, "--step", STEPS - 1, "--out", folder / "export")
    exported = load_file(folder / "export" / "model.safetensors")
    published = load_file(out / "weights" / f"version-{STEPS - 1:08d}" / "model.safetensors")
    assert published.keys() == exported.keys()
    assert all(published[name].equal(tensor) for name, tensor in exported.items())


def test_one_step_off_with_servers(family: str, folder: Path, servers: list[str]) -> None:
    path, schedule = folder / "off.trained", ["rollout.schedule=one_step_off", *TOP_K]
    out = megatron(
        folder, "off", 2, *LAYOUTS[family], *servers, *schedule, hook=recorded, hook_arguments=(str(path),)
    )
    assert_each_sample_once(folder, "off", 1)
    assert [line["rollout/staleness_max"] for line in rollout_figures(out)] == [0] + (STEPS - 1) * [1]


def test_a_run_that_generates_and_evaluates_in_its_own_processes_is_that_of_torch(family: str, folder: Path) -> None:
    evaluation = ["eval.samples=2", "eval.tasks=[sums(2:3)]", "eval.every=5"]
    run("distill", folder / "run.yaml", f"out={folder / 'torch in job'}", *evaluation)
    out = megatron(folder, "in job", 2, *LAYOUTS[family], *evaluation)
    assert_same_rollouts(out, folder / "torch in job", SAME, LOSS)
    shown = (folder / "torch in job" / "eval_samples.jsonl").read_text()
    assert (out / "eval_samples.jsonl").read_text() == shown
