"""True answers of servers, small ones of each kind, each with the client's function that reads it."""

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stillhouse.rollout.records import Sampling
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.client.served_engine import token_versions
from stillhouse.serving.client.server_api import ServerApi, ServerInfo
from stillhouse.serving.client.sglang import SglangApi
from stillhouse.serving.client.stillhouse import StillhouseApi
from stillhouse.serving.client.vllm import VllmApi
from stillhouse.serving.wire import encode_answer
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec, problem_in

Read = Callable[[HttpAnswer], object]
VOCABULARY, WIDTH, TOP = 300, 4, 2
IDS_NK = torch.tensor([[17, 4], [250, 9], [3, 8]])
DOCUMENT = DocumentRows(np.array([5, 17, 250, 3]), range(3), IDS_NK)
SAMPLING = Sampling(2, eos_ids=(7,))
METADATA = json.dumps({"data": [{"embed_dtype": "float32", "endianness": "little", "shape": [3, WIDTH]}]})
INFO = {
    "stillhouse": "0.1.0",
    "model": "t",
    "teacher": "a" * 64,
    "vocabulary": VOCABULARY,
    "width": WIDTH,
    "dtype": "float32",
    "max_tokens": 128,
    "max_request_tokens": 4096,
    "max_top_k": 64,
    "signals": ["hidden", "top_k"],
    "files": {"config.json": "b" * 64},
}


def true_answers() -> dict[str, tuple[bytes, Read]]:
    rows: list[Any] = [None, {"17": -0.5, "4": -1.0}, {"250": -0.5, "9": -1.0}, {"3": -0.1, "8": -3.0}]
    prompt = [row and {token: {"logprob": value, "rank": 1} for token, value in row.items()} for row in rows]
    tokens = [{"token_id": 5, "logprob": -0.5, "top_logprobs": [{"token_id": 5, "logprob": -0.5}]}, {}]
    tokens[1] = {"token_id": 7, "logprob": -0.1}
    choice = {"finish_reason": "stop", "token_ids": [5, 7], "logprobs": {"content": tokens}}
    choice["weight_versions"] = [{"version": "a", "start": 0, "end": 2}]
    array = io.BytesIO()
    np.save(array, np.log([[0.5, 0.2]] * 3))
    chosen = {"prompt_token_id_logprobs": base64.b64encode(array.getvalue()).decode()}
    meta = {
        "input_token_logprobs": [[None, 5, None], [-0.5, 17, None], [-0.5, 250, None], [-0.1, 3, None]],
        "input_top_logprobs": [row and [[value, int(token), None] for token, value in row.items()] for row in rows],
    }
    generated = {
        "output_ids": [5, 7],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 7},
            "output_token_logprobs": [[-0.5, 5, None], [-0.1, 7, None]],
            "output_top_logprobs": [[[-0.5, 5, None]], None],
            "weight_version": "a",
        },
    }
    hidden = {"meta_info": {"hidden_states": [np.arange(12.0).reshape(3, WIDTH).tolist()]}}
    read_json: dict[str, tuple[Any, Read]] = {
        "vLLM's prompt log-probabilities": ({"choices": [{"prompt_logprobs": prompt}]}, scores(VllmApi(), "top_k")),
        "vLLM's chosen scores": (chosen, scores(VllmApi(), "chosen")),
        "vLLM's completion": ({"model": "m", "choices": [choice]}, completion(VllmApi())),
        "vLLM's models": ({"data": [{"id": "m", "max_model_len": 64}]}, described(VllmApi())),
        "SGLang's log-probabilities": ({"meta_info": meta}, scores(SglangApi(), "top_k")),
        "SGLang's hidden states": (
            hidden,
            scores(SglangApi(), "hidden", DocumentRows(DOCUMENT.tokens[:3], range(3))),
        ),
        "SGLang's completion": (generated, completion(SglangApi())),
        "our description": (INFO, described(StillhouseApi())),
        "what a route returns": (
            {"success": True, "status": "paused"},
            lambda answer: (answer.json(), answer.message),
        ),
    }
    spec, top_k = spec_of("hidden"), spec_of("top_k")
    log_probs_NK = torch.tensor([[-0.5, -1.5]] * 3)
    tail_N = torch.log(1 - log_probs_NK.exp().sum(1))
    signal = {"ids": IDS_NK.int(), "log_probs": log_probs_NK, "tail_log_prob": tail_N}
    states = encode_answer("a" * 64, spec, [{"hidden": torch.randn(3, WIDTH)}])
    pooled = np.arange(12, dtype=np.float32).tobytes()
    return {name: (json.dumps(content).encode(), read) for name, (content, read) in read_json.items()} | {
        "our hidden states": (states, scores(StillhouseApi(), "hidden")),
        "our ids": (encode_answer("a" * 64, top_k, [signal]), scores(StillhouseApi(), "top_k")),
        "vLLM's hidden states": (pooled, scores(VllmApi(), "hidden")),
    }


def spec_of(kind: Any) -> SignalSpec:
    return SignalSpec("hidden", "float32") if kind == "hidden" else SignalSpec(kind, "float32", TOP, 1.0)


def scores(api: ServerApi, kind: str, document: DocumentRows = DOCUMENT) -> Read:
    spec = spec_of(kind)
    [call] = api.calls(ServerInfo("", "t", identity="a" * 64), spec, WIDTH, [document])

    def read(answer: HttpAnswer) -> object:
        parts = call.parse(answer)
        if problem := problem_in(spec, VOCABULARY, parts[0]):
            raise ValueError(problem)
        return parts

    return read


def completion(api: ServerApi) -> Read:
    def read(answer: HttpAnswer) -> object:
        top, generated = api.top_log_probs(answer), api.parse(answer)
        generated.require(SAMPLING, SAMPLING.max_new_tokens, VOCABULARY)
        versions_N = token_versions(generated.spans, {"a": 3}, len(generated.ids))
        return None if versions_N is None else (top, generated.completion(versions_N))

    return read


def described(api: ServerApi) -> Read:
    def read(answer: HttpAnswer) -> object:
        return api.describe(lambda path, body: answer, "http://a:1"), api.other_version(lambda path, body: answer)

    return read
