"""Jobs for the ranks of test_in_process.py: completions of a student that is distributed over them."""

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kit.families import build
from kit.generation_requests import CPU, requests
from kit.runs import wait_for
from kit.shard_ranks import Rank
from torch import Tensor

from stillhouse.models import Decoder, add_lora, initialize_lora
from stillhouse.models.dtensors import local
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource
from stillhouse.proofs.layouts import build_proven_runner
from stillhouse.rollout import Completion, Sampling
from stillhouse.rollout.engines import InJobEngine
from stillhouse.rollout.generate import Generator
from stillhouse.rollout.sampler import EndOfCompletion
from stillhouse.rollout.student_copy import StudentCopy

LENGTHS = (3, 11, 1, 7, 5, 4, 2)


@dataclass(frozen=True)
class Problem:
    """on_meta: whether the copy is built without weights. change: the trained weights are halved after a while."""

    degrees: Degrees
    sampling: Sampling
    family: str = "llama"
    tied: bool = False
    lora: bool = False
    on_meta: bool = True
    batch_tokens: int = 16384


def one_process(problem: Problem) -> list[Any]:
    """The completions before and after the change of the weights."""
    decoder = student(problem)
    engine = InJobEngine(Generator(decoder, problem.sampling, CPU, batch_tokens=problem.batch_tokens))
    first = completions(engine)
    change(decoder)
    engine.update_weights(1, None)
    return [first, completions(engine)]


def on_ranks(rank: Rank, problem: Problem) -> list[Any] | None:
    """The same as `one_process`; and nothing may change before `update_weights`."""
    mesh = Mesh(problem.degrees, CPU)
    if rank.number >= problem.degrees.processes:
        return None
    source = ModelSource(lambda: student(problem))
    runner = build_proven_runner(Layout(problem.degrees), mesh, source, None)
    copy = StudentCopy(runner, lambda: empty(problem) if problem.on_meta else student(problem))
    engine = InJobEngine(Generator(copy.decoder, problem.sampling, CPU, batch_tokens=problem.batch_tokens), copy)
    first = completions(engine)
    for part in runner.decoders:
        change(part)
    assert completions(engine) == first
    engine.update_weights(1, None)
    return [first, completions(engine)]


def an_error_on_one_rank(rank: Rank, problem: Problem) -> str | None:
    mesh = Mesh(problem.degrees, CPU)
    if rank.number >= problem.degrees.processes:
        return None
    runner = build_proven_runner(Layout(problem.degrees), mesh, ModelSource(lambda: student(problem)), None)
    copy = StudentCopy(runner, lambda: student(problem))
    if rank.number == 1:
        copy.decoder.output_weight.data[7] = torch.nan
    engine = InJobEngine(Generator(copy.decoder, problem.sampling, CPU), copy)
    try:
        engine.generate(requests(LENGTHS, seed=5))
    except ValueError as error:
        return str(error)
    return "no error"


def told_early(rank: Rank, job: tuple[Problem, Path]) -> list[Any] | None:
    """On rank 0, the completions of which it was told, and all of them. On rank 1: whether its batch has waited until
    rank 0 was told of a completion of rank 1.
    """
    problem, marker = job
    mesh = Mesh(problem.degrees, CPU)
    if rank.number >= problem.degrees.processes:
        return None
    runner = build_proven_runner(Layout(problem.degrees), mesh, ModelSource(lambda: student(problem)), None)
    copy = StudentCopy(runner, lambda: student(problem))
    engine = InJobEngine(Generator(copy.decoder, problem.sampling, CPU), copy)
    told, waited = dict[int, Any](), list[bool]()
    all_requests = [replace(request, max_new_tokens=1 + request.number % 5) for request in requests(LENGTHS, seed=5)]

    def ended(at: int, completion: Completion) -> None:
        told[at] = values(completion)
        if threading.current_thread() is not threading.main_thread():
            marker.touch()

    def wait_once(end: EndOfCompletion, *arguments: Any, **options: Any) -> Any:
        has_ended_B = original(end, *arguments, **options)
        if rank.number == 1 and has_ended_B.any() and not has_ended_B.all() and not waited:
            wait_for(marker.exists, 30)
            waited.append(True)
        return has_ended_B

    original = EndOfCompletion.__call__
    with patch.object(EndOfCompletion, "__call__", wait_once):
        expected = engine.lead(lambda: [values(future.result()) for future in engine.generate(all_requests, ended)])
    return [sorted(told.items()), expected] if rank.number == 0 else waited


def student(problem: Problem) -> Decoder:
    decoder = Decoder(build(problem.family, tied=problem.tied), verify=False)
    if problem.lora:
        add_lora(decoder, r=4, alpha=16.0)
        initialize_lora(decoder, 3, fresh=False)
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.data.copy_(0.3 * values)
    return decoder


def empty(problem: Problem) -> Decoder:
    with torch.device("meta"):
        model = type(build(problem.family))(build(problem.family, tied=problem.tied).config)
    decoder = Decoder(model, verify=False)
    if problem.lora:
        add_lora(decoder, r=4, alpha=16.0)
    return decoder


@torch.no_grad()
def change(decoder: Decoder) -> None:
    changed: set[int] = set()
    for parameter in decoder.parameters():
        if parameter.requires_grad and id(parameter) not in changed:
            values: Tensor = local(parameter)
            values.mul_(0.5)
            changed.add(id(parameter))


def completions(engine: InJobEngine) -> list[tuple[list[int], list[float], list[int], str]]:
    return [values(future.result(timeout=0)) for future in engine.generate(requests(LENGTHS, seed=5))]


def values(completion: Completion) -> tuple[list[int], list[float], list[int], str]:
    return (
        completion.ids_N.tolist(),
        completion.log_probs_N.tolist(),
        completion.versions_N.tolist(),
        completion.finish,
    )
