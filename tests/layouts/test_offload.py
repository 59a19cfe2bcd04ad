"""Training with weights, gradients and optimizer state in host memory equals training without offload.

The tests use FSDP over one process, so that one GPU is enough. On the CPU the same code moves nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.parity_cases import LEARNING_RATE, SPEC, Case, batches
from kit.parity_models import configurations, decoder
from kit.toy_tokenizer import toy_tokenizer
from torch import Tensor

from stillhouse.checkpoint.checkpoint_folder import verified
from stillhouse.checkpoint.save import load_checkpoint, save_checkpoint
from stillhouse.config import ConfigError, TrainConfig
from stillhouse.data import StepMicroBatches
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.models import Decoder
from stillhouse.models.dtensors import local
from stillhouse.objective import TEACHER
from stillhouse.output.progress import Progress
from stillhouse.parallel import IN_STAGE, Degrees, Layout, Mesh, Runner, empty_decoder, load_weights
from stillhouse.parallel.apply.fsdp import apply_fsdp
from stillhouse.parallel.processes import BACKENDS
from stillhouse.parallel.teacher_student_pair import TeacherStudentPair
from stillhouse.run.setup import require_sharing

CPU = torch.device("cpu")
CUDA = pytest.param(
    torch.device("cuda", 0),
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)


@pytest.fixture(params=[CPU, CUDA], ids=str)
def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mesh]:
    method = f"file://{tmp_path / 'store'}"
    dist.init_process_group(BACKENDS[request.param.type], init_method=method, rank=0, world_size=1)
    yield Mesh(Degrees(), request.param)
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_offloaded_training_equals_training_without_offload(tmp_path: Path, mesh: Mesh, family: str) -> None:
    for name, config in zip(("student", "teacher"), configurations(family), strict=True):
        decoder(config, len(name)).save_pretrained(tmp_path / name)
    engines = [offloaded(tmp_path, mesh, offload) for offload in (False, True)]
    for step in range(3):
        norms = [train(family, step, engine) for engine in engines]
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert_same(*(engine.student.decoders[0] for engine in engines))
    assert {tensor.device for tensor in tensors(engines[1])} == {CPU}

    path = save_checkpoint(tmp_path / "checkpoints", Progress(step=3), engines[1], toy_tokenizer())
    again = offloaded(tmp_path, mesh, True)
    assert load_checkpoint(verified(path), again).step == 3
    norms = [train(family, 3, engine) for engine in (engines[1], again)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert_same(again.student.decoders[0], engines[1].student.decoders[0])
    assert {tensor.device for tensor in tensors(again)} == {CPU}


@pytest.mark.parametrize(
    ("degrees", "device", "message"),
    [
        (Degrees(fsdp=2), "cpu", "got true on a CPU, where everything is in host memory already"),
        (Degrees(tensor=2), "cuda", "under tensor 2, which does not use FSDP: expected fsdp"),
        (Degrees(), "cuda", "under 1 process, which does not use FSDP: expected"),
    ],
)
def test_an_offload_of_nothing_is_refused(degrees: Degrees, device: str, message: str) -> None:
    require_sharing(Layout(degrees), torch.device(device))
    with pytest.raises(ConfigError, match=message) as caught:
        require_sharing(Layout(degrees, offload=True), torch.device(device))
    assert caught.value.key == "parallel.offload"


def offloaded(folder: Path, mesh: Mesh, offload: bool) -> TorchEngine:
    """Return an engine whose clipping norm is small, so that clipping takes effect in every step."""
    student, teacher = (empty_decoder(folder / name) for name in ("student", "teacher"))
    pair = TeacherStudentPair(student, teacher)
    for name, decoder_of_side in (("student", student), ("teacher", teacher)):
        apply_fsdp(decoder_of_side, mesh.weights["shard"], offload=offload)
        load_weights(decoder_of_side, folder / name, mesh.device, offload=offload)
    runner = Runner(Layout(offload=offload), {0: pair}, None, mesh, tied=student.tied)
    return TorchEngine(runner, SPEC, train=TrainConfig(weight_decay=0.1, betas=(0.9, 0.999), clip=0.1))


def train(family: str, step: int, engine: TorchEngine) -> float:
    """Train one step and return the norm of its gradient."""
    micro_batches = engine.student.shard(StepMicroBatches(batches(Case(Layout(), family), step)))
    signals = [{TEACHER: IN_STAGE}] * len(micro_batches)
    engine.forward_backward(micro_batches, signals, micro_batches.all_ranks.normalizer)
    if engine.student.layout.offload:
        assert {local(parameter.grad).device for parameter in engine.student.decoders[0].parameters()} == {CPU}
    return engine.update(LEARNING_RATE)


def tensors(engine: TorchEngine) -> list[Tensor]:
    """Return all tensors that are kept between steps: the weights of both models and the optimizer's moments."""
    assert engine.student.teacher is not None
    weights = [*engine.student.decoders[0].parameters(), *engine.student.teacher.parameters()]
    moments = [value for state in engine.optimizer.state.values() for value in state.values()]
    return [local(tensor) for tensor in weights + moments]


def assert_same(one: Decoder, other: Decoder) -> None:
    for (name, weight), (_, expected) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(local(weight).cpu(), local(expected).cpu(), rtol=1e-4, atol=1e-6, msg=name)
