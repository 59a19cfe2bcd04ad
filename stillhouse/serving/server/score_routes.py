"""The routes of a teacher: for its signals, its output head and the other files of its folder.

`POST /v1/completions` follows the OpenAI API, with vLLM's `prompt_logprobs` at temperature 1. A teacher generates no
text: `max_tokens` must be 0 or 1, and with 1, the answer has the most probable token. A request with an unknown or
unsupported field is refused.
"""

import time
import uuid
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.data.render.tokenizers import tokenize
from stillhouse.serving import JSON, SAFETENSORS
from stillhouse.serving.server.application import BINARY, Application, Parsed
from stillhouse.serving.server.gate import RequestError, errors, parse_json, refused, usage
from stillhouse.serving.server.role import Limits
from stillhouse.serving.wire import (
    HEAD_FILE,
    FirstWrong,
    ScoreBody,
    StrictBody,
    TokenId,
    decode_request,
    encode_answer,
)
from stillhouse.signals.extract import Ranked
from stillhouse.signals.scorer import ScoreRequest
from stillhouse.signals.signal_spec import DocumentRows


def add_teacher_routes(
    application: Application, folder: Path, tokenizer: PreTrainedTokenizerBase, identity: str
) -> None:
    """Add a teacher's routes to an application.

    folder: the folder of the files that clients can download. identity: the hash that identifies the teacher.
    """
    role, limits, names = application.role, application.role.limits, application.role.info["files"]

    @application.api.get("/v1/head", responses=_file("the teacher's output head, as a safetensors file"))
    async def head() -> FileResponse:
        return FileResponse(folder / HEAD_FILE, media_type=SAFETENSORS)

    @application.api.get("/v1/files/{name}", responses=_file("a file of the teacher's folder") | errors(404))
    async def files(name: str) -> FileResponse:
        """Return a configuration or tokenizer file. The field `files` of `/v1/info` lists the names."""
        if name not in names or name == HEAD_FILE:
            raise RequestError(
                HTTPStatus.NOT_FOUND, "no such file: expected a name from the field `files` of /v1/info", param="name"
            )
        return FileResponse(folder / name, media_type="application/octet-stream")

    def score(content: bytes, kind: str) -> Parsed:
        """Return the teacher's signals for token ids."""
        try:
            signal, documents = decode_request(content, kind, limits.max_sequences)
        except ValueError as error:
            raise refused(str(error)) from error
        if signal.kind not in (signals := role.info["signals"]):
            raise refused(f"signal '{signal.kind}': expected one of {', '.join(signals)}", "signal")
        if signal.top_k is not None and signal.top_k > limits.most_ids:
            raise refused(f"top_k={signal.top_k}: expected at most {limits.most_ids}", "top_k")
        limits.check_documents([document.tokens for document in documents], "token_ids")
        for document in documents:
            if document.ids_NK is None or not document.ids_NK.numel():
                continue
            if (wrong := limits.id_outside(document.ids_NK.numpy(), -1)) is not None:
                raise refused(f"ids: got {wrong}, expected −1 (for no id), or 0 to {limits.vocabulary - 1}", "ids")
        parts = [ScoreRequest(document, signal) for document in documents]
        return parts, partial(encode_answer, identity, signal)

    def complete(content: bytes, _: str) -> Parsed:
        """Return log-probabilities of prompts in vLLM's format."""
        body = parse_json(content, CompletionBody, named=1)
        if body.max_tokens not in (0, 1):
            only = "expected 0 or 1, because this server scores text and generates none"
            raise refused(f"max_tokens={body.max_tokens}: {only}", "max_tokens")
        if body.logprobs is not None and body.max_tokens == 0:
            raise refused("logprobs with max_tokens=0: expected max_tokens=1, or prompt_logprobs instead", "logprobs")
        application.require_model(body.model)
        parts = completion_parts(body, tokenizer, limits)
        return parts, partial(completion_answer, body, role.name, parts, tokenizer)

    def tensor_bytes(results: Sequence[dict[str, Tensor]]) -> int:
        return sum(tensor.nbytes for tensors in results for tensor in tensors.values())

    schemas = {JSON: ScoreBody.model_json_schema(), SAFETENSORS: BINARY}
    answers = _file("the signals, as a safetensors file (see stillhouse/serving/wire.py)")
    application.add_operation("/v1/score", score, schemas, tensor_bytes, SAFETENSORS, answers)
    schemas = {JSON: CompletionBody.model_json_schema()}
    application.add_operation("/v1/completions", complete, schemas, tensor_bytes)


def _file(description: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": description, "content": {SAFETENSORS: {"schema": BINARY}}}}


#: the smallest log-probability in an answer, as in vLLM, because JSON has no infinity
LOWEST = -9999.0


class CompletionBody(StrictBody):
    """A request for prompt log-probabilities.

    Fields with one allowed value exist for clients that always send them.
    """

    model: str | None = Field(default=None, description="the name of this server's teacher, or null")
    prompt: str | FirstWrong[str] | FirstWrong[TokenId] | FirstWrong[FirstWrong[TokenId]]
    max_tokens: int = Field(default=16, description="0 or 1; with 1, the answer has the top token")
    prompt_logprobs: int | None = Field(default=None, ge=0, description="the number of top ids per prompt token")
    logprobs: int | None = Field(default=None, ge=0, description="the number of top ids for the answer's token")
    temperature: float | None = Field(
        default=None, ge=0, description="no effect: the temperature is 1, and the answer has the top token"
    )
    add_special_tokens: bool = Field(default=True, description="whether a prompt that is text gets special tokens")
    return_token_ids: bool = Field(default=False)
    return_tokens_as_token_ids: bool = Field(default=False, description="whether logprobs has token_id:5, not text")
    n: Literal[1] = 1
    echo: Literal[False] = False
    stream: Literal[False] = False
    seed: int | None = Field(default=None, description="no effect: nothing is sampled")
    user: str | None = Field(default=None, description="no effect")


def completion_parts(body: CompletionBody, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> list[ScoreRequest]:
    """Make the parts of a request, one for each prompt. Raises RequestError if the request exceeds a limit."""
    most = limits.most_ids
    for name, count in (("prompt_logprobs", body.prompt_logprobs), ("logprobs", body.logprobs)):
        if count is not None and count > most:
            what = "prompt logprobs" if name == "prompt_logprobs" else "sample logprobs"
            raise refused(
                f"Requested {what} of {count}, which is greater than max allowed: {most} (parameter={name}, "
                f"value={count})",
                name,
            )
    if isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int):
        limits.check_count(len(body.prompt), "prompt")  # checked before millions of texts are tokenized
    prompt = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    prompts: list[list[int]] = [tokens for tokens in prompt if isinstance(tokens, list)]
    if prompt and isinstance(prompt[0], int):
        prompts = [[token for token in prompt if isinstance(token, int)]]
    elif prompt and isinstance(prompt[0], str):
        try:
            prompts = tokenize(tokenizer, [str(text) for text in prompt], special=body.add_special_tokens)
        except ValueError as error:
            raise refused(str(error), "prompt") from error
    if not prompts:
        raise refused("prompt: expected at least one prompt", "prompt")
    limits.check_documents(prompts, "prompt")
    wanted = Ranked(max(body.prompt_logprobs or 0, body.logprobs or 0, body.max_tokens))
    # without prompt_logprobs, only the distribution after a prompt's last token is needed
    starts = [0 if body.prompt_logprobs is not None else len(prompt) - 1 for prompt in prompts]
    return [
        ScoreRequest(DocumentRows(np.array(prompt, dtype=np.int32), range(start, len(prompt))), wanted)
        for prompt, start in zip(prompts, starts, strict=True)
    ]


def completion_answer(
    body: CompletionBody,
    model: str,
    parts: Sequence[ScoreRequest],
    tokenizer: PreTrainedTokenizerBase,
    results: Sequence[dict[str, Tensor]],
) -> bytes:
    """Encode the answer as JSON. results: the tensors of each part."""
    choices = []
    for index, (part, tensors) in enumerate(zip(parts, results, strict=True)):
        tokens, log_probs = part.document.tokens.tolist(), None
        generated = tensors["ids"][-1, :1].tolist() if body.max_tokens else []
        if body.logprobs is not None:
            ids, values = tensors["ids"][-1].tolist(), tensors["log_probs"][-1].clamp_min(LOWEST).tolist()
            as_ids = body.return_tokens_as_token_ids
            names = [f"token_id:{token}" if as_ids else tokenizer.decode([token]) for token in ids]
            top = dict(zip(names[: max(body.logprobs, 1)], values, strict=False))
            log_probs = {"text_offset": [0], "token_logprobs": values[:1], "tokens": names[:1], "top_logprobs": [top]}
        choice = {
            "index": index,
            "text": tokenizer.decode(generated) if generated else "",
            "logprobs": log_probs,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": generated if body.return_token_ids else None,
            "prompt_logprobs": _prompt_logprobs(body.prompt_logprobs, tokens, tensors),
            "prompt_token_ids": tokens if body.return_token_ids else None,
            "routed_experts": None,
        }
        choices.append(choice)
    content = {
        "id": f"cmpl-{uuid.uuid4().hex[:16]}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage(sum(part.tokens for part in parts), len(parts) * body.max_tokens),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return bytes(JSONResponse(content).body)


def _prompt_logprobs(
    count: int | None, tokens: Sequence[int], tensors: dict[str, Tensor]
) -> list[dict[str, dict[str, Any]] | None] | None:
    """Return the log-probabilities and ranks of each prompt token and of the top ids; None for the first token."""
    if count is None:
        return None
    entries: list[dict[str, dict[str, Any]] | None] = [None]
    rows = zip(
        tokens[1:],
        *(tensors[name][:-1].tolist() for name in ("log_prob", "rank")),
        *(tensors[name][:-1, :count].tolist() for name in ("ids", "log_probs")),
        strict=True,
    )
    for token, log_prob, rank, top_ids, top_log_probs in rows:
        top = zip(top_ids, top_log_probs, range(1, len(top_ids) + 1), strict=True)
        entry: dict[str, dict[str, Any]] = {}
        for entry_id, entry_log_prob, entry_rank in [(token, log_prob, rank), *top]:
            values = {"logprob": max(entry_log_prob, LOWEST), "rank": entry_rank, "decoded_token": None}
            entry.setdefault(str(entry_id), values)
        entries.append(entry)
    return entries
