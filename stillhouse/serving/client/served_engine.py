"""Completions from servers that have the student's weights. The version of the weights is known for each token."""

import json
import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents
from stillhouse.data.media import MediaProcessor
from stillhouse.display import escaped
from stillhouse.rollout.published_folder import published_folder
from stillhouse.rollout.records import Completion, CompletionInbox, GenerationRequest, Sampling
from stillhouse.serving import JSON, SAFETENSORS
from stillhouse.serving.client.http_client import HttpAnswer, bytes_of_json
from stillhouse.serving.client.pool import AskAgainError, RefusedError, ServerPool, ServerRequest
from stillhouse.serving.client.served_weights import ServedWeights, ServerState
from stillhouse.serving.client.server_api import Published, ServerApi, VersionSpan

#: the most requests that one server gets at a time; the server batches as many as it can and queues the others
IN_FLIGHT = 256
#: the same limit if prompts may have images, because such requests are large
IMAGES_IN_FLIGHT = 16
#: the maximum number of seconds that a run waits at its end until the servers have dropped its adapter
SECONDS_TO_DROP = 2.0
#: stands for the version of a server whose weights have become unknown since the server was chosen for a request
UNKNOWN_WEIGHTS = Published(-1, Path(), "", "model")
#: the most bytes of a token in an answer: its text, its bytes, its log-probability and perhaps its version
COMPLETION_TOKEN_BYTES = 4096


class ServedEngine:
    """Servers of one kind that generate the student's completions (a RemoteEngine).

    vocabulary: the number of rows of the student's head. An answer with an id outside the vocabulary is refused. A
        prompt with such an id is not sent, because the id would stop vLLM.
    timeout: futures raise ServerError if no server has answered for this number of seconds. A single answer has the
        same limit.
    warn: prints a line when a server fails, or answers again after a failure. token: the servers' bearer token.
    update_timeout: a server that has not loaded new weights after these seconds counts as unreachable.
    keep_weights: whether the servers keep their own weights, such as a teacher's. If False, `update_weights` must be
        called before `generate`.
    probes: prompts that each server completes after it has loaded weights (see `weights.probed`).
    processor: the processor of the prompts' images. image_prompts: the prompts that are checked against the servers'
        limits for images; None skips this check.
    run: the identity of the run whose published weights are accepted; "" accepts the weights of any run. Adapters
        that an earlier process of this run has left on the servers are dropped.
    other_samplings: the samplings that some requests have instead of `sampling`. The servers' log-probabilities are
        also proved for these samplings.

    Raises ValueError for a server whose log-probabilities cannot be used for training. With `keep_weights`, the
    log-probabilities are not checked; instead, ValueError is raised if the servers have different weights.
    """

    def __init__(
        self,
        urls: Sequence[str],
        sampling: Sampling,
        api: ServerApi,
        *,
        vocabulary: int,
        timeout: float,
        update_timeout: float = math.inf,
        warn: Callable[[str], None] = lambda line: None,
        keep_weights: bool = False,
        probes: Sequence[GenerationRequest] = (GenerationRequest(0, np.zeros(1, np.int32), 0),),
        run: str = "",
        processor: MediaProcessor | None = None,
        image_prompts: Documents | None = None,
        other_samplings: Sequence[Sampling] = (),
        token: str | None = None,
    ):
        self._sampling, self._api, self._vocabulary = sampling, api, vocabulary
        run_prefix = f"stillhouse-{run}-" if run else ""
        self._run, self._prefix, self._processor = run, run_prefix + secrets.token_hex(4), processor
        self._pool = ServerPool(
            urls,
            timeout,
            warn,
            model="student",
            key="rollout.timeout",
            token=token,
            answer_seconds=timeout,
            in_flight=IN_FLIGHT if processor is None else IMAGES_IN_FLIGHT,
        )
        self.weights = ServedWeights(
            self._pool,
            api,
            processor,
            (sampling, *other_samplings),
            vocabulary,
            probes,
            warn,
            keep=keep_weights,
            update_timeout=update_timeout,
            run_prefix=run_prefix,
        )
        with ExitStack() as stack:
            stack.callback(self._pool.close)
            if processor is not None and image_prompts is not None:
                for server in self._pool.servers:
                    api.require_images(self._pool.asker(server.url), server.url, processor, image_prompts)
            self.weights.connect()
            stack.pop_all()

    def generate(
        self, requests: Sequence[GenerationRequest], inbox: CompletionInbox | None = None
    ) -> list[Future[Completion]]:
        """Request completions, and return at once. Raises ValueError for ids outside the vocabulary.

        inbox: also receives (number of the request, completion or error) for each future.
        """
        newest = self.weights.newest
        if newest is None:
            raise ValueError("the servers have no version of the student yet: expected update_weights first")
        names_adapter = self.weights.adapter_of(newest) is not None
        calls = [self._call(request, names_adapter) for request in requests]
        futures = [self._pool.submit(call) for call in calls]

        def deliver(number: int, future: Future[Completion]) -> None:
            if inbox is not None and not future.cancelled():
                inbox.put((number, future.exception() or future.result()))

        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(partial(deliver, request.number))
        return futures

    def update_weights(self, version: int, folder: Path | None) -> None:
        """Load a published version on all servers in parallel, and prove that they generate with it. A server that
        does not answer gets the version when it answers again.

        Raises ServerError if no server answers, or if a server reports that it cannot load the version. Such a server
        stays paused.
        """
        if folder is None:
            raise ValueError("servers read weights from a folder: expected the folder of a published version")
        folder = folder.resolve()
        with published_folder(folder) as content:
            manifest, sha256 = content.manifest, content.sha256
        if manifest.version != version:
            raise ValueError(f"{folder} holds version {manifest.version}: expected {version}")
        if self._run and manifest.run != self._run:
            raise ValueError(
                f"{folder} holds weights of the run '{escaped(manifest.run)}', not of this run '{self._run}': "
                "expected a folder to which no other run writes"
            )
        label = f"{self._prefix}-{version}-{len(self.weights.versions)}"
        self.weights.update_all(Published(version, folder, label, manifest.kind, sha256))

    def require_tokenizer(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """Raise ValueError if a server does not report its tokenizer, or if its tokens of this text differ."""
        for server in self.weights.servers.values():
            self._api.require_tokenizer(self._pool.asker(server.url), server.url, server.model, tokenizer, text)

    def close(self) -> None:
        self.weights.forget(self.weights.newest, SECONDS_TO_DROP)
        self._pool.close()

    def _call(self, request: GenerationRequest, names_adapter: bool) -> ServerRequest[Completion]:
        ids = request.prompt_ids
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self._vocabulary:
            raise ValueError(
                f"completion {request.number}: its prompt has {len(ids)} tokens; expected at least one token, and "
                f"ids from 0 to {self._vocabulary - 1}"
            )
        sampling = self._sampling if request.sampling is None else request.sampling
        limit = sampling.max_new_tokens
        limit = limit if request.max_new_tokens is None else min(limit, request.max_new_tokens)
        attempt: list[tuple[ServerState, Published]] = []

        def content(url: str) -> bytes:
            server = self.weights.servers[url]
            # if the weights of this server have become unknown since it was chosen, its answer will be discarded
            published = server.published or UNKNOWN_WEIGHTS
            attempt[:] = [(server, published)]
            model = self.weights.adapter_of(published) or server.model
            body = self._api.request_body(model, request, sampling, limit, self._processor)
            return body if isinstance(body, bytes) else json.dumps(body).encode()

        return ServerRequest(
            self._api.path,
            content,
            SAFETENSORS if request.has_media else JSON,
            lambda response: self._completion(response, *attempt[0], sampling, limit),
            len(ids) + limit,
            bytes_of_json(limit, COMPLETION_TOKEN_BYTES),
            self._api.kind.hint,
            frozenset({200, self._api.unknown_adapter} if names_adapter else {200}),
            is_slow=request.has_media,
        )

    def _completion(
        self, response: HttpAnswer, server: ServerState, published: Published, sampling: Sampling, limit: int
    ) -> Completion:
        """Return the completion of an answer. published: the server's version when the request was sent.

        Raises ValueError for a damaged answer, and AskAgainError for an answer that the server has generated with
        other weights than the student's.
        """
        adapter = self.weights.adapter_of(published)
        if response.status != 200:
            if not self._api.lacks_adapter(response):
                raise RefusedError(f"{response.url}: {response.status} {response.message}")
            self.weights.restore(server, published)
            raise AskAgainError
        answer = self._api.parse(response, adapter)
        versions_N = token_versions(answer.spans, self.weights.versions, len(answer.ids))
        # an answer without a label per token needs an adapter in its request, or weights that have not changed since
        is_marked = self._api.marks_tokens or adapter is not None
        has_changed = not is_marked and server.published is not published
        is_unknown = versions_N is None or versions_N.min() < published.version or published is UNKNOWN_WEIGHTS
        if versions_N is None or is_unknown or has_changed:
            self.weights.restore(server, published)
            raise AskAgainError
        if (np.diff(versions_N) < 0).any():
            raise ValueError(f"the versions of a completion's tokens decrease: {versions_N.tolist()[:20]}")
        answer.require(sampling, limit, self._vocabulary)
        server.restored = 0
        completion = answer.completion(versions_N)
        # SGLang reports "length" if the last token within the limit is an end of sequence
        return replace(completion, finish="stop") if answer.ids[-1] in sampling.eos_ids else completion


def token_versions(spans: Sequence[VersionSpan], versions: dict[str, int], count: int) -> np.ndarray | None:
    """Return the version of each of the `count` tokens, or None if `versions` lacks the label of a span.

    Raises ValueError unless the spans cover all tokens in order.
    """
    per_token: list[Any] = []
    for span in spans:
        if span.start != len(per_token) or not span.start < span.end <= count:
            raise ValueError(f"versions of the tokens {span.start} to {span.end} after {len(per_token)} tokens")
        per_token += [versions.get(span.label or "")] * (span.end - span.start)
    if len(per_token) != count or not per_token:
        raise ValueError(f"versions of {len(per_token)} tokens for a completion of {count}")
    return None if None in per_token else np.array(per_token, np.int32)
