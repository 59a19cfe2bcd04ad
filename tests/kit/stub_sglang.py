"""The routes of an SGLang, for `kit.stub_servers`."""

from pathlib import Path
from typing import Any

from kit.stub_model import entries
from kit.stub_servers import StubHandler


class Sglang(StubHandler):
    def get_get_model_info(self) -> None:
        self.reply(200, {"model_path": "t", "is_generation": True})

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
        completion = self.model.write(tokens, options)
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
                top.append(
                    [[lp, number, None] for number, lp in entries(log_probs_V, best, body["top_logprobs_num"])]
                )
            meta |= {"input_token_logprobs": actual, "input_top_logprobs": top}
        self.reply(200, {"text": "", "meta_info": meta})

    def post_pause_generation(self, body: dict[str, Any]) -> None:
        self.model.change(paused=True, aborted=self.model.aborted + (body["mode"] == "abort"))
        self.reply(200, {"status": "ok"})

    def post_continue_generation(self, body: dict[str, Any]) -> None:
        self.model.change(paused=False)
        self.reply(200, {"status": "ok"})

    def post_update_weights_from_disk(self, body: dict[str, Any]) -> None:
        self.model.load(Path(body["model_path"]))
        self.model.label = body["weight_version"]
        self.reply(200, {"success": True, "message": "done"})
