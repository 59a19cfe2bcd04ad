"""Measures the memory of a process while it loads its part of a model, with the kernel's numbers (Linux only)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shard_ranks import Rank
from transformers import AutoModelForCausalLM, LlamaConfig

from stillhouse.models.head import local
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource, Runner, build_runner, empty_decoder, load_weights

MIB = 2**20
SUPPORTED = Path("/proc/self/clear_refs").exists()


@dataclass(frozen=True)
class Memory:
    """Memory in MiB. share: this rank's weights. peak: the largest growth of the process while it loads them."""

    share: float
    peak: float


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
    return sum(each.numel() * each.element_size() for each in module.parameters()) / MIB


def measure(_: Rank, job: tuple[Path, Path, Degrees]) -> Memory:
    """A job: measure loading the large model. First load the small one, so that all libraries are in memory."""
    small, large, degrees = job
    mesh = Mesh(degrees, torch.device("cpu"))
    load(small, degrees, mesh)
    peak, runner = growth(partial(load, large, degrees, mesh))
    share = sum(local(each).numel() * each.element_size() for _, each in runner.named_parameters()) / MIB
    return Memory(share, peak)


def growth(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call the function. Return the largest growth of this process during the call in MiB, and the result."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # this resets the peak to the resident size
    result = function()
    return status("VmHWM") - before, result


def load(folder: Path, degrees: Degrees, mesh: Mesh) -> Runner:
    weights = partial(load_weights, folder=folder, device=torch.device("cpu"))
    return build_runner(Layout(degrees), mesh, ModelSource(partial(empty_decoder, folder), weights), None)


def status(key: str) -> float:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024
