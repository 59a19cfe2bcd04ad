"""What reading a teacher's signals from a cache costs: the share of a step that waits for them.

    python -m benchmarks.teacher_cache --threads 2

A cache of hidden states and one of top-k ids are written by a random teacher. Then the same steps are trained three
times, from each cache and with the teacher in the job, in turns in one process. The aim is to wait for at most 3 % of
a step. A live teacher computes within the step, so it has no waiting time. Writes
benchmarks/results/teacher_cache-<date>.json.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.record import result_file, write_result
from stillhouse.config import RunConfig, load_config
from stillhouse.loops.session import Session
from stillhouse.run.run import prepare
from stillhouse.signals import RequestedSteps
from stillhouse.tools.write_cache import write_cache

TOP_K = 64


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    print(json.dumps(result, indent=1))
    write_result(result_file("teacher_cache"), {"theme": "teacher cache"} | result, arguments.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--student", type=int, nargs=2, default=[224, 4], metavar=("WIDTH", "LAYERS"))
    add("--teacher", type=int, nargs=2, default=[1024, 4], metavar=("WIDTH", "LAYERS"))
    add("--vocabulary", type=int, default=32768)
    add("--max-tokens", type=int, default=512, help="of a packed sequence")
    add("--micro-batch-tokens", type=int, default=2048)
    add("--micro-batches", type=int, default=2, help="of a step")
    add("--steps", type=int, default=5, help="of each turn; the first one is not counted")
    add("--turns", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--device", default="cpu")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    words = [f"w{number}" for number in range(arguments.vocabulary)]
    for seed, (name, shape) in enumerate({"student": arguments.student, "teacher": arguments.teacher}.items()):
        save_model(folder / name, arguments, words, *shape, seed)
    write_data(folder / "train.jsonl", arguments, words)
    live = configuration(arguments, folder, {"model": str(folder / "teacher")})
    sessions, caches = {"in the job": prepare(live, announce=False)}, {}
    for kind in ("hidden", "top_k"):
        started = time.perf_counter()
        manifest = write_cache(live, folder / kind, "top_k" if kind == "top_k" else "hidden", top_k=TOP_K)
        caches[kind] = {
            "bytes_per_token": manifest.signal.bytes_per_token(manifest.width),
            "tokens_per_second": round(manifest.rows / (time.perf_counter() - started), 1),
        }
        cached = configuration(arguments, folder, {"cache": str(folder / kind)})
        sessions[kind] = prepare(cached, announce=False)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
    for _ in range(arguments.turns):
        for name, session in sessions.items():
            seconds[name] += steps(session)[1:]
    tokens = live.train.tokens_per_step
    return {
        "written": caches,
        "waiting_share": {name: round(median_share(second), 5) for name, second in seconds.items()},
        "tokens_per_second": {
            name: round(tokens / statistics.median(step for _, step in second), 1) for name, second in seconds.items()
        },
        "step_seconds": {name: [round(step, 4) for _, step in second] for name, second in seconds.items()},
        "sizes": vars(arguments),
    }


def steps(session: Session) -> list[tuple[float, float]]:
    """For each step the seconds of waiting for signals, and of the whole step."""
    schedule, seconds = session.schedule.step_schedule, []
    sharded = (
        session.models.shard(schedule.micro_batches(session.data.train, step)) for step in range(schedule.steps)
    )
    requests = RequestedSteps(session.models.source_for(session.models.engine), sharded)
    for _ in range(schedule.steps):
        started = time.perf_counter()
        micro_batches, pending = next(requests)
        requested = time.perf_counter()
        signals = pending.result()
        waited = time.perf_counter() - requested
        session.models.engine.forward_backward(micro_batches, signals, micro_batches.all_ranks.normalizer)
        requests.build_next()
        session.models.engine.update(1e-5)
        if session.models.device.type == "cuda":
            torch.cuda.synchronize(session.models.device)
        seconds.append((waited, time.perf_counter() - started))
    return seconds


def median_share(seconds: list[tuple[float, float]]) -> float:
    return statistics.median(waited / step for waited, step in seconds)


def configuration(arguments: argparse.Namespace, folder: Path, teacher: dict[str, str]) -> RunConfig:
    train = {
        "micro_batch_tokens": arguments.micro_batch_tokens,
        "tokens_per_step": arguments.micro_batches * arguments.micro_batch_tokens,
        "steps": arguments.steps,
        "precision": "fp32",
    }
    settings = {
        "student": {"model": str(folder / "student")},
        "teacher": teacher,
        "data": {"train": str(folder / "train.jsonl"), "eval": 0, "max_tokens": arguments.max_tokens},
        "objective": {"loss": "0.3*cross_entropy + 0.7*forward_kl"},
        "train": train,
        "checkpoint": {"best": None},
        "device": arguments.device,
        "out": str(folder / "out"),
    }
    return load_config(None, settings=settings)


def save_model(
    folder: Path, arguments: argparse.Namespace, words: list[str], width: int, layers: int, seed: int
) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=arguments.max_tokens,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token="w0").save_pretrained(folder)


def write_data(path: Path, arguments: argparse.Namespace, words: list[str]) -> None:
    """Random words; a document fills a packed sequence."""
    draw = np.random.default_rng(0)
    count = arguments.steps * arguments.micro_batches * arguments.micro_batch_tokens // arguments.max_tokens
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            chosen = draw.integers(1, arguments.vocabulary, size=arguments.max_tokens - 1)
            file.write(json.dumps({"text": " ".join(words[word] for word in chosen)}) + "\n")


if __name__ == "__main__":
    main()
