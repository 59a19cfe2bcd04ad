"""The routes of a vLLM, for `kit.stub_servers`."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.stub_servers import StubHandler, entries, load_adapter
from transformers import AutoTokenizer

from stillhouse.signals.signal_spec import DTYPES


class Vllm(StubHandler):
    def get_v1_models(self) -> None:
        limit = self.model.model.config.max_position_embeddings
        model = {"id": "t", "object": "model", "owned_by": "vllm", "max_model_len": limit}
        adapters = [{"id": name, "owned_by": "vllm", "parent": "t"} for name in self.model.adapters]
        self.reply(200, {"object": "list", "data": [model, *adapters]})

    def get_server_info(self) -> None:
        assert self.path.endswith("?config_format=json")
        device = self.model.device
        self.reply(200, {"vllm_config": {"device_config": {} if device is None else {"device": device}}})

    def get_is_paused(self) -> None:
        self.reply(200, {"is_paused": self.model.paused})

    def post_tokenize(self, body: dict[str, Any]) -> None:
        if not self.model.tokenizes:
            self.reply(404, {"detail": "Not Found"})
            return
        tokenizer = AutoTokenizer.from_pretrained(self.model.folder)
        tokens = tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        self.reply(200, {"count": len(tokens), "max_model_len": 1024, "tokens": tokens, "token_strs": None})

    def post_pooling(self, body: dict[str, Any]) -> None:
        hidden_SE = self.model.hidden_SE(body["input"]).to(DTYPES[body["embed_dtype"]])
        content = hidden_SE.contiguous().view(torch.uint8).numpy().tobytes()
        part = {
            "index": 0,
            "embed_dtype": body["embed_dtype"],
            "endianness": body["endianness"],
            "start": 0,
            "end": len(content),
            "shape": list(hidden_SE.shape),
        }
        metadata = {"id": "pooling", "model": "t", "data": [part], "usage": {"prompt_tokens": len(hidden_SE)}}
        self.reply(200, content, metadata=json.dumps(metadata))

    def post_v1_completions(self, body: dict[str, Any]) -> None:
        top_k, tokens, cap = body["prompt_logprobs"], body["prompt"], self.model.max_logprobs
        if top_k > cap:
            self.refuse(400, f"Requested prompt logprobs of {top_k}, which is greater than max allowed: {cap}")
            return
        rows: list[Any] = [None]
        for token, log_probs_V in zip(tokens[1:], self.model.log_probs_SV(tokens), strict=False):
            rows.append(
                {
                    str(number): {"logprob": value, "rank": int((log_probs_V >= value).sum()), "decoded_token": None}
                    for number, value in entries(log_probs_V, token, top_k)
                }
            )
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": rows}
        self.reply(200, {"id": "cmpl", "object": "text_completion", "model": "t", "choices": [choice]})

    def post_inference_v1_generate(self, body: dict[str, Any]) -> None:
        name, options = body.get("model"), body["sampling_params"]
        if "prompt_logprob_token_ids" in options:
            self._score_chosen(body["token_ids"], options)
            return
        if name not in (None, "t") and name not in self.model.adapters:
            self.refuse(404, f"The model `{name}` does not exist.")
            return
        completion = self.model.write(body["token_ids"], options, name if name != "t" else None)
        most = max(1, options["logprobs"])  # the sampled token, wherever it ranks, is the first of them
        content = [
            {
                "token_id": row[0][0],
                "logprob": row[0][1],
                "rank": 1,
                "top_logprobs": [{"token_id": token, "logprob": value, "rank": 1} for token, value in row[:most]],
            }
            for row in completion["rows"]
        ]
        choice = {
            "index": 0,
            "finish_reason": completion["finish"],
            "stop_reason": None,
            "token_ids": completion["ids"],
            "weight_versions": completion["spans"],
            "logprobs": {"content": content},
        }
        self.answer({"request_id": "generate-tokens-1", "model": name or "t", "choices": [choice]})

    def _score_chosen(self, tokens: list[int], options: dict[str, Any]) -> None:
        """As in the source of vLLM 0.32; its own CPU build refuses chosen ids."""
        start, ids = options["prompt_logprob_start"], np.array(options["prompt_logprob_token_ids"])
        if not self.model.scores_ids or len(ids) != len(tokens) - 1 - start:
            self.refuse(400, "prompt_logprob_token_ids requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1).")
            return
        ids_NK = torch.from_numpy(ids)
        log_probs_NK = self.model.log_probs_SV(tokens)[start:-1].gather(1, ids_NK.clamp(min=0))
        content = io.BytesIO()
        np.save(content, log_probs_NK.masked_fill(ids_NK < 0, -torch.inf).numpy(), allow_pickle=False)
        self.reply(200, {"choices": [], "prompt_token_id_logprobs": base64.b64encode(content.getvalue()).decode()})

    def post_pause(self, body: dict[str, Any]) -> None:
        assert self.path.endswith("mode=keep")
        self.model.change(paused=True)
        self.reply(200, {"status": "paused"})

    def post_resume(self, body: dict[str, Any]) -> None:
        self.model.change(paused=False)
        self.reply(200, {"status": "resumed"})

    def post_collective_rpc(self, body: dict[str, Any]) -> None:
        assert body["method"] == "reload_weights"
        fails = self.state.failing_loads > 0
        self.state.failing_loads -= fails
        self.model.load(Path(body["kwargs"]["weights_path"]), half=fails)
        if fails:
            self.refuse(500, "out of memory")
        else:
            self.reply(200, {"results": [None]})

    def post_reset_prefix_cache(self, body: dict[str, Any]) -> None:
        # with requests under way, the engine needs this to compute their keys and values again
        self.reply(200, {"success": "reset_running_requests=true" in self.path})

    def post_update_weight_version(self, body: dict[str, Any]) -> None:
        self.model.change(label=body["new_version"])
        self.reply(200, {"success": True, "new_version": body["new_version"]})

    def post_v1_load_lora_adapter(self, body: dict[str, Any]) -> None:
        if not self.model.takes_adapters:
            self.reply(404, {"detail": "Not Found"})
            return
        self.model.adapters[body["lora_name"]] = load_adapter(self.model.folder, Path(body["lora_path"]))
        self.reply(200, {})

    def post_v1_unload_lora_adapter(self, body: dict[str, Any]) -> None:
        self.model.adapters.pop(body["lora_name"], None)
        self.reply(200, {})
