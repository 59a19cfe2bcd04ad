"""The speed of documents in rows of their own, compared with packed documents, on the same model and documents.

    python -m benchmarks.rows --threads 2

The lengths of the documents are like those of conversations: log-normal, with a median of 245 tokens, at most 2,048.
Forward and backward of the layers run on all micro-batches, packed and in rows in turns, in one process. The medians
of tokens per second are compared. The model is random. Writes benchmarks/results/rows-<date>.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.record import result_file, write_result
from stillhouse.data import DataReport, Documents, MicroBatch, PackedSequences
from stillhouse.models import Decoder

MAX_TOKENS, MICRO_BATCH_TOKENS, VOCABULARY = 2048, 8192, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = measure(arguments)
    print(json.dumps(result, indent=1))
    write_result(result_file("rows"), {"theme": "rows"} | result, arguments.device)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    documents = conversations(arguments.tokens)
    packed = PackedSequences(documents, max_tokens=MAX_TOKENS, seed=0)
    rows = PackedSequences(documents, max_tokens=MICRO_BATCH_TOKENS, seed=0, by_length=True)
    at_a_time = MICRO_BATCH_TOKENS // MAX_TOKENS
    micro_batches = {
        "packed": [
            packed.micro_batch(range(start, min(start + at_a_time, len(packed))))
            for start in range(0, len(packed), at_a_time)
        ],
        "rows": [rows.micro_batch([sequence]) for sequence in range(len(rows))],
    }
    decoders = {packing: make_decoder(arguments, packing) for packing in micro_batches}
    seconds: dict[str, list[float]] = {packing: [] for packing in micro_batches}
    for repetition in range(arguments.repetitions + 1):
        for packing, of_packing in micro_batches.items():
            took = run(decoders[packing], of_packing, arguments.device)
            if repetition:  # the first one warms up
                seconds[packing].append(took)
    tokens = int(documents.lengths_D.sum())
    speeds = {packing: tokens / statistics.median(times) for packing, times in seconds.items()}
    ratios = [packed / rows for packed, rows in zip(seconds["packed"], seconds["rows"], strict=True)]
    return {
        "documents": len(documents),
        "tokens": tokens,
        "padding_share": rows.padding_share,
        "tokens_per_second": speeds,
        "rows_relative_to_packed": statistics.median(ratios),
        "ratios": ratios,
        "settings": {key: value for key, value in vars(arguments).items() if key != "device"},
    }


def conversations(tokens: int) -> Documents:
    random = np.random.default_rng(0)
    lengths = random.lognormal(mean=5.5, sigma=1.0, size=tokens // 64).clip(8, MAX_TOKENS).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    count = int(lengths.sum())
    return Documents(
        random.integers(VOCABULARY, size=count).astype(np.int32),
        np.ones(count, dtype=bool),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.arange(len(lengths), dtype=np.uint64),
        [""] * len(lengths),
        DataReport("random"),
    )


def make_decoder(arguments: argparse.Namespace, packing: str) -> Decoder:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        num_key_value_heads=arguments.width // 64,
        head_dim=64,
    )
    return Decoder(Qwen3ForCausalLM(config).to(arguments.device), packing=packing).train()


def run(decoder: Decoder, micro_batches: Sequence[MicroBatch], device: str) -> float:
    started = time.monotonic()
    for micro_batch in micro_batches:
        on_device = micro_batch.to(device)
        is_padding = (on_device.document_T < 0).view(on_device.shape_BS)
        hidden_BSD = decoder(**on_device.inputs, is_padding=is_padding, head=False)
        hidden_BSD[~is_padding].square().mean().backward()
        decoder.zero_grad(set_to_none=True)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.monotonic() - started


if __name__ == "__main__":
    main()
