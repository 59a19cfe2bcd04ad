"""HTTP servers on loopback that write completions as vLLM, SGLang and `stillhouse serve --generate` do.

A real model writes the tokens, so that log-probabilities are true. A server can be killed in the middle of anything,
and starts again with its first weights, as a real one does.
"""

import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import torch
from kit.stub_engines import Handler
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

#: gets the handler and the true answer, and answers in its own way
Fault = Callable[["WriterHandler", dict[str, Any]], None]

#: transformers replaces methods of its classes while it loads a model, and two threads at once leave them replaced
LOADING = threading.Lock()


class KilledError(Exception):
    """The server has been killed while it answered."""


class Writer:
    """The engine behind a server.

    processed: log-probabilities are those among the tokens that can be drawn, after the temperature (vLLM's
    processed_logprobs); otherwise those of the logits. after_temperature: those of the logits after the temperature
    (SGLang, Stillhouse). keeps_head: loading does not change the output head. device: the one that /server_info
    names; None: it names none. seconds: for each token. mixes_weights: a completion that is begun with later weights
    than the first ones has its second token when newer weights have come, or after five seconds. takes_adapters: as
    with --enable-lora. tokenizes: it has loaded its tokenizer. progress: by the seed of a request, how many tokens of
    it have been written.
    """

    def __init__(self, folder: Path, **options: Any):
        with LOADING:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.processed: bool = options.get("processed", False)
        self.after_temperature: bool = options.get("after_temperature", False)
        self.device: str | None = options.get("device", "cpu")
        self.keeps_head: bool = options.get("keeps_head", False)
        self.seconds: float = options.get("seconds", 0.0)
        self.mixes_weights: bool = options.get("mixes_weights", False)
        self.takes_adapters: bool = options.get("takes_adapters", False)
        self.tokenizer = AutoTokenizer.from_pretrained(folder) if options.get("tokenizes") else None
        self.folder, self.label, self.paused, self.dead, self.aborted = folder, "default", False, False, 0
        self.adapters: dict[str, Any] = {}
        self.progress: dict[int, int] = {}
        self.first_label = ""
        self.changed = threading.Condition()

    def load(self, folder: Path, *, half: bool = False) -> None:
        """half: only some of the tensors, as when a load fails in the middle."""
        found = {
            name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()
        }
        names = sorted(found)[: len(found) // 2 if half else None]
        if self.keeps_head:
            names = [each for each in names if each != "lm_head.weight"]
        with self.changed, torch.no_grad():
            own = self.model.state_dict()
            for name in names:
                own[name].copy_(found[name])

    def write(self, tokens: list[int], options: dict[str, Any], adapter: str | None = None) -> dict[str, Any]:
        """Draw tokens one by one, each with the weights of its moment. options: as vLLM names them."""
        generator = torch.Generator().manual_seed(options["seed"])
        written: list[int] = []
        rows: list[list[tuple[int, float]]] = []
        spans: list[dict[str, Any]] = []
        finish, aborts = "length", self.aborted
        while len(written) < options["max_tokens"]:
            time.sleep(self.seconds)
            with self.changed:
                if self.mixes_weights and len(written) == 1 and spans[0]["version"] != self.first_label:
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
                    logits_V = model(torch.tensor([tokens + written])).logits[0, -1].float()
                label = self.label
                self.first_label = self.first_label or label
            log_probs_V, draws_V = self._log_probs(logits_V, options)
            token = int(torch.multinomial(draws_V.exp(), 1, generator=generator))
            best = log_probs_V.topk(options["logprobs"]).indices.tolist() if options["logprobs"] else []
            rows.append([(each, float(log_probs_V[each])) for each in dict.fromkeys([token, *best])])
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": len(written), "end": len(written)})
            written.append(token)
            self.progress[options["seed"]] = len(written)
            spans[-1]["end"] = len(written)
            if token in options["stop_token_ids"]:
                finish = "stop"
                break
        return {"ids": written, "rows": rows, "spans": spans, "finish": finish}

    def _log_probs(self, logits_V: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The log-probabilities that are answered, and those of the draws."""
        if options["temperature"] == 0:  # the likeliest token, with its log-probability among all of them
            log_probs_V = logits_V.log_softmax(-1)
            return log_probs_V, log_probs_V.where(log_probs_V == log_probs_V.max(), -math.inf)
        scaled_V = logits_V / options["temperature"]
        draws_V = scaled_V
        if options["top_k"] > 0:
            draws_V = scaled_V.masked_fill(scaled_V < scaled_V.topk(options["top_k"]).values[-1], -math.inf)
        draws_V = draws_V.log_softmax(-1)
        if self.processed:
            return draws_V, draws_V
        return (scaled_V if self.after_temperature else logits_V).log_softmax(-1), draws_V


class WriterHandler(Handler):
    """writer: of the process that this connection was made to."""

    server_state: ClassVar["WriterServer"]
    writer: ClassVar[Writer]

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.partition("?")[0]
        state.asked.append((self.path, body))
        if (hook := state.before.pop(path, None)) is not None:
            hook()
        if self.writer.dead:  # this connection was made to the process that was killed
            self.reset()
            return
        route = getattr(self, "post" + path.replace("/", "_"), None)
        try:
            if route is None:
                self.reply(404, {"detail": "Not Found"})
            else:
                route(body)
        except KilledError:
            self.reset()

    def do_GET(self) -> None:
        route = getattr(self, "get" + self.path.partition("?")[0].replace("/", "_"), None)
        if self.writer.dead:
            self.reset()
        elif route is None:
            self.reply(404, {"detail": "Not Found"})
        else:
            route()

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def answer(self, content: dict[str, Any]) -> None:
        """The answer of a completion, or a fault in its place."""
        faults = self.server_state.faults
        if faults:
            faults.pop(0)(self, content)
        else:
            self.reply(200, content)


class VllmWriter(WriterHandler):
    def get_v1_models(self) -> None:
        self.reply(200, {"object": "list", "data": [{"id": "t", "object": "model"}]})

    def get_server_info(self) -> None:
        assert self.path.endswith("?config_format=json")
        device = self.writer.device
        self.reply(200, {"vllm_config": {"device_config": {} if device is None else {"device": device}}})

    def get_is_paused(self) -> None:
        self.reply(200, {"is_paused": self.writer.paused})

    def post_inference_v1_generate(self, body: dict[str, Any]) -> None:
        name = body.get("model")
        if name not in (None, "t") and name not in self.writer.adapters:
            self.reply(404, {"error": {"message": f"The model `{name}` does not exist.", "code": 404}})
            return
        options = body["sampling_params"]
        found = self.writer.write(body["token_ids"], options, name if name != "t" else None)
        most = max(1, options["logprobs"])  # the drawn token, wherever it ranks, is the first of them
        content = [
            {
                "token_id": row[0][0],
                "logprob": row[0][1],
                "rank": 1,
                "top_logprobs": [{"token_id": each, "logprob": value, "rank": 1} for each, value in row[:most]],
            }
            for row in found["rows"]
        ]
        choice = {
            "index": 0,
            "finish_reason": found["finish"],
            "stop_reason": None,
            "token_ids": found["ids"],
            "weight_versions": found["spans"],
            "logprobs": {"content": content},
        }
        self.answer({"request_id": "generate-tokens-1", "model": name or "t", "choices": [choice]})

    def post_tokenize(self, body: dict[str, Any]) -> None:
        if self.writer.tokenizer is None:
            self.reply(404, {"detail": "Not Found"})
            return
        ids = self.writer.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        self.reply(200, {"count": len(ids), "max_model_len": 1024, "tokens": ids, "token_strs": None})

    def post_pause(self, body: dict[str, Any]) -> None:
        assert self.path.endswith("mode=keep")
        self._pause(True)
        self.reply(200, {"status": "paused"})

    def post_resume(self, body: dict[str, Any]) -> None:
        self._pause(False)
        self.reply(200, {"status": "resumed"})

    def _pause(self, paused: bool) -> None:
        with self.writer.changed:
            self.writer.paused = paused
            self.writer.changed.notify_all()

    def post_collective_rpc(self, body: dict[str, Any]) -> None:
        assert body["method"] == "reload_weights"
        state = self.server_state
        fails = state.failing_loads > 0
        state.failing_loads -= fails
        self.writer.load(Path(body["kwargs"]["weights_path"]), half=fails)
        if fails:
            self.reply(500, {"error": {"message": "out of memory", "code": 500}})
        else:
            self.reply(200, {"results": [None]})

    def post_reset_prefix_cache(self, body: dict[str, Any]) -> None:
        # with requests under way, the engine needs this to compute their keys and values again
        self.reply(200, {"success": "reset_running_requests=true" in self.path})

    def post_update_weight_version(self, body: dict[str, Any]) -> None:
        with self.writer.changed:
            self.writer.label = body["new_version"]
            self.writer.changed.notify_all()
        self.reply(200, {"success": True, "new_version": body["new_version"]})

    def post_v1_load_lora_adapter(self, body: dict[str, Any]) -> None:
        if not self.writer.takes_adapters:
            self.reply(404, {"detail": "Not Found"})
            return
        from peft import PeftModel

        with LOADING:
            base = AutoModelForCausalLM.from_pretrained(self.writer.folder, dtype=torch.float32)
            self.writer.adapters[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"]).eval()
        self.reply(200, {})

    def post_v1_unload_lora_adapter(self, body: dict[str, Any]) -> None:
        self.writer.adapters.pop(body["lora_name"], None)
        self.reply(200, {})


class StillhouseWriter(VllmWriter):
    """It has none of vLLM's routes for weights."""

    post_collective_rpc = post_pause = post_resume = None  # type: ignore[assignment]
    post_reset_prefix_cache = post_update_weight_version = None  # type: ignore[assignment]

    def post_v1_weights(self, body: dict[str, Any]) -> None:
        self.writer.load(Path(body["folder"]))
        self.writer.label = body["version"]
        self.reply(200, {"version": body["version"]})


class SglangWriter(WriterHandler):
    def post_generate(self, body: dict[str, Any]) -> None:
        given = body["sampling_params"]
        options = {
            "max_tokens": given["max_new_tokens"],
            "temperature": given["temperature"],
            "top_k": given["top_k"],
            "seed": given["sampling_seed"],
            "stop_token_ids": given["stop_token_ids"],
            "logprobs": body["top_logprobs_num"],
        }
        found = self.writer.write(body["input_ids"], options)
        reason: dict[str, Any] = {"type": found["finish"]}
        if found["finish"] == "stop":
            reason["matched"] = found["ids"][-1]
        meta = {
            "finish_reason": reason,
            "output_token_logprobs": [[row[0][1], row[0][0], None] for row in found["rows"]],
            "output_top_logprobs": [[[value, each, None] for each, value in row] for row in found["rows"]],
            "weight_version": self.writer.label,  # of the moment at which the answer is made
        }
        self.answer({"text": "", "output_ids": found["ids"], "meta_info": meta})

    def post_pause_generation(self, body: dict[str, Any]) -> None:
        with self.writer.changed:
            self.writer.paused = True
            self.writer.aborted += body["mode"] == "abort"
            self.writer.changed.notify_all()
        self.reply(200, {"status": "ok"})

    def post_continue_generation(self, body: dict[str, Any]) -> None:
        with self.writer.changed:
            self.writer.paused = False
            self.writer.changed.notify_all()
        self.reply(200, {"status": "ok"})

    def post_update_weights_from_disk(self, body: dict[str, Any]) -> None:
        if self.server_state.failing_loads:
            self.reply(400, {"success": False, "message": "no such file"})
            return
        self.writer.load(Path(body["model_path"]))
        self.writer.label = body["weight_version"]
        self.reply(200, {"success": True, "message": "done"})


class WriterServer:
    """A server that can be killed and started again at the same address.

    faults: the next answers to completions. before: by path, what happens once before its next request is processed.
    failing_loads: so many loads of weights fail in the middle. asked: all requests.
    """

    def __init__(self, kind: type[WriterHandler], folder: Path, **options: Any):
        self.kind, self.folder, self.options, self.port = kind, folder, options, 0
        self.faults: list[Fault] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.failing_loads = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.writer = writer = Writer(self.folder, **self.options)
        bound = type("Bound", (self.kind,), {"server_state": self, "writer": writer})
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), bound)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def kill(self) -> None:
        with self.writer.changed:
            self.writer.dead = True
            self.writer.changed.notify_all()
        self.server.shutdown()
        self.server.server_close()

    def restart(self) -> None:
        self.kill()
        self.start()


@contextmanager
def writing(kind: type[WriterHandler], folder: Path, **options: Any) -> Iterator[WriterServer]:
    server = WriterServer(kind, folder, **options)
    try:
        yield server
    finally:
        server.kill()
