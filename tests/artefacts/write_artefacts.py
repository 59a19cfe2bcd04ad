"""Writes small files of the present version of stillhouse, which later versions must read or refuse by name.

    PYTHONPATH=.:tests python tests/artefacts/write_artefacts.py

They are written once per release, to a folder named after the version, and never again: `test_artefacts.py` reads the
folders of all versions. All paths in them are relative, so that they work in any place.

    student/ teacher/ train.jsonl eval.jsonl    the inputs of the run
    run.yaml                                    its configuration
    run/                                        the run's folder as a kill after its second step of four leaves it
    caches/hidden/ caches/top_k/                caches of the teacher's signals for the same data
    wire/                                       requests to `stillhouse serve`, and its answers
    expected.json                               what the run computes after the kill, and on which machine
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from kit.runs import metrics, run, write_texts
from kit.serving import Server
from kit.toy_tokenizer import toy_backend, toy_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

import stillhouse
from benchmarks.unchanged.records import machine
from stillhouse.serving import JSON, SAFETENSORS
from stillhouse.serving.wire import encode_request
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

ARTEFACTS = Path(__file__).parent
SIZE: dict[str, Any] = {
    **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "initializer_range": 0.25},
    **{"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
RUN = """\
student: {model: student}
teacher: {model: teacher}
data: {train: train.jsonl, eval: eval.jsonl, max_tokens: 32}
objective: {loss: 0.3*cross_entropy + 0.7*jsd(0.5)}
train:
  tokens_per_step: 128
  micro_batch_tokens: 64
  steps: 4
  learning_rate: 0.01
  precision: fp32
eval: {every: 2}
checkpoint: {every: 2, keep: 4}
device: cpu
out: run
"""
#: the overrides with which the run reads each cache
FROM_CACHE = {
    name: ["teacher.model=null", f"teacher.cache=caches/{name}", f"out=from_{name}"] for name in ("hidden", "top_k")
}
CACHES = {
    "hidden": ["--signal", "hidden", "--dtype", "float32"],
    "top_k": ["--signal", "top_k", "--top-k", "4"],
    "sampled": ["--signal", "sampled"],
}
#: (file, path, content type) of each recorded request; the answer has the suffix .answer
REQUESTS = [
    ("hidden.safetensors", "/v1/score", SAFETENSORS),
    ("top_k.json", "/v1/score", JSON),
    ("completions.json", "/v1/completions", JSON),
]
DOCUMENTS = [[5, 70, 71, 72, 73], [1, 90, 91]]


def main() -> None:
    folder = ARTEFACTS / stillhouse.__version__
    if folder.exists():
        sys.exit(f"{folder} exists: the files of a release are written once")
    folder.mkdir()
    os.chdir(folder)
    save("student", LlamaConfig, seed=1)
    save("teacher", Qwen3Config, seed=2)
    write_texts(Path("train.jsonl"), records=24, seed=0)
    write_texts(Path("eval.jsonl"), records=4, seed=1)
    Path("run.yaml").write_text(RUN, encoding="utf-8")
    run("distill", "run.yaml")
    for name, options in CACHES.items():
        run("cache", "run.yaml", "--out", f"caches/{name}", *options)
    expected = {"machine": machine(), "run": computed(Path("run"))}
    for name, overrides in FROM_CACHE.items():
        run("distill", "run.yaml", *overrides)
        expected[f"from_{name}"] = computed(Path(f"from_{name}"))
        shutil.rmtree(f"from_{name}")
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    kill_after_the_second_step(Path("run"))
    write_wire(Path("wire"))


def save(name: str, kind: type[PreTrainedConfig], seed: int) -> None:
    tokenizer = toy_tokenizer(backend=toy_backend(vocabulary=270))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**SIZE, vocab_size=len(tokenizer)))
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)


def computed(out: Path) -> dict[str, Any]:
    """Return losses, gradient norms, the evaluation after the last step, and a hash of the final weights."""
    lines = metrics(out)
    steps = [line for line in lines if "train/gradient_norm" in line]
    return {
        "losses": [line["loss/total_nats_per_token"] for line in steps],
        "gradient_norms": [line["train/gradient_norm"] for line in steps],
        "evaluation": {name: value for name, value in lines[-1].items() if name.startswith("eval/")},
        "weights_sha256": hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest(),
    }


def kill_after_the_second_step(out: Path) -> None:
    """Leave of a complete run what a process that is killed during its third step leaves."""
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    for name in ("hashes.json", "report.html", "tokens.json"):
        (out / name).unlink()
    for lock in Path().rglob(".lock"):
        lock.unlink()
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= 2]
    (out / "metrics.jsonl").write_text("".join(kept), encoding="utf-8")
    environment = json.loads((out / "environment.json").read_text(encoding="utf-8"))
    (out / "environment.json").write_text(
        json.dumps(environment | {"platform": "Linux", "cpu": "", "commit": ""}, indent=2) + "\n", encoding="utf-8"
    )


def write_wire(folder: Path) -> None:
    folder.mkdir()
    documents = [DocumentRows(torch.tensor(tokens).numpy(), range(len(tokens))) for tokens in DOCUMENTS]
    bodies = [
        encode_request(SignalSpec("hidden", "float32", None, None), documents),
        json.dumps({"token_ids": DOCUMENTS, "signal": "top_k", "top_k": 4}).encode(),
        json.dumps({"prompt": DOCUMENTS, "max_tokens": 1, "prompt_logprobs": 2, "temperature": 1.0}).encode(),
    ]
    with Server(Path("teacher"), "--dtype", "float32") as server:
        (folder / "info.json").write_text(json.dumps(server.info(), indent=1) + "\n", encoding="utf-8")
        for (file, path, kind), body in zip(REQUESTS, bodies, strict=True):
            answer = server.client.post(path, content=body, headers={"content-type": kind})
            assert answer.status_code == 200, answer.text
            (folder / file).write_bytes(body)
            (folder / f"{file}.answer").write_bytes(answer.content)


if __name__ == "__main__":
    main()
