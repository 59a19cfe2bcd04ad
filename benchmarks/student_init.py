"""Students that begin with layers of the teacher, against students that begin with random weights.

    python -m benchmarks.student_init --seeds 0 1 2

The teacher is the demo's, with 5 layers. The students have 3 layers of the same width and learn by forward KL, with
equal data, order, tokens and learning rate. A part of the held-out text is used, so that the whole takes a quarter of
an hour on one core. Writes benchmarks/results/student_init-<date>.json after each seed.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from benchmarks.record import result_file, write_result
from benchmarks.training_runs import metrics, run_config, student_settings
from stillhouse.run.run import distill
from stillhouse.tools.demo.corpus import collect_split, write_jsonl
from stillhouse.tools.demo.student import TEACHER

LAYERS, TOKENS, HELD_OUT = 3, 512, 2
STARTS: dict[str, dict[str, Any]] = {
    "random": {"from": "random"},
    **{layers: {"from": "teacher", "layers": layers} for layers in ("every 2", "first 3", "last 3")},
}
KEYS = ("eval/cross_entropy", "eval/forward_kl", "eval/agreement")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1e-3)
    arguments = parser.parse_args()
    settings = {"layers": LAYERS, "steps": arguments.steps, "tokens_per_step": TOKENS, "loss": "forward_kl"}
    settings |= {"learning_rate": arguments.rate, "held_out_documents": HELD_OUT}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for seed in arguments.seeds:
            runs += [trained(Path(name), start, seed, arguments.rate, arguments.steps) for start in STARTS]
            result = {"theme": "student_init", "summary": summarised(runs), "settings": settings, "runs": runs}
            write_result(result_file("student_init"), result)
    print(json.dumps(summarised(runs), indent=1))


def prepare(folder: Path) -> None:
    """Write the data and the student's folder, which has no weights."""
    write_jsonl(collect_split("student"), folder / "train.jsonl")
    write_jsonl(collect_split("held_out")[:HELD_OUT], folder / "held_out.jsonl")
    config = AutoConfig.from_pretrained(TEACHER)
    config.num_hidden_layers, config.layer_types = LAYERS, config.layer_types[:LAYERS]
    config.save_pretrained(folder / "student")
    AutoTokenizer.from_pretrained(TEACHER).save_pretrained(folder / "student")


def trained(folder: Path, start: str, seed: int, rate: float, steps: int) -> dict[str, Any]:
    """Train one student and return its held-out figures at each evaluation."""
    out = folder / f"{start} {seed} {rate}"
    settings = student_settings(folder, seed, steps, max_tokens=256, tokens_per_step=TOKENS) | {
        "student.init": STARTS[start],
        "teacher.model": str(TEACHER),
        "teacher.dtype": "float32",
        "train.learning_rate": rate,
        "eval.every": steps,
        "checkpoint.keep": 1,
        "out": str(out),
    }
    distill(run_config(settings))
    curve = [
        {"step": line["step"], "tokens": line["tokens"], **{key: round(line[key], 4) for key in KEYS}}
        for line in metrics(out)
        if KEYS[0] in line
    ]
    return {"start": start, "seed": seed, "curve": curve}


def summarised(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """For each start, the figures before training and at the end: the mean over the seeds, and each seed's."""
    summary: dict[str, Any] = {}
    for start in STARTS:
        curves = [run["curve"] for run in runs if run["start"] == start]
        ends = {key: [curve[-1][key] for curve in curves] for key in KEYS}
        summary[start] = {
            "forward_kl_before": round(statistics.mean(curve[0]["eval/forward_kl"] for curve in curves), 4),
            **{f"{key.removeprefix('eval/')}_mean": round(statistics.mean(end), 4) for key, end in ends.items()},
            "forward_kl": ends["eval/forward_kl"],
        }
    return summary


if __name__ == "__main__":
    main()
