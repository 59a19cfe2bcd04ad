"""How long a start needs for its data, and its peak memory: without a cache, writing one, and reading it.

    python -m benchmarks.data --megabytes 200

Texts of random words, tokenized by a byte-level BPE of 8,000 tokens that is trained on the first of them. Each case
is a new process; the peak is that of the whole process, and `imports` is what a process needs before it reads
anything.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.record import result_file, write_result
from stillhouse.data import LoadOptions, load_documents, load_tokenizer

CASES = ("imports", "without a cache", "first start", "second start", "third start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the JSON Lines file")
    parser.add_argument("--case", nargs=2, metavar=("CASE", "FOLDER"), help="measure one case (used by this script)")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case[0], Path(arguments.case[1]))))
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, arguments.megabytes)
        cases = {case: in_a_process(case, folder) for case in CASES}
    result = {"theme": "data: start with and without a token cache", "megabytes": arguments.megabytes, "cases": cases}
    write_result(result_file("data"), result)


def in_a_process(case: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.data", "--case", case, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    print(case, ended.stdout.strip(), flush=True)
    return json.loads(ended.stdout)


def measure(case: str, folder: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    figures: dict[str, Any] = {}
    if case != "imports":
        cache = None if case == "without a cache" else folder / "cache"
        started = time.perf_counter()
        documents = load_documents(folder / "train.jsonl", tokenizer, LoadOptions(max_tokens=2048), cache=cache)
        figures["seconds"] = round(time.perf_counter() - started, 2)
        figures["fingerprint"] = documents.fingerprint()[:16]
        figures["documents"], figures["tokens"] = len(documents), len(documents.tokens_N)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return figures | {"peak_megabytes": round(peak / 1e6)}


def write_data(folder: Path, megabytes: int) -> None:
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(draw.choice(letters, size=draw.integers(2, 10))) for _ in range(20_000)])
    size = 0
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        while size < megabytes * 10**6:
            chosen = draw.zipf(1.3, size=draw.integers(20, 800)) % len(words)
            size += file.write(json.dumps({"text": " ".join(words[chosen])}) + "\n")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    with (folder / "train.jsonl").open(encoding="utf-8") as file:
        backend.train_from_iterator(
            (json.loads(line)["text"] for line, _ in zip(file, range(2_000), strict=False)), trainer
        )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder / "tokenizer")


if __name__ == "__main__":
    main()
