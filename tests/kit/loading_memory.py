"""Ranks that load, prove and publish weights, and the memory that they need, by the kernel's numbers (Linux)."""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.shard_ranks import Rank
from transformers import AutoModelForCausalLM, LlamaConfig

from stillhouse.checkpoint.export_weights import save_from_checkpoint
from stillhouse.engine.state_folder import WEIGHT, write_tensors
from stillhouse.models import Decoder
from stillhouse.models.adapter import add_lora, initialize_lora
from stillhouse.models.dtensors import local
from stillhouse.objective import ObjectiveOutput
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource, Runner, build_runner, empty_decoder, load_weights
from stillhouse.proofs.layouts import ProbeForward, build_proven_runner, prove_runner
from stillhouse.rollout.publish import publish
from stillhouse.rollout.published_folder import WeightsManifest, published_folder

CPU = torch.device("cpu")


def loaded(folder: Path, **options: Any) -> Decoder:
    """Load a folder as the processes of a layout do."""
    decoder = empty_decoder(folder, **options)
    load_weights(decoder, folder, CPU)
    return decoder.eval()


LOADERS = pytest.mark.parametrize("load", [Decoder.from_pretrained, loaded], ids=["one process", "a layout"])


def read_manifest(path: Path) -> WeightsManifest:
    """The manifest of a published version, after all files have been compared with it."""
    with published_folder(path) as folder:
        for name in folder.manifest.files:
            folder.compare(name, sys.maxsize)
        return folder.manifest


def publish_under(rank: Rank, job: tuple[Path, Path, Degrees, int, bool]) -> str:
    """Publish a model's weights as version 7; returns the path."""
    model, folder, degrees, bucket_bytes, lora = job
    runner = build_proven_runner(Layout(degrees), Mesh(degrees, CPU), source(model, lora), None)
    return str(publish(runner, folder, 7, bucket_bytes=bucket_bytes))


def export_under(rank: Rank, job: tuple[Path, Path, Degrees]) -> None:
    """Write the student's state below a folder, export it from there, and publish the weights as version 7."""
    model, folder, degrees = job
    runner = build_runner(Layout(degrees), Mesh(degrees, CPU), source(model), None)
    resume, (part, *_) = folder / "resume", runner.decoders
    with runner.ranks.all_raise(OSError):
        if rank.number == 0:
            resume.mkdir(parents=True)
            (folder / "export").mkdir()
    write_tensors(resume, {f"{WEIGHT}{name}": value for name, value in part.state_dict().items()}, runner.ranks)
    if rank.number == 0:
        save_from_checkpoint(folder / "export", part, resume)
    publish(runner, folder / "weights", 7)


def growth_under(rank: Rank, job: tuple[Path, Path, Path, Degrees, int]) -> float:
    """The growth of this rank's memory in MiB while it publishes the large model; first it publishes the small one,
    so that all libraries are in memory.
    """
    small, large, folder, degrees, bucket_bytes = job
    mesh = Mesh(degrees, CPU)
    runners = [build_proven_runner(Layout(degrees), mesh, source(model), None) for model in (small, large)]
    publish(runners[0], folder, 0)
    return growth(partial(publish, runners[1], folder, 1, bucket_bytes=bucket_bytes))[0]


def _student(model: Path, lora: bool) -> Decoder:
    decoder = empty_decoder(model)
    if lora:
        add_lora(decoder, r=4, alpha=8, base=str(model))
    return decoder


def _fill(model: Path, decoder: Decoder) -> None:
    load_weights(decoder, model, CPU)
    initialize_lora(decoder, 0, fresh=False)


def source(model: Path, lora: bool = False) -> ModelSource:
    return ModelSource(partial(_student, model, lora), partial(_fill, model))


MIB = 2**20
SUPPORTED = Path("/proc/self/clear_refs").exists()


@dataclass(frozen=True)
class Memory:
    """Memory in MiB. share: this rank's weights. The others are the largest growth of the process while it loads its
    weights, proves the model, and runs a forward and a backward pass of the same documents.
    """

    share: float
    loading: float
    proof: float
    step: float


def save_two(folder: Path) -> tuple[Path, Path, float, float]:
    """Save a tiny model and one of 126 MiB. Return their folders, and the sizes of the latter and its layer."""
    save(folder / "small", 64)
    return folder / "small", folder / "large", *save(folder / "large", 768)


def save(folder: Path, width: int) -> tuple[float, float]:
    """Save a model of four layers in files of about one layer. Return the sizes of model and layer in MiB."""
    config = LlamaConfig(
        vocab_size=8 * width,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    layer = mebibytes(model.model.layers[0])
    model.save_pretrained(folder, max_shard_size=int(1.25 * layer * MIB))
    return mebibytes(model), layer


def mebibytes(module: torch.nn.Module) -> float:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) / MIB


def measure(_: Rank, job: tuple[Path, Path, Degrees]) -> Memory:
    """A job: measure the large model. First load and prove the small one, so that all libraries are in memory."""
    small, large, degrees = job
    return_freed_memory()
    mesh = Mesh(degrees, torch.device("cpu"))
    runner = load(small, degrees, mesh)
    prove(runner, small)
    step(runner)
    loading, runner = growth(partial(load, large, degrees, mesh))
    share = sum(local(weight).numel() * weight.element_size() for _, weight in runner.named_parameters()) / MIB
    proof, _ = growth(partial(prove, runner, large))
    return Memory(share, loading, proof, growth(partial(step, runner))[0])


def return_freed_memory() -> None:
    """Make the C library return every freed block of 64 kB or more to the system; it would keep some for later."""
    threshold = -3
    assert ctypes.CDLL(None).mallopt(threshold, 65536)


def growth(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call the function. Return the largest growth of this process during the call in MiB, and the result."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # this resets the peak to the resident size
    result = function()
    return status("VmHWM") - before, result


def load(folder: Path, degrees: Degrees, mesh: Mesh) -> Runner:
    return build_runner(Layout(degrees), mesh, source(folder), None)


def prove(runner: Runner, folder: Path) -> None:
    prove_runner(runner, source(folder), None, teacher_in_stages=False)


def step(runner: Runner) -> None:
    """Run a forward and a backward pass of the documents of the proof."""
    forward = ProbeForward(runner, {})
    runner.forward_backward([forward.inputs(forward.micro_batch(), cross_entropy)] * 2)


def cross_entropy(*, hidden_states: Any, head: Any, context: Any, depth: int = 0) -> ObjectiveOutput:
    logits_TV = head.logits(hidden_states).flatten(0, 1)
    return ObjectiveOutput(F.cross_entropy(logits_TV, torch.arange(len(logits_TV))), {}, {})


def status(key: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024
