"""The engine in this process, and over several processes that each hold a copy of a distributed student."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kit import first_is_quick
from kit.families import build
from kit.on_policy_runs import CPU, requests
from kit.runs import wait_for
from kit.shard_ranks import Rank, message_of, on_ranks
from torch import Tensor

from stillhouse.models import Decoder, add_lora, initialize_lora
from stillhouse.models.dtensors import local
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource
from stillhouse.proofs.layouts import build_proven_runner
from stillhouse.rollout import Completion, GenerationRequest, Sampling
from stillhouse.rollout.engines import InJobEngine, StudentCopy
from stillhouse.rollout.generate import Generator
from stillhouse.rollout.records import CompletionInbox
from stillhouse.rollout.sampler import EndOfCompletion

LENGTHS = (3, 11, 1, 7, 5, 4, 2)


@dataclass(frozen=True)
class Problem:
    """on_meta: whether the copy is built without weights."""

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
    engine.update_weights(1)
    return [first, completions(engine)]


def engine_with_copy(problem: Problem) -> tuple[InJobEngine, Sequence[Decoder]]:
    """The engine of a distributed student, and the parts of the student on this rank."""
    mesh = Mesh(problem.degrees, CPU)
    runner = build_proven_runner(Layout(problem.degrees), mesh, ModelSource(lambda: student(problem)), None)
    copy = StudentCopy(runner, lambda: empty(problem) if problem.on_meta else student(problem))
    generator = Generator(copy.decoder, problem.sampling, CPU, batch_tokens=problem.batch_tokens)
    return InJobEngine(generator, copy), runner.decoders


def in_a_layout(rank: Rank, problem: Problem) -> list[Any]:
    """The same as `one_process`; and nothing may change before `update_weights`."""
    engine, parts = engine_with_copy(problem)
    first = completions(engine)
    for part in parts:
        change(part)
    assert completions(engine) == first
    engine.update_weights(1)
    return [first, completions(engine)]


def an_error_on_one_rank(rank: Rank, problem: Problem) -> str:
    engine, _ = engine_with_copy(problem)
    if rank.number == 1:
        engine.generator.decoder.output_weight.data[7] = torch.nan
    return message_of(engine.generate, requests(LENGTHS, seed=5))


def told_early(rank: Rank, problem: Problem, marker: Path) -> list[Any]:
    """On rank 0, the completions of which it was told, and all of them. On rank 1: whether its batch has waited until
    rank 0 was told of a completion of rank 1.
    """
    engine, _ = engine_with_copy(problem)
    told, waited = dict[int, list[Any]](), list[bool]()
    all_requests = [replace(request, max_new_tokens=1 + request.number % 5) for request in requests(LENGTHS, seed=5)]

    batches = engine.generator.batches(all_requests, least=2)
    others = {all_requests[at].number for batch in batches[1::2] for at in batch}

    class Requester:
        """Requests all completions at once, and is told of them early."""

        def __init__(self) -> None:
            self.inbox, self.requests = CompletionInbox(is_early=True), list(all_requests)

        def next_requests(self) -> list[GenerationRequest]:
            requests, self.requests = self.requests, []
            return requests

    def read(inbox: CompletionInbox) -> None:
        for number, completion, _ in iter(inbox.arrivals.get, None):
            told.setdefault(number, []).append(values(completion))
            if number in others:
                marker.touch()

    def wait_once(end: EndOfCompletion, *arguments: Any, **options: Any) -> Any:
        has_ended_B = original(end, *arguments, **options)
        if rank.number == 1 and has_ended_B.any() and not has_ended_B.all() and not waited:
            wait_for(marker.exists, 30)
            waited.append(True)
        return has_ended_B

    original = EndOfCompletion.__call__
    requester: Any = Requester() if rank.number == 0 else None
    thread = threading.Thread(target=read, args=(requester.inbox,)) if requester else None
    if thread:
        thread.start()
    with patch.object(EndOfCompletion, "__call__", wait_once):
        engine.complete(requester)
    expected = [values(completion) for completion in engine.generate(all_requests)]
    if requester is None or thread is None:
        return waited
    requester.inbox.arrivals.put(None)
    thread.join()
    return [sorted(told.items()), expected]


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
    return [values(completion) for completion in engine.generate(requests(LENGTHS, seed=5))]


def values(completion: Completion) -> tuple[list[int], list[float], list[int], str]:
    numbers = (completion.ids_N, completion.log_probs_N, completion.versions_N)
    return *(values_N.tolist() for values_N in numbers), completion.finish


SAMPLED = Sampling(max_new_tokens=8, eos_ids=(2, 9), top_p=0.95)
GREEDY = replace(SAMPLED, temperature=0.0)

PROBLEMS = [
    *(Problem(Degrees(fsdp=2), SAMPLED), Problem(Degrees(fsdp=2), GREEDY)),
    Problem(Degrees(tensor=2), SAMPLED, family="qwen3", batch_tokens=40),
    *(Problem(Degrees(tensor=2), GREEDY, tied=True), Problem(Degrees(pipeline=2), SAMPLED, tied=True, on_meta=False)),
    *(Problem(Degrees(pipeline=2), GREEDY, family="qwen3"), Problem(Degrees(fsdp=2), SAMPLED, family="qwen3_moe")),
    *(Problem(Degrees(pipeline=2), SAMPLED, lora=True), Problem(Degrees(pipeline=2, fsdp=2), SAMPLED)),
    Problem(Degrees(fsdp=2, tensor=2), SAMPLED, lora=True),
]


def same(actual: list[Any], expected: list[Any]) -> None:
    for one, other in zip(actual, expected, strict=True):
        (ids, log_probs, *rest), (expected_ids, expected_log_probs, *expected_rest) = one, other
        assert (ids, rest) == (expected_ids, expected_rest)
        np.testing.assert_allclose(log_probs, expected_log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("problem", first_is_quick(PROBLEMS), ids=str)
def test_every_rank_has_the_completions_of_one_process(problem: Problem) -> None:
    before, after = one_process(problem)
    assert [ids for ids, *_ in before] != [ids for ids, *_ in after]
    assert {version for _, _, versions, _ in after for version in versions} == {1}
    answers = on_ranks(in_a_layout, problem.degrees.processes, problem)
    for answer in answers:
        for actual, expected in zip(answer, (before, after), strict=True):
            same(actual, expected)
    assert all(answer == answers[0] for answer in answers), "the ranks differ"


def test_the_first_rank_is_told_of_completions_while_another_rank_still_generates(tmp_path: Path) -> None:
    first, second = on_ranks(told_early, 2, Problem(Degrees(fsdp=2), SAMPLED), tmp_path / "told")
    told, expected = first
    # those that the first rank was told of early come again at the end
    assert [number for number, _ in told] == list(range(len(expected)))
    assert all([*completion] == [*expected[at]] for at, completions in told for completion in completions)
    assert max(len(completions) for _, completions in told) == 2
    assert second == [True]


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    answers = on_ranks(an_error_on_one_rank, 2, Problem(Degrees(fsdp=2), SAMPLED))
    assert all("its logits are not finite" in answer for answer in answers)
