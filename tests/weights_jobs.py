"""Jobs of several ranks that publish a student's weights under a layout."""

from functools import partial
from pathlib import Path

import torch
from shard_ranks import Rank

from stillhouse.models import Decoder
from stillhouse.models.adapter import add_lora, draw_lora
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource, build_runner, empty_decoder, load_weights
from stillhouse.rollouts.weights import publish

CPU = torch.device("cpu")


def publish_under(rank: Rank, job: tuple[Path, Path, Degrees, str, int, bool]) -> str:
    """Publish a model's weights as version 7; returns the path."""
    model, folder, degrees, schedule, bucket_bytes, lora = job
    mesh = Mesh(degrees, CPU)
    if rank.number >= degrees.processes:
        return ""
    source = ModelSource(partial(_student, model, lora), partial(_fill, model))
    runner = build_runner(Layout(degrees, schedule), mesh, source, None)
    return str(publish(runner, folder, 7, bucket_bytes=bucket_bytes))


def _student(model: Path, lora: bool) -> Decoder:
    decoder = empty_decoder(model)
    if lora:
        add_lora(decoder, r=4, alpha=8, base=str(model))
    return decoder


def _fill(model: Path, decoder: Decoder) -> None:
    load_weights(decoder, model, CPU)
    draw_lora(decoder, 0, fresh=False)
