"""A store of signals that servers of the teacher fill on request."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import AutoConfig

from stillhouse.data import DataError, Documents
from stillhouse.libraries import reading
from stillhouse.models import model_fingerprint
from stillhouse.teachers.client.api import Api, Scores, ServerInfo
from stillhouse.teachers.client.download import download_teacher
from stillhouse.teachers.client.pool import ServerPool
from stillhouse.teachers.client.sglang_api import SglangApi
from stillhouse.teachers.client.stillhouse_api import StillhouseApi
from stillhouse.teachers.client.vllm_api import VllmApi
from stillhouse.teachers.spec import DTYPES, DocumentRows, SignalKind, SignalSpec

APIS: tuple[Api, ...] = (StillhouseApi(), VllmApi(), SglangApi())


@dataclass(frozen=True)
class Wanted:
    """What a run wants of a server. dtype: "auto" is that of the teacher's saved weights."""

    signal: SignalKind = "hidden"
    top_k: int = 64
    temperature: float = 1.0
    dtype: str = "auto"


class RemoteSignals:
    """The signals of a teacher behind one or several servers; a `SignalStore`.

    spec: what the servers are asked for. width: E, the teacher's width (0 if it is unknown and not needed).
    vocabulary: the rows of the teacher's head; None if unknown.
    prove, prove_every: `prove` is called before every n-th step that is read (0: never).
    """

    def __init__(
        self,
        pool: ServerPool,
        api: Api,
        servers: Sequence[ServerInfo],
        spec: SignalSpec,
        *,
        width: int,
        vocabulary: int | None,
        teacher_folder: Path | None,
    ):
        self.pool, self.api, self.servers = pool, api, servers
        self.signal, self.width, self.vocabulary, self.teacher_folder = spec, width, vocabulary, teacher_folder
        self.prove: Callable[[], object] | None = None
        self.prove_every = 0
        self._reads = count(1)

    @property
    def has_timeout(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return ", ".join(each.url for each in self.servers)

    @property
    def identity(self) -> str:
        """The teacher's own hash; that of its files here, if the server tells none; else its name."""
        first = self.servers[0]
        if first.identity is not None:
            return first.identity
        if self.teacher_folder is not None:
            return model_fingerprint(self.teacher_folder)
        return hashlib.sha256(first.model.encode()).hexdigest()

    def require(self, documents: Documents, what: str) -> None:
        """Raise DataError for the first document that a server cannot score. what: their name in the message."""
        if self.vocabulary is not None:
            documents.check_ids(self.vocabulary, "teacher")
        limits = [each.max_tokens for each in self.servers if each.max_tokens is not None]
        # an engine that counts a generated token, too, scores one token less
        longest = min(limits, default=np.inf) - (self.api.name != "stillhouse")
        beyond = np.flatnonzero(documents.lengths_D > longest)
        if len(beyond):
            tokens = int(documents.lengths_D[beyond[0]])
            raise DataError(
                documents.sources[int(beyond[0])],
                f"{tokens:,} tokens of {what}, but the teacher's server scores at most {longest:,.0f}: start it with "
                "a longer limit, or lower data.max_tokens",
            )

    def read(self, wanted: Sequence[DocumentRows]) -> Scores:
        if self.prove is not None and self.prove_every and next(self._reads) % self.prove_every == 0:
            self.prove()
        return self.scores(wanted)

    def scores(
        self, wanted: Sequence[DocumentRows], *, url: str | None = None, spec: SignalSpec | None = None
    ) -> Scores:
        """For each of these, the tensors of a signal. url: ask only this server. spec: another signal than the run's.

        Raises ServerError (an OSError) if no server answers, and ValueError for a request that a server refuses.
        """
        calls = self.api.calls(self.servers[0], spec or self.signal, self.width, wanted)
        answers = self.pool.score([call for _, call in calls], url)
        found: list[dict[str, Tensor]] = [{}] * len(wanted)
        for (numbers, _), parts in zip(calls, answers, strict=True):
            for number, part in zip(numbers, parts, strict=True):
                found[number] = part
        return found

    def close(self) -> None:
        self.pool.close()


def connect(
    urls: Sequence[str],
    wanted: Wanted,
    *,
    api: str = "auto",
    model_folder: Path | None = None,
    timeout: float = 600.0,
    token: str | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> RemoteSignals:
    """Ask the servers who they are, and fetch what the run needs of the teacher.

    model_folder: the teacher's configuration, tokenizer and weights, for servers that do not offer them. Raises
    ValueError for servers of different teachers, and for a signal that they cannot give. Raises ServerError (an
    OSError) for a server that does not answer.
    """
    pool = ServerPool(urls, timeout, token, warn)
    with ExitStack() as on_error:
        on_error.callback(pool.close)
        store = _connected(pool, wanted, api, model_folder)
        on_error.pop_all()
    return store


def _connected(pool: ServerPool, wanted: Wanted, api: str, model_folder: Path | None) -> RemoteSignals:
    urls = [each.url for each in pool.servers]
    chosen = _api_of(pool, urls[0], api)
    servers = [chosen.describe(pool, url) for url in urls]
    for each in servers[1:]:
        # a teacher that tells its hash may have another name on each server
        if replace(each, url=urls[0], model=each.model if each.identity is None else servers[0].model) != servers[0]:
            raise ValueError(f"{each.url} and {urls[0]} serve different teachers: {each} and {servers[0]}")
    if wanted.signal not in chosen.signals:
        raise ValueError(
            f"{chosen.name} cannot give the signal {wanted.signal}: expected {' or '.join(sorted(chosen.signals))}"
        )
    if wanted.signal not in chosen.any_temperature and wanted.temperature != 1.0:
        raise ValueError(
            f"{chosen.name} gives {wanted.signal} only at temperature 1, whatever it is asked for; the objective has "
            f"temperature {wanted.temperature:g}: expected the signal hidden, which gives every temperature"
        )
    folder = download_teacher(pool, servers[0]) if servers[0].files else model_folder
    if wanted.signal == "hidden" and folder is None:
        raise ValueError(
            f"hidden states from {chosen.name} need the teacher's output head: expected teacher.model, the model "
            "that the server has loaded"
        )
    width, vocabulary, dtype = servers[0].width or 0, servers[0].vocabulary, "float32"
    if folder is not None:
        with reading(f"{folder}: its configuration cannot be read"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            text = config.get_text_config()
            found, rows = int(text.hidden_size), int(text.vocab_size)
            dtype = str(config.dtype or "float32").removeprefix("torch.")
        if width not in (0, found) or vocabulary not in (None, rows):
            raise ValueError(
                f"{urls[0]} serves a teacher of width {width} and vocabulary {vocabulary}, but {folder} has {found} "
                f"and {rows}"
            )
        width, vocabulary = found, rows
    spec = _spec(wanted, dtype)
    return RemoteSignals(pool, chosen, servers, spec, width=width, vocabulary=vocabulary, teacher_folder=folder)


def _spec(wanted: Wanted, saved_dtype: str) -> SignalSpec:
    if wanted.signal != "hidden":
        return SignalSpec(wanted.signal, "float32", wanted.top_k, wanted.temperature)
    dtype = saved_dtype if wanted.dtype == "auto" else wanted.dtype
    return SignalSpec("hidden", dtype if dtype in DTYPES else "float32")


def _api_of(pool: ServerPool, url: str, name: str) -> Api:
    for api in APIS:
        if api.name == name or (name == "auto" and api.recognises(pool, url)):
            return api
    raise ValueError(f"{url} is not a server that is known here: expected {', '.join(api.name for api in APIS)}")
