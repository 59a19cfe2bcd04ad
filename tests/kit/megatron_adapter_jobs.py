"""Jobs for ranks: a student with an adapter on Megatron-Core is proven at load, and publishes the adapter."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kit.megatron_engine_jobs import Job, decoder, megatron_engine
from kit.megatron_weights_jobs import laid_out
from kit.shard_ranks import Rank
from torch import Tensor

from stillhouse.megatron.adapter import LoraBranch
from stillhouse.models import ProofError
from stillhouse.objective.spec import parse_objective
from stillhouse.rollout.publish import publish
from stillhouse.rollout.student_copy import StudentCopy


def without_an_adapters_part(rank: Rank, job: Job) -> str:
    """A job: the message for an adapter that is not applied to the projections to queries, keys and values."""
    added = LoraBranch.add

    def add(branch: LoraBranch, *arguments: Any) -> tuple[Tensor, Any]:
        return arguments[-1] if "k_proj" in branch.A else added(branch, *arguments)

    with laid_out(job.case), patch.object(LoraBranch, "add", add):
        try:
            megatron_engine(job, parse_objective("cross_entropy"))
        except ProofError as error:
            return str(error)
    return ""


def published_adapter(rank: Rank, job: tuple[Job, Path]) -> tuple[str, dict[str, Tensor]]:
    """Publish an adapter as version 7, after each of its matrices was doubled.

    Returns the version's path, and this rank's full copy of the student for generation.
    """
    trained, folder = job
    with laid_out(trained.case):
        student = megatron_engine(trained, parse_objective("cross_entropy")).student
        with torch.no_grad():
            for _, parameter in student.named_parameters():
                parameter.mul_(1 + parameter.requires_grad)
        path = publish(student, folder, 7, bucket_bytes=1)
        copy = StudentCopy(student, partial(decoder, trained, 0))
        return str(path), {name: tensor.clone() for name, tensor in copy.decoder.state_dict().items()}
