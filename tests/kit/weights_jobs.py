"""Published weights: jobs of several ranks that write them under a layout, and the manifest of what was written."""

import sys
from functools import partial
from pathlib import Path

import torch
from kit.loading_memory import growth
from kit.shard_ranks import Rank

from stillhouse.checkpoint.export_weights import save_from_checkpoint
from stillhouse.engine.state_folder import WEIGHT, write_state
from stillhouse.models import Decoder
from stillhouse.models.adapter import add_lora, initialize_lora
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource, build_runner, empty_decoder, load_weights
from stillhouse.proofs.layouts import build_proven_runner
from stillhouse.rollout.publish import publish
from stillhouse.rollout.published_folder import Manifest, published_folder

CPU = torch.device("cpu")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a published version, after all files have been compared with it."""
    with published_folder(path) as folder:
        for name in folder.manifest.files:
            folder.compare(name, sys.maxsize)
        return folder.manifest


def publish_under(rank: Rank, job: tuple[Path, Path, Degrees, int, bool]) -> str:
    """Publish a model's weights as version 7; returns the path."""
    model, folder, degrees, bucket_bytes, lora = job
    mesh = Mesh(degrees, CPU)
    source = ModelSource(partial(_student, model, lora), partial(_fill, model))
    runner = build_proven_runner(Layout(degrees), mesh, source, None)
    return str(publish(runner, folder, 7, bucket_bytes=bucket_bytes))


def export_under(rank: Rank, job: tuple[Path, Path, Degrees]) -> None:
    """Write the student's state below a folder, export it from there, and publish the weights as version 7."""
    model, folder, degrees = job
    source = ModelSource(partial(_student, model, False), partial(_fill, model))
    runner = build_runner(Layout(degrees), Mesh(degrees, CPU), source, None)
    resume, (part, *_) = folder / "resume", runner.decoders
    with runner.ranks.all_raise(OSError):
        if rank.number == 0:
            resume.mkdir(parents=True)
            (folder / "export").mkdir()
    write_state(resume, {f"{WEIGHT}{name}": value for name, value in part.state_dict().items()}, runner.ranks)
    if rank.number == 0:
        save_from_checkpoint(folder / "export", part, resume)
    publish(runner, folder / "weights", 7)


def growth_under(rank: Rank, job: tuple[Path, Path, Path, Degrees, int]) -> float:
    """The growth of this rank's memory in MiB while it publishes the large model; first it publishes the small one,
    so that all libraries are in memory.
    """
    small, large, folder, degrees, bucket_bytes = job
    mesh = Mesh(degrees, CPU)
    runners = [
        build_proven_runner(
            Layout(degrees), mesh, ModelSource(partial(_student, model, False), partial(_fill, model)), None
        )
        for model in (small, large)
    ]
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
