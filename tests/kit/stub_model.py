"""The model of a stub server: it scores tokens and writes completions, so that log-probabilities are true."""

import math
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

#: transformers replaces methods of its classes while it loads a model, and two threads at once leave them replaced
LOADING = threading.Lock()


class KilledError(Exception):
    """The server has been killed while it answered."""


def load_model(folder: Path) -> Any:
    with LOADING:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_adapter(folder: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(folder), adapter).eval()


class StubModel:
    """The model behind a server.

    max_logprobs: the cap on `prompt_logprobs`. scores_ids: it scores chosen ids. tokenizes: /tokenize answers.
    processed: log-probabilities are those among the tokens that can be sampled, after the temperature (vLLM's
    processed_logprobs); otherwise those of the logits. after_temperature: those of the logits after the temperature
    (SGLang, Stillhouse). keeps_head: loading does not change the output head. device: the one that /server_info
    names; None: it names none. seconds: for each token. mixes_weights: a completion that is begun with later weights
    than the first ones has its second token when newer weights have come, or after five seconds. takes_adapters: as
    with --enable-lora. max_lora_rank: that of SGLang. adapters, paths: the adapters that are loaded, and the folders
    of all that have been; uses: the number of requests that use each of them; unloading: those that are being
    unloaded. progress: by the seed of a request, how many tokens of it have been written.
    """

    max_logprobs = 64
    scores_ids = tokenizes = True
    processed = after_temperature = keeps_head = mixes_weights = takes_adapters = False
    device: str | None = "cpu"
    seconds = 0.0
    max_lora_rank = 64

    def __init__(self, folder: Path, **options: Any):
        self.model = load_model(folder)
        self.folder, self.label, self.paused, self.dead, self.aborted = folder, "default", False, False, 0
        self.adapters: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.uses = Counter[str]()
        self.unloading: set[str] = set()
        self.progress: dict[int, int] = {}
        self.first_label = ""
        self.changed = threading.Condition()
        vars(self).update(options)

    def hidden_SE(self, tokens: list[int]) -> Tensor:
        with self.changed, torch.no_grad():
            hidden: Tensor = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return hidden

    def log_probs_SV(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return self.model.lm_head(self.hidden_SE(tokens)).float().log_softmax(-1)

    def change(self, **state: Any) -> None:
        with self.changed:
            vars(self).update(state)
            self.changed.notify_all()

    def use(self, adapter: str | None, count: int) -> None:
        with self.changed:
            if adapter is not None:
                self.uses[adapter] += count
                self.changed.notify_all()

    def load(self, folder: Path, *, half: bool = False) -> None:
        """half: only some of the tensors, as when a load fails in the middle."""
        tensors = {
            name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()
        }
        names = sorted(tensors)[: len(tensors) // 2 if half else None]
        with self.changed, torch.no_grad():
            state = self.model.state_dict()
            for name in names:
                if not (self.keeps_head and name == "lm_head.weight"):
                    state[name].copy_(tensors[name])

    def write(self, tokens: list[int], options: dict[str, Any], adapter: str | None = None) -> dict[str, Any]:
        """Sample tokens one by one, each with the weights of its moment. options: as vLLM names them."""
        generator = torch.Generator().manual_seed(options["seed"])
        ids: list[int] = []
        rows: list[list[tuple[int, float]]] = []
        spans: list[dict[str, Any]] = []
        finish, aborts = "length", self.aborted
        model = self.model if adapter is None else self.adapters[adapter]  # until its end, whatever is unloaded
        while len(ids) < options["max_tokens"] and finish == "length":
            time.sleep(self.seconds)
            with self.changed:
                if self.mixes_weights and len(ids) == 1 and spans[0]["version"] != self.first_label:
                    begun = spans[0]["version"]
                    self.changed.wait_for(lambda: self.label != begun or self.dead, timeout=5)  # noqa: B023
                self.changed.wait_for(lambda: not self.paused or self.dead or self.aborted > aborts)
                if self.dead:
                    raise KilledError
                if self.aborted > aborts:
                    finish = "abort"
                    break
                with torch.no_grad():
                    logits_V = model(torch.tensor([tokens + ids])).logits[0, -1].float()
                label = self.label
                self.first_label = self.first_label or label
            log_probs_V, sampled_V = self._log_probs(logits_V, options)
            token = int(torch.multinomial(sampled_V.exp(), 1, generator=generator))
            rows.append(entries(log_probs_V, token, options["logprobs"]))
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": len(ids), "end": len(ids)})
            ids.append(token)
            self.progress[options["seed"]] = spans[-1]["end"] = len(ids)
            finish = "stop" if token in options["stop_token_ids"] else "length"
        return {"ids": ids, "rows": rows, "spans": spans, "finish": finish}

    def _log_probs(self, logits_V: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The log-probabilities that are answered, and those by which tokens are sampled."""
        if options["temperature"] == 0:  # the top token, with its log-probability among all of them
            log_probs_V = logits_V.log_softmax(-1)
            return log_probs_V, log_probs_V.where(log_probs_V == log_probs_V.max(), -math.inf)
        scaled_V = logits_V / options["temperature"]
        sampled_V = scaled_V
        if options["top_k"] > 0:
            sampled_V = scaled_V.masked_fill(scaled_V < scaled_V.topk(options["top_k"]).values[-1], -math.inf)
        sampled_V = sampled_V.log_softmax(-1)
        if self.processed:
            return sampled_V, sampled_V
        return (scaled_V if self.after_temperature else logits_V).log_softmax(-1), sampled_V


def entries(log_probs_V: Tensor, token: int, count: int | None) -> list[tuple[int, float]]:
    """A token and the top tokens, with their log-probabilities."""
    top = log_probs_V.topk(count).indices.tolist() if count else []
    return [(number, float(log_probs_V[number])) for number in dict.fromkeys([token, *top])]
