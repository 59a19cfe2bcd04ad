"""HTTP servers on loopback that answer as vLLM and SGLang do, with a real model.

They score tokens and write completions, so that log-probabilities are true. A server can be killed in the middle of
anything, and starts again with its first weights, as a real one does. The forms are those of recorded answers
(tests/kit/engines), with which `test_teacher_engines.py` and `test_rollout_engines.py` compare these. The real engine
is tried by `make test-engines`.
"""

import base64
import io
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.signals.signal_spec import DTYPES

#: gets the handler and the true answer, and answers in its own way
Fault = Callable[[Any, Any], None]

#: transformers replaces methods of its classes while it loads a model, and two threads at once leave them replaced
LOADING = threading.Lock()


class KilledError(Exception):
    """The server has been killed while it answered."""


def load_model(folder: Path) -> Any:
    with LOADING:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class StubModel:
    """The model behind a server.

    max_logprobs: the cap on `prompt_logprobs`. scores_ids: it scores chosen ids. tokenizes: /tokenize answers.
    processed: log-probabilities are those among the tokens that can be sampled, after the temperature (vLLM's
    processed_logprobs); otherwise those of the logits. after_temperature: those of the logits after the temperature
    (SGLang, Stillhouse). keeps_head: loading does not change the output head. device: the one that /server_info
    names; None: it names none. seconds: for each token. mixes_weights: a completion that is begun with later weights
    than the first ones has its second token when newer weights have come, or after five seconds. takes_adapters: as
    with --enable-lora. progress: by the seed of a request, how many tokens of it have been written.
    """

    max_logprobs = 64
    scores_ids = tokenizes = True
    processed = after_temperature = keeps_head = mixes_weights = takes_adapters = False
    device: str | None = "cpu"
    seconds = 0.0

    def __init__(self, folder: Path, **options: Any):
        self.model = load_model(folder)
        self.folder, self.label, self.paused, self.dead, self.aborted = folder, "default", False, False, 0
        self.adapters: dict[str, Any] = {}
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
                model = self.model if adapter is None else self.adapters[adapter]
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


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        pass


def busy(handler: QuietHandler, answer: Any) -> None:
    handler.reply(429, {"error": {"message": "the queue is full"}}, Retry_After="0")


def broken(handler: QuietHandler, answer: Any) -> None:
    handler.reply(500, {"error": {"message": "out of memory"}})


def reset(handler: QuietHandler, answer: Any) -> None:
    handler.reset()


class StubHandler(QuietHandler):
    """A route is a method: `post_v1_completions` answers POST /v1/completions.

    state: the server. model: of the process that this connection was made to.
    """

    state: ClassVar["StubServer"]
    model: ClassVar[StubModel]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.partition("?")[0]
        self.state.requests.append((self.path, body))
        if (hook := self.state.before.pop(path, None)) is not None:
            hook()
        self._route("post" + path.replace("/", "_"), body)

    def do_GET(self) -> None:
        self._route("get" + self.path.partition("?")[0].replace("/", "_"))

    def _route(self, name: str, *arguments: Any) -> None:
        route = getattr(self, name, None)
        try:
            if self.model.dead:  # this connection was made to the process that was killed
                raise KilledError
            if route is None:
                self.reply(404, {"detail": "Not Found"})
            else:
                route(*arguments)
        except KilledError:
            self.reset()

    def refuse(self, status: int, message: str) -> None:
        self.reply(status, {"error": {"message": message, "type": "BadRequestError", "code": status}})

    def answer(self, content: dict[str, Any]) -> None:
        """The answer of a completion, or a fault in its place."""
        if self.state.faults:
            self.state.faults.pop(0)(self, content)
        else:
            self.reply(200, content)


class Vllm(StubHandler):
    def get_v1_models(self) -> None:
        limit = self.model.model.config.max_position_embeddings
        model = {"id": "t", "object": "model", "owned_by": "vllm", "max_model_len": limit}
        self.reply(200, {"object": "list", "data": [model]})

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
        written = self.model.write(body["token_ids"], options, name if name != "t" else None)
        most = max(1, options["logprobs"])  # the sampled token, wherever it ranks, is the first of them
        content = [
            {
                "token_id": row[0][0],
                "logprob": row[0][1],
                "rank": 1,
                "top_logprobs": [{"token_id": token, "logprob": value, "rank": 1} for token, value in row[:most]],
            }
            for row in written["rows"]
        ]
        choice = {
            "index": 0,
            "finish_reason": written["finish"],
            "stop_reason": None,
            "token_ids": written["ids"],
            "weight_versions": written["spans"],
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
        from peft import PeftModel

        base = load_model(self.model.folder)
        self.model.adapters[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"]).eval()
        self.reply(200, {})

    def post_v1_unload_lora_adapter(self, body: dict[str, Any]) -> None:
        self.model.adapters.pop(body["lora_name"], None)
        self.reply(200, {})


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
        written = self.model.write(tokens, options)
        reason: dict[str, Any] = {"type": written["finish"]}
        if written["finish"] == "stop":
            reason["matched"] = written["ids"][-1]
        meta = {
            "finish_reason": reason,
            "output_token_logprobs": [[row[0][1], row[0][0], None] for row in written["rows"]],
            "output_top_logprobs": [[[value, token, None] for token, value in row] for row in written["rows"]],
            "weight_version": self.model.label,  # of the moment at which the answer is made
        }
        self.answer({"text": "", "output_ids": written["ids"], "meta_info": meta})

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


class StubServer:
    """A server that can be killed and started again at the same address.

    faults: the next answers to completions. before: by path, what happens once before its next request is processed.
    failing_loads: so many loads of weights fail in the middle. requests: all of them, by path.
    """

    def __init__(self, kind: type[StubHandler], folder: Path, **options: Any):
        self.kind, self.folder, self.options, self.port = kind, folder, options, 0
        self.faults: list[Fault] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.failing_loads = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.model = StubModel(self.folder, **self.options)
        bound = type("Bound", (self.kind,), {"state": self, "model": self.model})
        self.server = listen(bound, self.port)
        self.port = self.server.server_port

    def kill(self) -> None:
        self.model.change(dead=True)
        self.server.shutdown()
        self.server.server_close()

    def restart(self) -> None:
        self.kill()
        self.start()


def listen(handler: type[QuietHandler], port: int = 0) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


@contextmanager
def stub_server(kind: type[StubHandler], folder: Path, **options: Any) -> Iterator[StubServer]:
    server = StubServer(kind, folder, **options)
    try:
        yield server
    finally:
        server.kill()
