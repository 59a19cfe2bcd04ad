"""A teacher in less memory: what do fewer bits per weight save, and what do they change?

The demo's teacher is loaded in float32, bfloat16, int8 and nf4. For each: the memory of its layers and of the whole
model, the KL from the float32 teacher and the agreement with it on held-out text, its own cross-entropy there, and
the time of its forward pass, in turns with the others. Then the demo's students learn from each of them; every
student has the same initial weights, data and order for a seed. Writes
benchmarks/results/teacher_economy-<date>.json.

    python -m benchmarks.teacher_economy --seeds 0 1 2

B rows, S tokens per row, T tokens, V vocabulary.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.cross_tokenizer import configuration, held_out
from benchmarks.record import result_file, write_result
from benchmarks.training_runs import CROSS_ENTROPY, values_of
from stillhouse.data import load_tokenizer
from stillhouse.models import Decoder
from stillhouse.models.quantized import weight_bytes
from stillhouse.run.run import distill
from stillhouse.tools.demo.corpus import collect_split, write_jsonl
from stillhouse.tools.demo.student import TEACHER, save_new_student, token_stream

TOKENS, ROUNDS = 512, 5
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "nf4": {"dtype": "float32", "quantize": "nf4"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="steps of each student")
    arguments = parser.parse_args()
    teachers = {way: Decoder.from_pretrained(TEACHER, **settings) for way, settings in WAYS.items()}
    figures = of_teachers(teachers)
    seconds = forward_seconds(teachers)
    for way, figure in figures.items():
        figure["forward_seconds_of_float32s"] = round(seconds[way] / seconds["float32"], 2)
    del teachers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_jsonl(collect_split("student"), folder / "train.jsonl")
        write_jsonl(held_out(), folder / "held_out.jsonl")
        runs = {seed: of_students(folder, seed, arguments.steps) for seed in arguments.seeds}
    for way, figure in figures.items():
        losses = [run[way] for run in runs.values()]
        figure["students_held_out_cross_entropy"] = round(statistics.mean(losses), 4)
        figure["by_seed"] = [round(loss, 4) for loss in losses]
    result = {"theme": "teacher economy", "teachers": figures, "steps": arguments.steps}
    print(json.dumps(result, indent=1))
    write_result(result_file("teacher_economy"), result)


def rows() -> Tensor:
    """Held-out text [B, S]."""
    ids_T = token_stream(load_tokenizer(str(TEACHER)), held_out())
    return ids_T[: len(ids_T) // TOKENS * TOKENS].view(-1, TOKENS)[:16]


@torch.no_grad()
def of_teachers(teachers: dict[str, Decoder]) -> dict[str, dict[str, float]]:
    """For each teacher, its memory, and how far its distributions on held-out text are from those in float32."""
    ids_BS = rows()
    log_p_TV = {
        way: teacher(ids_BS)[:, :-1].flatten(0, 1).float().log_softmax(-1) for way, teacher in teachers.items()
    }
    labels_T, exact_TV = ids_BS[:, 1:].flatten(), log_p_TV["float32"]
    return {
        way: {
            "layers_bytes": weight_bytes(teachers[way].backbone.layers),  # type: ignore[arg-type]
            "model_bytes": weight_bytes(teachers[way]),
            "layers_share_of_float32s": round(
                weight_bytes(teachers[way].backbone.layers) / weight_bytes(teachers["float32"].backbone.layers),  # type: ignore[arg-type]
                3,
            ),
            "kl_from_float32_nats_per_token": float((exact_TV.exp() * (exact_TV - found_TV)).sum(-1).mean()),
            "agreement_with_float32": round(float((exact_TV.argmax(-1) == found_TV.argmax(-1)).float().mean()), 4),
            "cross_entropy": round(float(cross_entropy(found_TV, labels_T)), 4),
        }
        for way, found_TV in log_p_TV.items()
    }


@torch.no_grad()
def forward_seconds(teachers: dict[str, Decoder]) -> dict[str, float]:
    """The median time of a forward pass without its head; the teachers take turns."""
    ids_BS = rows()[:4]
    seconds: dict[str, list[float]] = {way: [] for way in teachers}
    for number in range(ROUNDS + 1):
        for way, teacher in teachers.items():
            start = time.perf_counter()
            teacher(ids_BS, head=False)
            if number:
                seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(values) for way, values in seconds.items()}


def of_students(folder: Path, seed: int, steps: int) -> dict[str, float]:
    """The held-out cross-entropy of the student of each teacher, in nats per token."""
    save_new_student(folder / "student", seed)
    losses = {}
    for way, settings in WAYS.items():
        teacher = {"teacher.model": str(TEACHER), "objective.loss": "forward_kl"}
        teacher |= {f"teacher.{key}": value for key, value in settings.items()}
        out = distill(configuration(folder, seed, steps, teacher | {"out": str(folder / f"{seed} {way}")}))
        losses[way] = values_of(out, CROSS_ENTROPY)[-1]
    return losses


if __name__ == "__main__":
    main()
