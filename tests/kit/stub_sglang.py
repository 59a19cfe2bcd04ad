"""The routes of an SGLang, for `kit.stub_servers`."""

import json
from pathlib import Path
from typing import Any

from kit.stub_servers import KilledError, StubHandler, entries, load_adapter


class Sglang(StubHandler):
    """The routes of adapters are those of SGLang 0.5.23, from its source."""

    def get_get_model_info(self) -> None:
        self.reply(200, {"model_path": "t", "is_generation": True})

    def get_v1_models(self) -> None:
        adapters = [{"id": name, "root": str(self.model.paths[name]), "parent": "t"} for name in self.model.adapters]
        self.reply(200, {"object": "list", "data": [{"id": "t", "root": "t", "parent": None}, *adapters]})

    def post_generate(self, body: dict[str, Any]) -> None:
        sampling, tokens = body["sampling_params"], body["input_ids"]
        if not sampling["max_new_tokens"]:
            self._score(tokens, body)
            return
        options = {
            "max_tokens": sampling["max_new_tokens"],
            "temperature": sampling["temperature"],
            "top_k": sampling["top_k"],
            "seed": sampling["sampling_seed"],
            "stop_token_ids": sampling["stop_token_ids"],
            "logprobs": body["top_logprobs_num"],
        }
        adapter = body.get("lora_path")
        if adapter is not None and not self._has_adapter(adapter):
            return
        with self.model.using(adapter):
            completion = self.model.write(tokens, options, adapter)
        reason: dict[str, Any] = {"type": completion["finish"]}
        if completion["finish"] == "stop":
            reason["matched"] = completion["ids"][-1]
        meta = {
            "finish_reason": reason,
            "output_token_logprobs": [[row[0][1], row[0][0], None] for row in completion["rows"]],
            "output_top_logprobs": [[[value, token, None] for token, value in row] for row in completion["rows"]],
            "weight_version": self.model.label,  # of the moment at which the answer is made
        }
        self.answer({"text": "", "output_ids": completion["ids"], "meta_info": meta})

    def _score(self, tokens: list[int], body: dict[str, Any]) -> None:
        meta: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": 0, "weight_version": "default"}
        if body.get("return_hidden_states"):
            meta["hidden_states"] = [self.model.hidden_SE(tokens).tolist()]
        else:
            actual: list[Any] = [[None, tokens[0], None]]
            top: list[Any] = [None]
            for token, log_probs_V in zip(tokens[1:], self.model.log_probs_SV(tokens), strict=False):
                actual.append([float(log_probs_V[token]), token, None])
                best = int(log_probs_V.argmax())
                top.append([[lp, each, None] for each, lp in entries(log_probs_V, best, body["top_logprobs_num"])])
            meta |= {"input_token_logprobs": actual, "input_top_logprobs": top}
        self.reply(200, {"text": "", "meta_info": meta})

    def post_pause_generation(self, body: dict[str, Any]) -> None:
        self.model.change(paused=True, aborted=self.model.aborted + (body["mode"] == "abort"))
        self.reply(200, {"status": "ok"})

    def post_continue_generation(self, body: dict[str, Any]) -> None:
        self.model.change(paused=False)
        self.reply(200, {"status": "ok"})

    def post_update_weight_version(self, body: dict[str, Any]) -> None:
        aborted = self.model.aborted + body.get("abort_all_requests", True)
        self.model.change(label=body["new_version"], aborted=aborted)
        text = f"Weight version updated to {body['new_version']}"
        self.reply(200, {"success": True, "message": text, "new_version": body["new_version"]})

    def post_load_lora_adapter(self, body: dict[str, Any]) -> None:
        name, path = body["lora_name"], Path(body["lora_path"])
        if not self.model.takes_adapters:
            self._answer_adapters("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        elif name in self.model.adapters:
            self._answer_adapters(f"Failed to load LoRA adapter {name} because it is already loaded")
        elif (rank := json.loads((path / "adapter_config.json").read_text())["r"]) > self.model.max_lora_rank:
            self._answer_adapters(
                f"LoRA adapter {name} with rank {rank} is incompatible with the current LoRA memory pool "
                "configuration. Please ensure that the LoRA adapter's rank is within the configured `--max-lora-rank`"
            )
        else:
            self.model.adapters[name], self.model.paths[name] = load_adapter(self.model.folder, path), path
            self._answer_adapters()

    def post_unload_lora_adapter(self, body: dict[str, Any]) -> None:
        """The adapter gets no new requests, and is freed when those that use it have ended."""
        name, model = body["lora_name"], self.model
        if name not in model.adapters or name in model.unloading:
            self._answer_adapters(f"LoRA with name {name} does not exist. Loaded LoRAs: {model.adapters.keys()}")
            return
        model.unloading.add(name)
        with model.changed:
            model.changed.wait_for(lambda: not model.uses[name] or model.dead)
            if model.dead:
                raise KilledError
            del model.adapters[name]
            model.unloading.remove(name)
        self._answer_adapters()

    def _has_adapter(self, name: str) -> bool:
        """Whether a request may use an adapter; an adapter that was unloaded is loaded again."""
        model = self.model
        if not model.takes_adapters:
            problem = f"LoRA adapter '{name}' was requested, but LoRA is not enabled."
        elif name not in model.paths:
            problem = f"Got LoRA adapter that has never been loaded: {name}"
        elif not model.paths[name].is_dir():
            problem = f"Failed to implicitly load LoRA adapter {name}: no such folder"
        else:
            if name not in model.adapters:
                model.adapters[name] = load_adapter(model.folder, model.paths[name])
            return True
        self.reply(400, {"error": {"message": problem}})
        return False

    def _answer_adapters(self, problem: str = "") -> None:
        loaded = {name: str(path) for name, path in self.model.paths.items() if name in self.model.adapters}
        content = {"success": not problem, "error_message": problem, "loaded_adapters": loaded}
        self.reply(400 if problem else 200, content)

    def post_update_weights_from_disk(self, body: dict[str, Any]) -> None:
        self.model.load(Path(body["model_path"]))
        self.model.label = body["weight_version"]
        self.reply(200, {"success": True, "message": "done"})
