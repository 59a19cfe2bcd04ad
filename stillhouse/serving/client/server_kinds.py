"""The registered entries of this package: three kinds of servers, and servers as a source of a teacher's signals."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stillhouse.config.rule import Rule, excludes
from stillhouse.config.servers import ServerKind, server_token, signal_kinds
from stillhouse.config.signal_source_kind import SourceKind


@dataclass(frozen=True)
class HttpServer(ServerKind):
    """A kind of server that is used over HTTP, through a `ServerApi`.

    signals: the kinds of signals that the server can provide.
    any_temperature: whether log-probabilities can be requested at any temperature, not only at 1.
    counts_next: whether the server's token limit also counts a generated token. If so, a document must be one token
        shorter than the limit.
    hint: advice in error messages on how to start a server of this kind that generates completions.
    after_temperature: for error messages, the description of a server of this kind that computes log-probabilities
        after it has applied the temperature; "" if every server of this kind does so.
    over_all_tokens: for error messages, the description of a server of this kind that gives log-probabilities over
        the whole vocabulary at temperature 1; "" if the messages should not recommend such a server.
    tells_tokenizer: whether the server's tokenizer can be compared with the student's.
    description_path, description_mark: the path of the server's description, and a text in this description, without
        spaces, by which a server of this kind is recognised. If they are empty, commands do not ask the server before
        they load models.
    """

    signals: tuple[str, ...] = ()
    any_temperature: bool = False
    counts_next: bool = True
    hint: str = ""
    after_temperature: str = ""
    over_all_tokens: str = ""
    tells_tokenizer: bool = True
    description_path: str = ""
    description_mark: str = ""

    def is_described_by(self, status: int, text: str, *, is_only: bool = False) -> bool:
        """Whether this answer to a request for `description_path` is that of a server of this kind. is_only: whether
        the user has named the kind, so that any JSON object is accepted, such as that of a gateway.
        """
        is_marked = bool(self.description_mark) and self.description_mark in text.replace(" ", "")
        return status == 200 and (is_marked or (is_only and text.lstrip().startswith("{")))

    def require_server(self, url: str, token: str | None, seconds: float) -> None:
        from stillhouse.serving.client.probe import require_kind

        require_kind(url, [self], token, seconds)

    def api(self, *, is_tied: bool = False) -> Any:
        """Make the `ServerApi`. is_tied: see `ServerApi`."""
        raise NotImplementedError

    def open_engine(self, urls: list[str], sampling: Any, *, is_tied: bool, **options: Any) -> Any:
        from stillhouse.serving.client.served_engine import ServedEngine

        return ServedEngine(urls, sampling, self.api(is_tied=is_tied), **options)


class _KnownServer(HttpServer):
    def api(self, *, is_tied: bool = False) -> Any:
        from stillhouse.serving.client.sglang import SglangApi
        from stillhouse.serving.client.stillhouse import StillhouseApi
        from stillhouse.serving.client.vllm import VllmApi

        return {kind.name: kind for kind in (StillhouseApi, VllmApi, SglangApi)}[self.name](is_tied=is_tied)

    def require_reward_server(self, url: str, token: str | None, seconds: float) -> None:
        from stillhouse.serving.client.probe import require_http

        root = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        require_http(root, url.removeprefix(root) or "/", token, seconds)

    def open_reward(self, url: str, name: str, timeout: float, warn: Any, token: str | None) -> Any:
        from stillhouse.serving.client.reward_server import RewardServer

        return RewardServer(url, name, timeout, warn, token)


STILLHOUSE = _KnownServer(
    "stillhouse",
    "`stillhouse serve`",
    reads_images=True,
    rounds_as_here=True,
    reward_schemes=("http", "https"),
    signals=("hidden", "top_k", "chosen", "sampled"),
    any_temperature=True,
    counts_next=False,
    description_path="/v1/info",
    description_mark='"stillhouse"',
    hint="expected a server that was started with stillhouse serve MODEL --generate",
)
VLLM = _KnownServer(
    "vllm",
    "vLLM",
    signals=("hidden", "top_k", "chosen"),
    description_path="/v1/models",
    description_mark='"owned_by":"vllm"',
    hint="expected vLLM 0.30 or later, started with --enable-scale-out",
    after_temperature="a vLLM that was started with --logprobs-mode processed_logprobs",
    over_all_tokens="a vLLM that was started without --logprobs-mode processed_logprobs",
)
SGLANG = _KnownServer(
    "sglang",
    "SGLang",
    signals=("hidden", "top_k"),
    description_path="/get_model_info",
    description_mark='"model_path"',
    hint="expected SGLang 0.5 or later",
    after_temperature="an SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB",
    tells_tokenizer=False,
)


class _Servers(SourceKind):
    def rules(self) -> Iterable[Rule]:
        yield excludes("teacher.dtype=float64", "teacher.url", expected="float32, bfloat16 or float16")
        yield Rule(
            ("teacher.prove", "teacher.model"),
            lambda prove, model: prove == "always" and model is None,
            "auto, or the key teacher.model with the weights to compare with",
        )

    def require_server(self, section: str, teacher: Any, url: str, seconds: float) -> None:
        from stillhouse.serving.client.probe import require_kind

        token = server_token(f"{section}.token_variable", teacher.token_variable)
        require_kind(url, signal_kinds(teacher.api), token, seconds)

    def open(self, section: str, teacher: Any, objective: Any, batch_tokens: int) -> Any:
        from stillhouse.serving.client.served_teacher import connect

        return connect(teacher, objective.temperature_of(teacher), section)

    def prove(self, section: str, teacher: Any, store: Any, documents: Any, data: Any, device: Any) -> None:
        from stillhouse.serving.client.served_teacher import prove_servers

        prove_servers(section, teacher, store, documents, data, device)


URL = _Servers(
    "url",
    "on a server",
    beside=("model", "attention", "revision", "dtype"),
    options=("token_variable", "api", "signal", "timeout", "prove", "prove_every", "accept", "top_k"),
    any_tokens=True,
    compares_tokenizer=True,
    is_address=True,
)
