"""HTTP servers on loopback that answer as vLLM and SGLang do, with a real model behind them.

The forms are those of recorded answers (tests/kit/engines), which `test_teacher_engines.py` compares with these. The
real engine is tried by `make test-engines`.
"""

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine:
    """max_logprobs: the cap on `prompt_logprobs`. has_tokenizer: whether /tokenize answers. scores_ids: whether it
    scores chosen ids.
    """

    def __init__(self, folder: Path, *, max_logprobs: int = 64, has_tokenizer: bool = True, scores_ids: bool = True):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
        self.max_logprobs, self.scores_ids = max_logprobs, scores_ids
        self.lock = threading.Lock()
        self.asked: list[tuple[str, Any]] = []

    def hidden_SE(self, tokens: list[int]) -> Tensor:
        with self.lock, torch.no_grad():
            found: Tensor = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return found

    def log_probs_SV(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return self.model.lm_head(self.hidden_SE(tokens)).float().log_softmax(-1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: ClassVar[Engine]

    def do_GET(self) -> None:
        self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.engine.asked.append((self.path, body))
        route = getattr(self, "post" + self.path.replace("/", "_"), None)
        if route is None:
            self.reply(404, {"detail": "Not Found"})
        else:
            route(body)

    def reply(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


class Vllm(Handler):
    def do_GET(self) -> None:
        if self.path == "/v1/models":
            limit = self.engine.model.config.max_position_embeddings
            model = {"id": "t", "object": "model", "owned_by": "vllm", "max_model_len": limit}
            self.reply(200, {"object": "list", "data": [model]})
        else:
            self.reply(404, {"detail": "Not Found"})

    def post_tokenize(self, body: dict[str, Any]) -> None:
        if self.engine.tokenizer is None:
            self.reply(404, {"detail": "Not Found"})
            return
        tokens = self.engine.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        self.reply(200, {"count": len(tokens), "tokens": tokens})

    def post_pooling(self, body: dict[str, Any]) -> None:
        hidden_SE = self.engine.hidden_SE(body["input"]).to(DTYPES[body["embed_dtype"]])
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
        top_k, tokens, cap = body["prompt_logprobs"], body["prompt"], self.engine.max_logprobs
        if top_k > cap:
            message = f"Requested prompt logprobs of {top_k}, which is greater than max allowed: {cap}"
            self.reply(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
            return
        log_probs_SV = self.engine.log_probs_SV(tokens)
        rows: list[Any] = [None]
        for token, log_probs_V in zip(tokens[1:], log_probs_SV, strict=False):
            best = log_probs_V.topk(top_k).indices.tolist()
            rows.append({str(each): _entry(log_probs_V, each) for each in dict.fromkeys([token, *best])})
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": rows}
        self.reply(200, {"id": "cmpl", "object": "text_completion", "model": "t", "choices": [choice]})

    def post_inference_v1_generate(self, body: dict[str, Any]) -> None:
        """As in the source of vLLM 0.32; its own CPU build refuses chosen ids."""
        tokens, options = body["token_ids"], body["sampling_params"]
        start, ids = options["prompt_logprob_start"], np.array(options["prompt_logprob_token_ids"])
        if not self.engine.scores_ids or len(ids) != len(tokens) - 1 - start:
            message = "prompt_logprob_token_ids requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1)."
            self.reply(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
            return
        ids_NK = torch.from_numpy(ids)
        found_NK = self.engine.log_probs_SV(tokens)[start:-1].gather(1, ids_NK.clamp(min=0))
        content = io.BytesIO()
        np.save(content, found_NK.masked_fill(ids_NK < 0, -torch.inf).numpy(), allow_pickle=False)
        self.reply(200, {"choices": [], "prompt_token_id_logprobs": base64.b64encode(content.getvalue()).decode()})


class Sglang(Handler):
    def do_GET(self) -> None:
        if self.path == "/get_model_info":
            self.reply(200, {"model_path": "t", "is_generation": True})
        else:
            self.reply(404, {"detail": "Not Found"})

    def post_generate(self, body: dict[str, Any]) -> None:
        tokens = body["input_ids"]
        meta: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": 0, "weight_version": "default"}
        if body.get("return_hidden_states"):
            meta["hidden_states"] = [self.engine.hidden_SE(tokens).tolist()]
        else:
            log_probs_SV = self.engine.log_probs_SV(tokens)
            actual: list[Any] = [[None, tokens[0], None]]
            best: list[Any] = [None]
            for token, log_probs_V in zip(tokens[1:], log_probs_SV, strict=False):
                actual.append([float(log_probs_V[token]), token, None])
                values, ids = log_probs_V.topk(body["top_logprobs_num"])
                best.append([[value, each, None] for value, each in zip(values.tolist(), ids.tolist(), strict=True)])
            meta |= {"input_token_logprobs": actual, "input_top_logprobs": best}
        self.reply(200, {"text": "", "meta_info": meta})


def _entry(log_probs_V: Tensor, token: int) -> dict[str, Any]:
    rank = int((log_probs_V >= log_probs_V[token]).sum())
    return {"logprob": float(log_probs_V[token]), "rank": rank, "decoded_token": None}


@contextmanager
def serving(kind: type[Handler], engine: Engine) -> Iterator[str]:
    """The URL of an engine's server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (kind,), {"engine": engine}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
