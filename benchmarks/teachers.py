"""What serving a teacher costs: tokens per second and latency of `stillhouse serve` beside the bare forward pass.

    python -m benchmarks.teachers --threads 1

A random teacher runs on the same sequences in four ways, in turns: a forward pass in this process, which leaves the
hidden states on the device; /v1/score with hidden states in bfloat16, and with top-k ids; and the OpenAI path with
the same number of prompt log-probabilities as JSON. The server is a process of its own, and 64 clients ask it at the
same time. The aim is 0.9 of the forward pass for /v1/score. Then many small requests count what is lost, and the
server's peak memory. Clients and server share the machine's cores. Writes benchmarks/results/teachers-<date>.json.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from operator import truediv
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.record import result_file, write_result
from stillhouse.models import Decoder
from stillhouse.serving import SAFETENSORS
from stillhouse.serving.wire import decode_answer, encode_request
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

TOP_K = 64


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments)
        server = start(folder, arguments)
        try:
            result = asyncio.run(measure(arguments, folder, server))
        finally:
            server.send_signal(signal.SIGTERM)
            result_code = server.wait(60)
    result["server"] |= {"exit_code": result_code}
    print(json.dumps(result, indent=1))
    write_result(result_file("teachers"), {"theme": "teacher server"} | result, arguments.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--teacher", type=int, nargs=2, default=[512, 4], metavar=("WIDTH", "LAYERS"))
    add("--vocabulary", type=int, default=8192)
    add("--tokens", type=int, default=256, help="of a sequence")
    add("--batch-tokens", type=int, default=2048)
    add("--sequences", type=int, default=16, help="of each turn")
    add("--turns", type=int, default=2)
    add("--clients", type=int, default=64)
    add("--requests", type=int, default=10_000, help="small ones, to count what is lost")
    add("--threads", type=int, default=1)
    add("--device", default="cpu")
    return parser.parse_args()


def start(folder: str, arguments: argparse.Namespace) -> "subprocess.Popen[str]":
    options = ["--port", "0", "--device", arguments.device, "--batch-tokens", str(arguments.batch_tokens)]
    command = [sys.executable, "-m", "stillhouse", "serve", folder, *options, "--queue-tokens", "1000000"]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


async def measure(arguments: argparse.Namespace, folder: str, server: "subprocess.Popen[str]") -> dict[str, Any]:
    assert server.stdout is not None
    url = next(match[1] for line in server.stdout if (match := re.search(r"serving on (\S+)", line)))
    draw = np.random.default_rng(0)
    decoder = Decoder.from_pretrained(folder, device=arguments.device)
    tokens_NT = draw.integers(0, arguments.vocabulary, (arguments.sequences, arguments.tokens)).astype(np.int32)
    documents = [DocumentRows(tokens, range(arguments.tokens)) for tokens in tokens_NT]
    width, hidden = arguments.teacher[0], SignalSpec("hidden", "bfloat16")
    top_k = SignalSpec("top_k", "float32", TOP_K, 1.0)
    limits = httpx2.Limits(max_connections=arguments.clients)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        paths: dict[str, Callable[[DocumentRows], Awaitable[object]]] = {
            "hidden": lambda document: score(client, hidden, width, document),
            "top_k": lambda document: score(client, top_k, width, document),
            "openai_json": lambda document: complete(client, document),
        }
        seconds: dict[str, list[float]] = {"forward": [], **{name: [] for name in paths}}
        latencies: dict[str, list[float]] = {name: [] for name in paths}
        for turn in range(arguments.turns + 1):
            taken = {"forward": forward(decoder, documents, arguments)}
            for name, path in paths.items():
                began = time.perf_counter()
                of_requests = await together(path, documents, arguments.clients)
                taken[name] = time.perf_counter() - began
                if turn:
                    latencies[name] += of_requests
            if turn:  # the first turn is not counted
                for name, value in taken.items():
                    seconds[name].append(value)
        lost = await small_requests(client, arguments, draw)
    return {
        "tokens_per_second": {
            name: round(arguments.sequences * arguments.tokens / statistics.median(second), 1)
            for name, second in seconds.items()
        },
        "of_the_forward_pass": {
            name: round(statistics.median(map(truediv, seconds["forward"], second)), 3)
            for name, second in seconds.items()
        },
        "latency_seconds": {name: percentiles(latency) for name, latency in latencies.items()},
        "server": lost | {"peak_mib": peak_mib(server.pid)},
        "clients_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "seconds": {name: [round(one, 3) for one in second] for name, second in seconds.items()},
        "sizes": vars(arguments),
    }


@torch.no_grad()
def forward(decoder: Decoder, documents: list[DocumentRows], arguments: argparse.Namespace) -> float:
    """Seconds of the teacher's layers on the same sequences, in batches of as many tokens."""
    at_a_time = max(1, arguments.batch_tokens // arguments.tokens)
    began = time.perf_counter()
    for first in range(0, len(documents), at_a_time):
        tokens = np.stack([document.tokens for document in documents[first : first + at_a_time]])
        decoder(torch.from_numpy(tokens).long().to(arguments.device), head=False)
    if arguments.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


async def score(client: httpx2.AsyncClient, signal: SignalSpec, width: int, document: DocumentRows) -> object:
    content = encode_request(signal, [document])
    answer = await client.post("/v1/score", content=content, headers={"content-type": SAFETENSORS})
    answer.raise_for_status()
    return decode_answer(answer.content, signal, width, [document])


async def complete(client: httpx2.AsyncClient, document: DocumentRows) -> object:
    body = {"prompt": document.tokens.tolist(), "max_tokens": 0, "prompt_logprobs": TOP_K}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()


async def together(
    path: Callable[[DocumentRows], Awaitable[object]], documents: list[DocumentRows], clients: int
) -> list[float]:
    """Send all documents, so many at a time. Returns the seconds of each."""
    room, seconds = asyncio.Semaphore(clients), []

    async def one(document: DocumentRows) -> None:
        async with room:
            began = time.perf_counter()
            await path(document)
            seconds.append(time.perf_counter() - began)

    await asyncio.gather(*(one(document) for document in documents))
    return seconds


async def small_requests(
    client: httpx2.AsyncClient, arguments: argparse.Namespace, draw: np.random.Generator
) -> dict[str, Any]:
    """Many requests of 1 to 16 tokens for top-k. Each answer is checked; an error ends the benchmark."""
    documents = []
    for _ in range(arguments.requests):
        tokens = draw.integers(0, arguments.vocabulary, int(draw.integers(1, 17))).astype(np.int32)
        documents.append(DocumentRows(tokens, range(len(tokens))))
    wanted, width = SignalSpec("top_k", "float32", 8, 1.0), arguments.teacher[0]
    began = time.perf_counter()
    seconds = await together(lambda document: score(client, wanted, width, document), documents, arguments.clients)
    taken = time.perf_counter() - began
    return {
        "small_requests": len(documents),
        "small_requests_lost": len(documents) - len(seconds),
        "small_requests_per_second": round(len(documents) / taken, 1),
        "small_requests_latency_seconds": percentiles(seconds),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{at}": round(float(np.percentile(seconds, at)), 4) for at in (50, 99)}


def peak_mib(pid: int) -> int | None:
    """The most memory that a process has had so far; None where the system does not say."""
    status = Path(f"/proc/{pid}/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return None if match is None else round(int(match[1]) / 1024)


def save_model(folder: Path, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    width, layers = arguments.teacher
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=max(arguments.tokens, 512),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{number}": number for number in range(arguments.vocabulary)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token="w0").save_pretrained(folder)


if __name__ == "__main__":
    main()
