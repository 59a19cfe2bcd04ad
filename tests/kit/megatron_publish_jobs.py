"""Jobs for ranks: a student on Megatron-Core publishes its weights, and copies them to full models for generation."""

from functools import partial
from pathlib import Path

import torch
from kit.loading_memory import growth, source
from kit.megatron_engine_jobs import build_chunks
from kit.megatron_weights_jobs import Case, laid_out
from kit.shard_ranks import Rank
from torch import Tensor

from stillhouse.megatron.student import MegatronStudent
from stillhouse.models import Decoder
from stillhouse.parallel import Layout, Mesh
from stillhouse.rollout.publish import publish
from stillhouse.rollout.student_copy import StudentCopy

#: a job: the layout, the student's folder, the folder of the versions, and the largest size of a file
PublishJob = tuple[Case, Path, Path, int]


def published(rank: Rank, job: PublishJob) -> tuple[str, dict[str, Tensor]]:
    """Publish the weights of a folder as version 7, after each of them was doubled.

    Returns the version's path, and this rank's full copy of the student for generation.
    """
    case, model, folder, bucket_bytes = job
    with laid_out(case):
        student = of_folder(case, model)
        with torch.no_grad():
            for _, parameter in student.named_parameters():
                parameter.mul_(2)
        path = publish(student, folder, 7, bucket_bytes=bucket_bytes)
        copy = StudentCopy(student, partial(Decoder.from_pretrained, model, verify=False))
        return str(path), {name: tensor.clone() for name, tensor in copy.decoder.state_dict().items()}


def growth_of_publishing(rank: Rank, job: tuple[Case, Path, Path, Path, int]) -> float:
    """Return the growth of this rank's memory in MiB while it publishes the large model, after the small one."""
    case, small, large, folder, bucket_bytes = job
    with laid_out(case):
        publish(of_folder(case, small), folder, 0)
        student = of_folder(case, large)
        return growth(partial(publish, student, folder, 1, bucket_bytes=bucket_bytes))[0]


def publish_with_unequal_replicas(rank: Rank, job: PublishJob) -> None:
    """Publish after the tensor ranks' copies of a norm have become different."""
    case, model, folder, bucket_bytes = job
    with laid_out(case):
        student = of_folder(case, model)
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if name.endswith("final_layernorm.weight"):
                    parameter.add_(rank.number)
        publish(student, folder, 7, bucket_bytes=bucket_bytes)


def of_folder(case: Case, model: Path) -> MegatronStudent:
    layout = Layout(case.degrees, "interleaved" if case.chunks > 1 else "1f1b")
    mesh = Mesh(case.degrees, torch.device("cpu"))
    chunks, empty = build_chunks(case, mesh, source(model))
    return MegatronStudent(layout, mesh, chunks, None, empty)
