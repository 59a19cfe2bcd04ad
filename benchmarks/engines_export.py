"""What `stillhouse export` writes, in a real vLLM: its greedy tokens and those of plain transformers.

One model is a student whose weights are all trained, written in small shards, one is an adapter merged into its base,
and one is a student with MTP layers, which are left out. Called by engines.py.
"""

from pathlib import Path
from typing import Any

import httpx2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.engines_server import vllm
from stillhouse.tools.export_run import ExportSettings, export_run

NEW_TOKENS = 24
PROMPTS = ("def read(path", "class Server:", "The arguments are", "import ", "Return the", "x = [1, 2", "None", "\n")
SHARD = 100_000  # bytes: several files


def measure_export(folder: Path, python: str, runs: dict[str, Path]) -> dict[str, Any]:
    """For each run: how many greedy tokens vLLM writes, and how many of them transformers writes, too."""
    figures = {}
    for name, run in runs.items():
        exported = folder / f"exported-{name}"
        export_run(run, exported, None, ExportSettings(shard_bytes=SHARD, mtp=name != "mtp"))
        tokenizer = AutoTokenizer.from_pretrained(exported)
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
        expected = _by_transformers(exported, prompts)
        with vllm(python, exported) as url:
            generated = _by_vllm(url, exported.name, prompts)
        pairs = [pair for of_prompt in zip(generated, expected, strict=True) for pair in zip(*of_prompt, strict=True)]
        figures[name] = {
            "files": len(list(exported.glob("*.safetensors"))),
            "tokens": len(pairs),
            "same": sum(one == other for one, other in pairs),
        }
    return figures


def _by_transformers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generated = []
    for ids in prompts:
        prompt_1S = torch.tensor([ids])
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        output = model.generate(prompt_1S, attention_mask=torch.ones_like(prompt_1S), **options)
        generated.append(output[0, len(ids) :].tolist())
    return generated


def _by_vllm(url: str, model: str, prompts: list[list[int]]) -> list[list[int]]:
    request = {
        "model": model,
        "prompt": prompts,
        "max_tokens": NEW_TOKENS,
        "min_tokens": NEW_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = httpx2.post(f"{url}/v1/completions", json=request, timeout=300).raise_for_status().json()
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
