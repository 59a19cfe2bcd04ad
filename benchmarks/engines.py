"""A real, unpatched vLLM on a CPU as a teacher, as the writer of completions, and as both at once in on-policy runs.

As a teacher, a run from it is compared with the same run with the teacher in the job. What it writes is measured in
engines_completions.py, whole on-policy runs in engines_rollouts.py, and exported models in engines_export.py.

Two servers of the shipped teacher are started: one for pooling, which gives hidden states, and one that generates
text, which gives the top ids. Each run trains a small student for 50 steps. The differences of the losses and
of the final weights are printed, and written to benchmarks/results/engines-<date>.json. The exit code is 1 if hidden
states in float32 do not give the losses of the teacher in the job to 1e-6, or if another check fails.

    make test-engines         or  python -m benchmarks.engines --vllm .vllm/bin/python
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from benchmarks.engines_completions import MODEL, measure_completions
from benchmarks.engines_export import measure_export
from benchmarks.engines_rollouts import measure_rollouts, problems_of
from benchmarks.engines_server import DEVELOPMENT, HIDDEN_STATES, vllm
from benchmarks.record import result_file, write_result
from benchmarks.training_runs import LOSS, run_config, values_of
from stillhouse.run.run import distill
from stillhouse.tools.demo.corpus import collect_split
from stillhouse.tools.demo.student import TEACHER

STEPS, TOP_K, MAX_TOKENS, TEMPERATURE = 50, 32, 64, 2.0
#: the largest difference of a step's loss, in nats, between hidden states in float32 and the teacher in the job
SAME = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", required=True, help="the Python of an environment with vLLM")
    arguments = parser.parse_args()
    version = subprocess.check_output([arguments.vllm, "-c", "import vllm; print(vllm.__version__)"], text=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        completions = measure_completions(
            folder, lambda *options: vllm(arguments.vllm, folder / MODEL, *options, settings=DEVELOPMENT)
        )
        rollouts = measure_rollouts(folder, arguments.vllm)
        figures = measure(folder, arguments.vllm)
        # a CPU build of vLLM has no attention for the small student's heads of width 16
        same_model = dict.fromkeys(("student.model", "teacher.model"), str(folder / "teacher")) | {
            "objective.loss": "cross_entropy"
        }
        trained(folder, "weights", **same_model)
        trained(folder, "adapter", **same_model, **{"student.adapter.r": 4})
        trained(folder, "mtp", **same_model, **{"student.mtp.depths": 1})
        exported = measure_export(
            folder, arguments.vllm, {kind: folder / kind for kind in ("weights", "adapter", "mtp")}
        )
    result = {
        "theme": "engines",
        "vllm": version.strip().splitlines()[-1],
        "steps": STEPS,
        **figures,
        "completions": completions,
        "rollouts": rollouts,
        "exported": exported,
    }
    print(json.dumps(result, indent=1))
    write_result(result_file("engines"), result, "cpu")
    problems = [f"rollouts, {name}: {problem}" for name in rollouts for problem in problems_of(name, rollouts[name])]
    if not figures["hidden_float32"]["largest_loss_difference"] <= SAME:
        problems.append(f"hidden states of vLLM do not give the losses of the teacher in the job to {SAME:g}")
    problems += [
        f"exported, {name}: other tokens" for name, counts in exported.items() if counts["same"] < counts["tokens"]
    ]
    if problems:
        sys.exit("\n".join(problems))


def write_inputs(folder: Path) -> None:
    """The shipped teacher, a small student with its tokenizer, and texts."""
    shutil.copytree(TEACHER, folder / "teacher")
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=json.loads((folder / "teacher/config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "student")
    texts = [document.text[:200] for document in collect_split("student")[:400]]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def measure(folder: Path, python: str) -> dict[str, Any]:
    with (
        vllm(python, folder / "teacher", *HIDDEN_STATES) as pooling,
        vllm(python, folder / "teacher", "--max-logprobs", "64") as generating,
    ):
        top_k = {"teacher.url": generating, "teacher.signal": "top_k", "teacher.top_k": TOP_K}
        hidden = {"teacher.url": pooling, "teacher.model": str(folder / "teacher")}
        in_job = trained(folder, "in the job", **{"teacher.model": str(folder / "teacher")})
        return {
            "hidden_float32": difference(trained(folder, "float32", **hidden), in_job),
            "hidden_bfloat16": difference(
                trained(folder, "bfloat16", **hidden, **{"teacher.dtype": "bfloat16"}), in_job
            ),
            f"top_{TOP_K}_final_loss": trained(folder, "top_k", **top_k, **{"objective.temperature": 1.0})[0][-1],
            "in_the_job_final_loss": in_job[0][-1],
        }


def trained(folder: Path, name: str, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step of a run, and the final weights."""
    defaults = {
        "student.model": str(folder / "student"),
        "teacher.dtype": "float32",
        "data.train": str(folder / "train.jsonl"),
        "data.eval": 0.0,
        "data.max_tokens": MAX_TOKENS,
        "objective.loss": "forward_kl",
        "objective.temperature": TEMPERATURE,
        "train.tokens_per_step": 8 * MAX_TOKENS,
        "train.micro_batch_tokens": 4 * MAX_TOKENS,
        "train.steps": STEPS,
        "train.learning_rate": 1e-3,
        "train.precision": "fp32",
        "device": "cpu",
        "out": str(folder / name),
    }
    out = distill(run_config(defaults | settings))
    return values_of(out, LOSS), load_file(out / "model/model.safetensors")


def difference(
    trained: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]
) -> dict[str, float]:
    weights = {
        name: (weight - expected[1][name]).norm() / expected[1][name].norm() for name, weight in trained[1].items()
    }
    return {
        "largest_loss_difference": max(abs(a - b) for a, b in zip(trained[0], expected[0], strict=True)),
        "largest_relative_weight_difference": float(torch.stack(list(weights.values())).max()),
    }


if __name__ == "__main__":
    main()
