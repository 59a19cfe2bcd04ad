"""A real vLLM that writes a student's completions: its log-probabilities, and the version of every token.

Part of benchmarks/engines.py. Two servers of one random student are started, with and without
`--logprobs-mode processed_logprobs`. Each completion's log-probabilities are compared with those of transformers in
float32, by the weights that its tokens are said to be written with: before and after two updates, and of a completion
that was under way during one.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.engines_server import PROCESSED, WRITING
from stillhouse.models import Decoder
from stillhouse.models.adapter import add_lora, initialize_lora
from stillhouse.parallel import single_process_runner
from stillhouse.rollout.publish import publish
from stillhouse.rollout.records import Completion, GenerationRequest, Sampling
from stillhouse.serving.client.served_engine import ServedEngine
from stillhouse.serving.client.vllm import VllmApi

#: the largest difference of a log-probability, in nats, from transformers' own in float32
SAME = 1e-5
TEMPERATURE, LONG, LORA_RANK, ATTEMPTS = 0.7, 1000, 8, 8
RAW = ("--enable-lora", "--max-lora-rank", str(LORA_RANK))

#: the folder of the student that writes
MODEL = "writer"
SHAPE: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that a CPU build computes with
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # so that tokens are far from equally likely
}

Start = Callable[..., AbstractContextManager[str]]


def measure_completions(folder: Path, start: Start) -> dict[str, Any]:
    """Figures of both servers. start: starts a server of folder/writer with options, and gives its URL."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder / MODEL)
    student = Decoder.from_pretrained(folder / MODEL, dtype="float32")
    with start(*WRITING, *PROCESSED) as processed, start(*WRITING, *RAW) as raw:
        return {
            **_updates(folder, student, processed),
            **_refusals(student, processed, raw),
            **_proved_temperatures(student, processed),
            **_adapters(folder, student, raw),
        }


def _updates(folder: Path, student: Decoder, url: str) -> dict[str, Any]:
    versions: dict[int, PreTrainedModel] = {}
    eos = tuple(range(0, student.vocabulary_rows, 50))
    runner = single_process_runner(student, None)
    engine = _engine(url, student, Sampling(64, temperature=TEMPERATURE, eos_ids=eos))
    long = _engine(url, student, Sampling(LONG, temperature=TEMPERATURE))
    seconds, differences, finishes = [], [], []
    try:
        for version in range(3):
            _move(student, version)
            versions[version] = AutoModelForCausalLM.from_pretrained(publish(runner, folder / "weights", version))
            before = time.perf_counter()
            engine.update_weights(version, folder / "weights" / f"version-{version:08d}")
            seconds.append(time.perf_counter() - before)
            requests = _requests(24)
            completions = [future.result() for future in engine.generate(requests)]
            again = [future.result() for future in engine.generate(requests)]
            _require(all(_same(a, b) for a, b in zip(completions, again, strict=True)), "a seed gives other tokens")
            _require(all((completion.versions_N == version).all() for completion in completions), "a wrong version")
            finishes += [completion.finish for completion in completions]
            _require(
                all((completion.finish == "stop") == (completion.ids_N[-1] in eos) for completion in completions),
                "a wrong end",
            )
            differences += [_difference(r, c, versions) for r, c in zip(requests, completions, strict=True)]
        crossing = _crossing(folder, student, long, versions)
    finally:
        engine.close()
        long.close()
    _require(max(differences) <= SAME, f"log-probabilities differ by {max(differences)}")
    return {
        "completions": len(differences),
        "ended_by_eos": finishes.count("stop"),
        "largest_log_prob_difference": max(differences),
        "seconds_of_updates": [round(second, 3) for second in seconds],
        **crossing,
    }


def _crossing(
    folder: Path, student: Decoder, engine: ServedEngine, versions: dict[int, PreTrainedModel]
) -> dict[str, Any]:
    """Long completions that are under way while new weights are loaded. On a loaded machine, they may have ended
    before or begun after: the update is then repeated with the next version.
    """
    engine.update_weights(2, folder / "weights" / "version-00000002")
    requests = _requests(6)
    for version in range(3, 3 + ATTEMPTS):
        seconds = [_seconds(engine, requests) for _ in range(2)]
        _move(student, version)
        path = publish(single_process_runner(student, None), folder / "weights", version)
        versions[version] = AutoModelForCausalLM.from_pretrained(path)
        futures = engine.generate(requests)
        update = threading.Timer(min(seconds) / 2, engine.update_weights, (version, path))
        update.start()
        completions = [future.result() for future in futures]
        update.join()
        if all(set(completion.versions_N.tolist()) == {version - 1, version} for completion in completions):
            break
    else:
        _require(False, "no completion crosses the update")
    differences = [_difference(r, c, versions) for r, c in zip(requests, completions, strict=True)]
    _require(max(differences) <= SAME, f"after an update under way, log-probabilities differ by {max(differences)}")
    return {
        "crossing_completions": len(completions),
        "crossing_tokens_of_the_old_weights": [
            int((completion.versions_N == version - 1).sum()) for completion in completions
        ],
        "crossing_largest_log_prob_difference": max(differences),
    }


def _seconds(engine: ServedEngine, requests: list[GenerationRequest]) -> float:
    before = time.perf_counter()
    for future in engine.generate(requests):
        future.result()
    return time.perf_counter() - before


def _refusals(student: Decoder, processed: str, raw: str) -> dict[str, Any]:
    """What each server is refused for, in words."""
    refused: dict[str, str] = {}
    for name, url, sampling, is_tied in (
        ("raw, temperature", raw, Sampling(8, temperature=TEMPERATURE), False),
        ("processed, top_p", processed, Sampling(8, top_p=0.9), False),
        ("a student with a tied head", processed, Sampling(8), True),
    ):
        try:
            _engine(url, student, sampling, is_tied)
        except ValueError as error:
            refused[name] = str(error).removeprefix(url)
        _require(name in refused, f"{name} is not refused")
    return {"refused": refused}


def _adapters(folder: Path, student: Decoder, url: str) -> dict[str, Any]:
    """Two versions of an adapter, on the server without processed log-probabilities and at a temperature of 1."""
    base = Decoder.from_pretrained(folder / MODEL, dtype="float32")
    add_lora(base, r=LORA_RANK, alpha=16)
    runner, versions, differences = single_process_runner(base, None), dict[int, Any](), list[float]()
    engine = _engine(url, base, Sampling(32, top_p=0.9))
    try:
        for version in range(2):
            initialize_lora(base, version, fresh=False)
            path = publish(runner, folder / "adapters", version)
            versions[version] = base.pretrained
            engine.update_weights(version, path)
            requests = _requests(8)
            completions = [future.result() for future in engine.generate(requests)]
            _require(
                all((completion.versions_N == version).all() for completion in completions),
                "a wrong version of the adapter",
            )
            pairs = zip(requests, completions, strict=True)
            differences += [_difference(r, c, versions, temperature=1.0) for r, c in pairs]
    finally:
        engine.close()
    _require(max(differences) <= SAME, f"with an adapter, log-probabilities differ by {max(differences)}")
    return {"adapter_completions": len(differences), "adapter_largest_log_prob_difference": max(differences)}


def _proved_temperatures(student: Decoder, processed: str) -> dict[str, Any]:
    """The proof of log-probabilities accepts the right ones, whichever tokens it draws."""
    temperatures = (0.3, 0.5, 0.9, 1.1, 1.5, 2.0)
    for temperature in temperatures:
        _engine(processed, student, Sampling(8, temperature=temperature)).close()
    return {"proved_temperatures": temperatures}


def _engine(url: str, student: Decoder, sampling: Sampling, is_tied: bool = False) -> ServedEngine:
    api = VllmApi(is_tied=is_tied)
    return ServedEngine([url], sampling, api, vocabulary=student.vocabulary_rows, timeout=300, warn=print)


@torch.no_grad()
def _move(student: Decoder, version: int) -> None:
    """Change all weights, so that each version writes other tokens, and none of them with certainty."""
    generator = torch.Generator().manual_seed(version)
    for parameter in student.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def _requests(count: int) -> list[GenerationRequest]:
    draws = np.random.default_rng(0)
    prompts = [draws.integers(0, 200, 1 + number % 7).astype(np.int32) for number in range(count)]
    return [GenerationRequest(number, prompt, seed=1000 + number) for number, prompt in enumerate(prompts)]


def _same(one: Completion, other: Completion) -> bool:
    return np.array_equal(one.ids_N, other.ids_N)


@torch.no_grad()
def _difference(
    request: GenerationRequest,
    completion: Completion,
    versions: Mapping[int, PreTrainedModel],
    temperature: float = TEMPERATURE,
) -> float:
    """The largest difference of a token's log-probability from that of its version, after all tokens before it."""
    ids_S = torch.from_numpy(np.concatenate([request.prompt_ids, completion.ids_N]).astype(np.int64))
    largest = 0.0
    for version in set(completion.versions_N.tolist()):
        logits_NV = versions[version].eval()(ids_S[None]).logits[0, len(request.prompt_ids) - 1 : -1].double()
        log_probs_NV = (logits_NV / temperature).log_softmax(-1)
        exact_N = log_probs_NV.gather(1, torch.from_numpy(completion.ids_N.astype(np.int64))[:, None])[:, 0].numpy()
        of_version_N = completion.versions_N == version
        largest = max(largest, float(np.abs(exact_N - completion.log_probs_N)[of_version_N].max()))
    return largest


def _require(true: bool, problem: str) -> None:
    if not true:
        raise AssertionError(f"vLLM's completions: {problem}")
