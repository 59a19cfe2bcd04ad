"""Weights, gradients and optimizer state in host memory between uses: the same training. By FSDP over one process,
so that one GPU is enough; on the CPU the same code moves nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import Case, batches, configurations, decoder, normalizer, optimizer, works
from torch import Tensor
from toy_tokenizer import toy_tokenizer

from stillhouse.config import ConfigError
from stillhouse.models.head import local
from stillhouse.parallel import Degrees, Layout, Mesh, Runner, Twin, empty_decoder, fill, require_sharing
from stillhouse.parallel.fsdp import apply_fsdp
from stillhouse.parallel.processes import BACKENDS
from stillhouse.train.checkpoint import load_checkpoint, save_checkpoint
from stillhouse.train.integrity import verified
from stillhouse.train.progress import Progress
from stillhouse.train.step import optimizer_step

CPU = torch.device("cpu")
CUDA = pytest.param(
    torch.device("cuda", 0),
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)


@pytest.fixture(params=[CPU, CUDA], ids=str)
def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mesh]:
    dist.init_process_group(
        BACKENDS[request.param.type], init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield Mesh(Degrees(), request.param)
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_offloaded_training_is_the_training(tmp_path: Path, mesh: Mesh, family: str) -> None:
    for name, config in zip(("student", "teacher"), configurations(family), strict=True):
        decoder(config, len(name)).save_pretrained(tmp_path / name)
    runners = [laid(tmp_path, mesh, offload) for offload in (False, True)]
    optimizers = [optimizer(runner) for runner in runners]
    for step in range(3):
        norms = [train(family, step, *pair) for pair in zip(runners, optimizers, strict=True)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert_same(runners[1], runners[0])
    assert {each.device for each in tensors(runners[1], optimizers[1])} == {CPU}

    tokenizer = toy_tokenizer()
    path = save_checkpoint(tmp_path / "checkpoints", Progress(step=3), runners[1], optimizers[1], tokenizer)
    runner = laid(tmp_path, mesh, True)
    again = optimizer(runner)
    assert load_checkpoint(verified(path), runner, again).step == 3
    norms = [train(family, 3, *pair) for pair in ((runners[1], optimizers[1]), (runner, again))]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert_same(runner, runners[1])
    assert {each.device for each in tensors(runner, again)} == {CPU}


@pytest.mark.parametrize(
    ("degrees", "device", "message"),
    [
        (Degrees(fsdp=2), "cpu", "got true on device cpu, whose memory holds everything already"),
        (Degrees(tensor=2), "cuda", "set under tensor 2: expected parallel.fsdp, replicate or context above 1"),
        (Degrees(), "cuda", "set under 1 process: expected"),
    ],
)
def test_an_offload_of_nothing_is_refused(degrees: Degrees, device: str, message: str) -> None:
    require_sharing(Layout(degrees), torch.device(device))
    with pytest.raises(ConfigError, match=message) as caught:
        require_sharing(Layout(degrees, offload=True), torch.device(device))
    assert caught.value.key == "parallel.offload"


def laid(folder: Path, mesh: Mesh, offload: bool) -> Runner:
    student, teacher = (empty_decoder(folder / name) for name in ("student", "teacher"))
    twin = Twin(student, teacher)
    for name, each in (("student", student), ("teacher", teacher)):
        apply_fsdp(each, mesh.weights["shard"], offload=offload)
        fill(each, folder / name, mesh.device, offload=offload)
    return Runner(Layout(offload=offload), {0: twin}, None, mesh, tied=student.tied)


def train(family: str, step: int, runner: Runner, made: torch.optim.Optimizer) -> float:
    """A step; the norm of its gradient, most of which is cut off."""
    case = Case(Layout(), family)
    given = batches(case, step)
    assert runner.mesh is not None
    runner.forward_backward(works(case, [each.to(runner.mesh.device) for each in given], normalizer(given)))
    if runner.layout.offload:
        assert {local(each.grad).device for _, each in runner.named_parameters()} == {CPU}
    norm = float(runner.clip(0.1))
    optimizer_step(made, 1e-3)
    return norm


def tensors(runner: Runner, made: torch.optim.Optimizer) -> list[Tensor]:
    """All that lies between steps: weights of both models, moments."""
    assert runner.teacher is not None
    weights = [each for _, each in runner.named_parameters()] + list(runner.teacher.parameters())
    return [local(each) for each in weights + [value for state in made.state.values() for value in state.values()]]


def assert_same(one: Runner, other: Runner) -> None:
    for (name, found), (_, expected) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(local(found).cpu(), local(expected).cpu(), rtol=1e-4, atol=1e-6, msg=name)
