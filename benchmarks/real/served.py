"""A recovered student, exported and served by a stock vLLM on a CPU, beside transformers.

    python -m benchmarks.real.served --vllm .vllm/bin/python

Greedy answers to the fixed questions, and the log-probabilities of held-out text, in float32 and in bfloat16. The
differences of log-probabilities are from transformers in float32; those of transformers in bfloat16 are the bound
that rounding sets.
"""

import argparse
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.engines_server import vllm
from benchmarks.real.figures import PROMPTS
from benchmarks.real.material import held_out_pieces
from benchmarks.real.page import SERVED, write_page
from benchmarks.real.runs import Run
from benchmarks.record import write_result
from stillhouse.tools.export_run import ExportSettings, export_run

NEW_TOKENS, TEXT_TOKENS = 24, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", required=True, help="The Python of an environment with vLLM.")
    parser.add_argument("--work", type=Path, default=Path("runs/real"))
    arguments = parser.parse_args()
    if SERVED.exists():
        print(f"{SERVED} exists")
        return
    run = Run("recovery", "most", 0, arguments.work).model().parent
    with TemporaryDirectory(dir=arguments.work) as folder:
        exported = Path(folder) / "exported"
        export_run(run, exported, None, ExportSettings())
        write_result(SERVED, {"figures": measure(exported, arguments.vllm)})
    write_page()


def measure(exported: Path, python: str) -> dict[str, Any]:
    """For each dtype: equal greedy tokens of vLLM and transformers, and differences of log-probabilities."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    texts = [ids[:TEXT_TOKENS] for ids in tokenizer(held_out_pieces())["input_ids"]]
    exact = transformers_log_probs(exported, texts, torch.float32)
    figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        expected = greedy(exported, prompts, dtype)
        name = str(dtype).removeprefix("torch.")
        with vllm(python, exported, "--dtype", name) as url:
            answers = [
                request(url, exported.name, ids, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)["token_ids"]
                for ids in prompts
            ]
            log_probs = torch.cat([vllm_log_probs(url, exported.name, ids) for ids in texts])
        pairs = list(zip(chain(*answers), chain(*expected), strict=True))
        differences = {"vllm": (log_probs - exact).abs()}
        if dtype != torch.float32:
            differences["transformers"] = (transformers_log_probs(exported, texts, dtype) - exact).abs()
        figures[name] = {"tokens": len(pairs), "same": sum(one == other for one, other in pairs)}
        figures[name] |= {
            f"{who}_{kind}": value.item()
            for who, difference in differences.items()
            for kind, value in (("largest", difference.max()), ("mean", difference.mean()))
        }
    return figures


@torch.no_grad()
def greedy(folder: Path, prompts: list[list[int]], dtype: torch.dtype) -> list[list[int]]:
    """The greedy continuations by transformers, each of `NEW_TOKENS` tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return [model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist() for ids in prompts]


@torch.no_grad()
def transformers_log_probs(folder: Path, texts: list[list[int]], dtype: torch.dtype) -> Tensor:
    """The log-probabilities of all tokens of the texts but the first of each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    rows = []
    for ids in texts:
        log_probs_TV = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        rows.append(log_probs_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(rows)


def vllm_log_probs(url: str, model: str, ids: list[int]) -> Tensor:
    """The log-probabilities of all tokens but the first."""
    entries = request(url, model, ids, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
    return torch.tensor([entry[str(token)]["logprob"] for entry, token in zip(entries[1:], ids[1:], strict=True)])


def request(url: str, model: str, ids: list[int], **settings: Any) -> dict[str, Any]:
    """The first choice of a greedy completion."""
    body = {"model": model, "prompt": ids, "temperature": 0, "return_token_ids": True, **settings}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    choice: dict[str, Any] = answer["choices"][0]
    return choice


if __name__ == "__main__":
    main()
