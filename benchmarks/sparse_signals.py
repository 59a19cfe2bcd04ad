"""Sampled ids against the top ids at equal bytes per token: which cached signal makes the better student?

The demo's students learn from caches of the shipped teacher: 50 samples per token (RS-KD, arXiv 2503.16870), the k
top ids for the k whose file is as large, with the other mass as one more outcome ("bucket") or left out
("renormalize", which is what most peers do), and hidden states, which are exact. Every student has the same initial
weights, data and order for a seed. Reported are held-out cross-entropy and forward KL against the whole teacher, and
the calibration of the student: the difference between confidence and accuracy of its top token (ECE with 15
bins of equal width). Writes benchmarks/results/sparse_signals-<date>.json.

    python -m benchmarks.sparse_signals --seeds 0 1 2
"""

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import result_file, write_result
from benchmarks.training_runs import run_config, student_settings
from stillhouse.config import RunConfig
from stillhouse.data import MicroBatch, PackedSequences
from stillhouse.loops.held_out import held_out_metrics
from stillhouse.models import Decoder
from stillhouse.run.run import distill, prepare
from stillhouse.tools.demo.corpus import collect_split, write_jsonl
from stillhouse.tools.demo.student import TEACHER, save_new_student
from stillhouse.tools.write_cache import write_cache

DRAWS, BINS, MAX_TOKENS = 50, 15, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        caches = write_caches(folder, arguments.steps)
        runs = {seed: figures_of(folder, seed, arguments.steps, caches) for seed in arguments.seeds}
    means = {
        signal: {
            key: round(statistics.mean(run[signal][key] for run in runs.values()), 4)
            for key in next(iter(runs.values()))[signal]
        }
        for signal in caches
    }
    bytes_per_token = {signal: round(cache["bytes_per_token"], 1) for signal, cache in caches.items()}
    result = {"bytes_per_token": bytes_per_token, "means": means, "runs": runs, "steps": arguments.steps}
    print(json.dumps(result, indent=1))
    write_result(result_file("sparse_signals"), {"theme": "sparse signals", **result}, "cpu")


def write_caches(folder: Path, steps: int) -> dict[str, dict[str, Any]]:
    """For each signal: its cache, the tail, and the bytes per token on disk."""
    write_jsonl(collect_split("student"), folder / "train.jsonl")
    write_jsonl(collect_split("held_out"), folder / "held_out.jsonl")
    save_new_student(folder / "student", 0)
    write = partial(write_cache, configuration(folder, 0, steps, {"teacher.model": str(TEACHER)}))
    write(folder / "draws", "sampled", top_k=DRAWS)
    size = bytes_per_token(folder / "draws")
    top_k = int((size - 4) // (2 + 4))  # a number in float16 and an id
    write(folder / "top_k", "top_k", top_k=top_k, dtype="float16")
    write(folder / "hidden", "hidden")
    tails = {
        "draws": ("draws", "bucket"),
        "top_k, bucket": ("top_k", "bucket"),
        "top_k, renormalize": ("top_k", "renormalize"),
        "hidden": ("hidden", "bucket"),
    }
    return {
        name: {"cache": cache, "tail": tail, "top_k": top_k, "bytes_per_token": bytes_per_token(folder / cache)}
        for name, (cache, tail) in tails.items()
    }


def bytes_per_token(cache: Path) -> float:
    rows = json.loads((cache / "cache.json").read_text())["rows"]
    return sum(path.stat().st_size for path in (cache / "shards").glob("*.safetensors")) / rows


def figures_of(folder: Path, seed: int, steps: int, caches: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    save_new_student(folder / "student", seed)
    results = {}
    for name, cache in caches.items():
        settings = {"teacher.cache": str(folder / cache["cache"]), "teacher.tail": cache["tail"], "data.eval": 0.0}
        out = distill(configuration(folder, seed, steps, {**settings, "out": str(folder / f"{seed} {name}")}))
        evaluation = configuration(
            folder, seed, 1, {"teacher.model": str(TEACHER), "student.model": str(out / "model")}
        )
        session = prepare(evaluation, announce=False)
        held_out = session.data.evaluation
        assert held_out is not None
        figures = held_out_metrics(session.models, held_out, session.loss.spec, session.schedule.held_out_tokens)
        results[name] = {key: figures[f"eval/{key}"] for key in ("cross_entropy", "forward_kl", "agreement")}
        results[name]["calibration_error"] = calibration_error(session.models.student, held_out)
    return results


@torch.no_grad()
def calibration_error(student: Decoder, sequences: PackedSequences) -> float:
    """The expected calibration error over all target tokens."""
    confidence, correct = [], []
    for start in range(0, len(sequences), 8):
        micro_batch: MicroBatch = sequences.micro_batch(range(start, min(start + 8, len(sequences))))
        logits_TV: Tensor = student(**micro_batch.inputs).flatten(0, 1)[micro_batch.valid_index]
        best_T = logits_TV.softmax(1).max(1)
        confidence.append(best_T.values)
        correct.append(best_T.indices == micro_batch.labels_T[micro_batch.valid_index])
    confidence_N, correct_N = torch.cat(confidence).double(), torch.cat(correct).double()
    bin_N = (confidence_N * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bin_N, confidence_N - correct_N)
    return float(gaps.abs().sum() / len(confidence_N))


def configuration(folder: Path, seed: int, steps: int, settings: dict[str, Any]) -> RunConfig:
    student = student_settings(folder, seed, steps, max_tokens=MAX_TOKENS, tokens_per_step=1024)
    return run_config(student | {"teacher.dtype": "float32", "out": str(folder / "unused")} | settings)


if __name__ == "__main__":
    main()
