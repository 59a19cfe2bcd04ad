"""A teacher on servers: connects to the servers, downloads the teacher's files, proves the servers, gets signals.

`stillhouse serve` offers the teacher's configuration, tokenizer and output head. They are downloaded once per machine
and teacher, and kept in `~/.cache/stillhouse/teachers`, or in `$STILLHOUSE_CACHE/teachers`. Every file is compared
with its hash, even if an earlier run has downloaded it.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, product
from pathlib import Path
from textwrap import shorten
from threading import Lock
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from stillhouse.config import ConfigError, TeacherConfig, as_config_error
from stillhouse.config.servers import server_token, signal_kinds
from stillhouse.data import DataError, Documents
from stillhouse.data.media import MediaInputs
from stillhouse.data.render.tokenizers import MAX_IDS
from stillhouse.hashing import folder_hashes
from stillhouse.libraries import reading
from stillhouse.models import Decoder, model_fingerprint
from stillhouse.models.families import text_config
from stillhouse.models.weight_files import json_object, named_weights, weight_files
from stillhouse.output.cached_folder import cache_root
from stillhouse.parallel import is_first, log_rank0
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.client.pool import ServerPool, ServerRequest
from stillhouse.serving.client.server_api import NeedsModelError, Scores, ServerApi, ServerInfo
from stillhouse.serving.client.signal_proof import Proof, prove
from stillhouse.serving.image_support import positions_hash, require_accepted
from stillhouse.serving.wire import HEAD_FILE
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec, problem_in
from stillhouse.signals.signal_store import SignalStore
from stillhouse.signals.teacher_folder import files_of_head, head_of

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
#: with teacher.prove=auto, a local model with at most this many bytes of weights is compared with the servers
SMALL = 2**30

#: for each signal that needs files of the teacher, the message that tells why
_NEEDS_MODEL = {
    "hidden": "the signal hidden from {name} needs the teacher's output head",
    "chosen": "the signal chosen from {name} needs the size of the teacher's vocabulary",
}
#: allowed file names: no paths, no files with code, and no formats that a loader would unpickle
_ALLOWED = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.(json|txt|model|jinja|safetensors)")

#: the most files of a teacher, and the most bytes of a file other than the head, such as a large tokenizer
MOST_FILES, MOST_FILE_BYTES = 100, 256 * 2**20
#: the number of bytes of requests after which the client waits for answers; requests with images are large
BYTES_AT_A_TIME = 128 * 2**20


class RemoteSignals(SignalStore):
    """The signals of a teacher on one or several servers.

    width: E, the teacher's width; 0 if it is unknown and not needed.
    vocabulary: the number of rows of the teacher's head; None if it is unknown.
    proof: the proof of the servers. It is repeated on all working servers before every `prove_every`-th read, or
    never if `prove_every` is 0. If answers do not contain the teacher's hash, the proof is also repeated on each
    server that answers again after a failure.
    """

    may_take_long = True  # reads need no watchdog, because the pool has its own timeout
    same_conversation = True

    def __init__(
        self,
        pool: ServerPool,
        api: ServerApi,
        servers: Sequence[ServerInfo],
        signal: SignalSpec,
        width: int,
        vocabulary: int | None,
        teacher_folder: Path | None,
    ):
        self.pool, self.api, self.servers = pool, api, servers
        self.signal, self.width, self.vocabulary, self.teacher_folder = signal, width, vocabulary, teacher_folder
        self.name, self.model = ", ".join(server.url for server in servers), servers[0].model
        # the teacher's hash that the server reports; otherwise the hash of local files; otherwise a hash of the name
        self.identity = servers[0].identity or hashlib.sha256(self.model.encode()).hexdigest()
        if servers[0].identity is None and teacher_folder is not None:
            self.identity = model_fingerprint(teacher_folder)
        self.proof: Proof | None = None
        self.prove_every = 0
        self._reads = count(1)
        self._proving = Lock()
        #: servers that answer again after a failure, and have not been proven since then
        self._unproven: set[str] = set()

    def require(self, documents: Documents, what: str, media_inputs: MediaInputs | None = None) -> None:
        """Raise DataError for the first document that a server cannot score. what: the name of the documents."""
        if documents.has_media:
            assert media_inputs is not None
            if not self.api.kind.reads_images:
                raise ValueError(
                    f"{what} has images, and {self.api.kind.title} would read them with a processor of its own, "
                    "which cannot be proved to be the student's: expected `stillhouse serve --images`, a teacher in "
                    "this job (key model), a cache, or documents without images"
                )
            for server in self.servers:
                require_accepted(server.url, server.images, documents, media_inputs.processor, what)
        if self.vocabulary is not None:
            documents.check_ids(self.vocabulary, "teacher")
        limits = [server.max_tokens for server in self.servers if server.max_tokens is not None]
        longest = min(limits, default=np.inf) - self.api.kind.counts_next
        beyond = np.flatnonzero(documents.lengths_D > longest)
        if len(beyond):
            tokens = int(documents.lengths_D[beyond[0]])
            raise DataError(
                documents.sources[int(beyond[0])],
                f"{tokens:,} tokens of {what}, but the teacher's server scores at most {longest:,.0f}: start it with "
                "a longer limit, or cut the documents",
            )

    def require_positions(self, positions: Sequence[Tensor | None]) -> None:
        expected = positions_hash(positions)
        for server in self.servers:
            if server.images is not None and server.images.positions != expected:
                raise ValueError(
                    f"{server.url}: its rotary positions of images are not those of the student: expected a model of "
                    "the student's family"
                )

    def read(self, documents: Sequence[DocumentRows]) -> Scores:
        if self.proof is not None and self.prove_every and next(self._reads) % self.prove_every == 0:
            self.proof.repeat([server.url for server in self.pool.servers if not server.is_failing])
        while True:
            answered_by: set[str] = set()
            scores = self.scores(documents, answered_by=answered_by)
            if self.proof is None or self.servers[0].identity is not None:
                return scores
            # Prove the servers that answer again after a failure, because their weights may have changed. All reads
            # wait for this proof. If a server cannot be proven now, its answers are discarded and requested again.
            with self._proving:
                while self.pool.returned:
                    self._unproven.add(self.pool.returned.pop())
                working = {server.url for server in self.pool.servers if not server.is_failing}
                self._unproven -= self.proof.repeat(self._unproven & working)
                if not answered_by & self._unproven:
                    return scores

    def scores(
        self,
        documents: Sequence[DocumentRows],
        *,
        url: str | None = None,
        spec: SignalSpec | None = None,
        timeout: float | None = None,
        answered_by: set[str] | None = None,
    ) -> Scores:
        """Return the tensors of a signal for each document.

        url: the only server that gets the requests. spec: replaces the run's signal. timeout: replaces the pool's
        timeout. answered_by: a set to which the URLs of the servers that answer are added. Raises ServerError if no
        server answers, and ValueError if a server refuses a request.
        """
        wanted = spec or self.signal

        def checked(call: ServerRequest[Scores], response: HttpAnswer) -> Scores:
            parts = call.parse(response)
            for part in parts:  # an answer with impossible numbers is damaged
                if problem := problem_in(wanted, self.vocabulary or MAX_IDS, part):
                    raise ValueError(f"{problem} in the answer")
            if answered_by is not None:
                answered_by.add(response.server)
            return parts

        scores: Scores = []
        calls = iter(self.api.calls(self.servers[0], wanted, self.width, documents))
        while True:  # in groups, because requests with images may be large
            group, size = list[ServerRequest[Scores]](), 0
            for call in calls:
                group.append(replace(call, parse=partial(checked, call)))
                size += len(call.content) if isinstance(call.content, bytes) else 0
                if size >= BYTES_AT_A_TIME:
                    break
            if not group:
                return scores
            for part in self.pool.score(group, url, timeout):
                scores += part

    def close(self) -> None:
        self.pool.close()


def download_teacher(pool: ServerPool, info: ServerInfo) -> Path:
    """Download the teacher's files unless they are in the cache, and return their folder.

    Raises ValueError if the server offers files of other kinds, or if a file does not have the hash in `info`.
    """
    only = "expected configuration, tokenizer and head only"
    if len(info.files) > MOST_FILES:
        raise ValueError(f"{info.url} offers {len(info.files):,} files: {only}")
    for name in info.files:
        if not _ALLOWED.fullmatch(name):
            raise ValueError(f"{info.url} offers a file {name!r}: {only}")
    if "config.json" not in info.files or HEAD_FILE not in info.files:
        raise ValueError(f"{info.url} offers {sorted(info.files)}: expected config.json and {HEAD_FILE} among them")
    table = json.dumps(sorted(info.files.items())).encode()
    folder = cache_root() / "teachers" / hashlib.sha256(table).hexdigest()[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # the largest possible head: float64, with a bias
    most_bytes = MOST_FILE_BYTES + 8 * (info.vocabulary or 0) * ((info.width or 0) + 1)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir() and folder_hashes(folder) == dict(info.files):
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            for name, digest in info.files.items():
                path = "/v1/head" if name == HEAD_FILE else f"/v1/files/{name}"
                answer = pool.asker(info.url, most_bytes=most_bytes)(path, None)
                if answer.status != 200 or hashlib.sha256(answer.content).hexdigest() != digest:
                    raise ValueError(
                        f"{info.url}{path} answers {answer.status} with {len(answer.content):,} bytes that do not "
                        "have the hash in /v1/info: are there several teachers behind one address?"
                    )
                (Path(unfinished) / name).write_bytes(answer.content)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(unfinished, folder)
    return folder


def connect(teacher: TeacherConfig, temperature: float, section: str = "teacher") -> RemoteSignals:
    """Request the servers' descriptions, and get the files of the teacher that the run needs: the configuration, the
    tokenizer and, for hidden states, the files of the output head.

    temperature: the temperature of the objective for this teacher.
    section: the teacher's section of the configuration.
    Raises ConfigError if the servers have different teachers or cannot give the signal. Raises ServerError if a
    server does not answer.
    """
    with _section_errors(section), ExitStack() as on_error:
        model_folder = None
        if teacher.model is not None and os.path.isdir(teacher.model):
            model_folder = Path(teacher.model)
        elif teacher.model is not None:  # download only the files that the run needs
            with reading(f"the teacher {teacher.model!r} cannot be read from the hub"):
                download = partial(snapshot_download, teacher.model, revision=teacher.revision)
                model_folder = Path(download(allow_patterns=SMALL_FILES))
                if teacher.signal == "hidden":
                    # as transformers does, prefer a single file of weights to several files with an index
                    single = named_weights(str(model_folder), json_object(model_folder, CONFIG_NAME))
                    download(allow_patterns=[single or SAFE_WEIGHTS_NAME])
                    download(allow_patterns=files_of_head(model_folder))
        token = server_token(f"{section}.token_variable", teacher.token_variable)
        pool = ServerPool(
            teacher.urls,
            teacher.timeout,
            lambda line: log_rank0(f"warning: {line}"),
            key=f"{section}.timeout",
            token=token,
        )
        on_error.callback(pool.close)
        store = _connected(pool, teacher, temperature, model_folder)
        on_error.pop_all()
    return store


@contextmanager
def _section_errors(section: str) -> Iterator[None]:
    """Convert errors to ConfigErrors: of the key `model` if files of the teacher are missing, else of `url`."""
    try:
        with as_config_error(f"{section}.url", NeedsModelError):
            yield
    except NeedsModelError as error:
        raise ConfigError(f"{section}.model", f"is missing: {error}") from error


def _connected(
    pool: ServerPool, teacher: TeacherConfig, temperature: float, model_folder: Path | None
) -> RemoteSignals:
    urls = [server.url for server in pool.servers]
    apis: Iterable[ServerApi] = (kind.api() for kind in signal_kinds(teacher.api))
    api = next((api for api in apis if teacher.api != "auto" or api.recognises(pool.asker(urls[0]))), None)
    if api is None:
        names = ", ".join(kind.name for kind in signal_kinds("auto"))
        raise ValueError(f"{urls[0]} is not a server of a known kind: expected {names}")
    for url in urls:
        if other := api.other_version(pool.asker(url)):
            log_rank0(f"warning: {other}")
    servers = [api.describe(pool.asker(url), url) for url in urls]
    _require_signal(api, servers, teacher, temperature)
    folder = download_teacher(pool, servers[0]) if servers[0].files else model_folder
    if folder is None and teacher.signal in _NEEDS_MODEL:
        need = _NEEDS_MODEL[teacher.signal].format(name=api.kind.name)
        raise NeedsModelError(f"{need}; expected the model that the server has loaded")
    width, vocabulary, dtype = servers[0].width or 0, servers[0].vocabulary, "float32"
    if folder is not None:
        with reading(f"{folder}: its configuration cannot be read"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            text = text_config(config)
            columns, rows = int(text.hidden_size), int(text.vocab_size)
            dtype = str(config.dtype or "float32").removeprefix("torch.")
        if width not in (0, columns) or vocabulary not in (None, rows):
            raise ValueError(
                f"{urls[0]} serves a teacher of width {width} and vocabulary {vocabulary}, but {folder} has "
                f"{columns} and {rows}"
            )
        width, vocabulary = columns, rows
    if teacher.signal == "hidden":
        dtype = dtype if teacher.dtype == "auto" else teacher.dtype
        signal = SignalSpec("hidden", dtype if dtype in DTYPES else "float32")
    else:
        signal = SignalSpec(teacher.signal, "float32", teacher.top_k, temperature)
    return RemoteSignals(pool, api, servers, signal, width, vocabulary, folder)


def _require_signal(
    api: ServerApi, servers: Sequence[ServerInfo], teacher: TeacherConfig, temperature: float
) -> None:
    """Raise ValueError unless all servers have the same teacher and give the signal. If the servers report no
    hash of their teacher, the names of the teachers are also compared.
    """
    first, same = servers[0], ("identity", "vocabulary", "width", "dtype", "files")
    for server, name in product(servers[1:], same if first.identity is not None else (*same, "model")):
        if getattr(first, name) != getattr(server, name):
            one, two = (shorten(str(getattr(of, name)), 100) for of in (first, server))
            raise ValueError(
                f"{first.url} and {server.url} serve different teachers: {name} is {one} and {two}; expected "
                "servers of one teacher"
            )
    for server in servers:
        signals = api.kind.signals if server.signals is None else server.signals
        if teacher.signal not in signals:
            raise ValueError(
                f"{server.url} ({api.kind.name}) cannot give the signal {teacher.signal}: expected "
                f"{' or '.join(sorted(signals))}"
            )
        most = server.max_top_k
        if teacher.signal in ("top_k", "chosen") and most is not None and teacher.top_k > most:
            raise ValueError(f"{server.url} gives at most {most} ids per token, got top_k={teacher.top_k}")
    if teacher.signal != "hidden" and not api.kind.any_temperature and temperature != 1.0:
        raise ValueError(
            f"{api.kind.name} gives {teacher.signal} only at temperature 1, whatever it is asked for; the objective "
            f"has temperature {temperature:g}: expected the signal hidden, which has no temperature"
        )


def prove_servers(
    section: str, teacher: TeacherConfig, store: RemoteSignals, documents: Documents, data: Any, device: torch.device
) -> None:
    """Prove the servers' signals. If `teacher.prove` requires it, rank 0 loads the model and compares its signals.

    documents: the documents that the teacher scores. data: the `Data` of the run.
    """
    local = head = None
    if is_first():
        prove_local = teacher.prove == "always"
        if teacher.prove == "auto" and teacher.model is not None and os.path.isdir(teacher.model):
            files = weight_files(teacher.model)
            is_whole = all(path.is_file() for path in files)
            prove_local = is_whole and 0 < sum(path.stat().st_size for path in files) <= SMALL
        if prove_local and teacher.model is not None:
            local = Decoder.from_pretrained(
                teacher.model,
                revision=teacher.revision,
                dtype=teacher.dtype,
                device=device,
                quantize=store.servers[0].quantize,
                multimodal=documents.has_media,
            )
        if store.signal.is_exact:
            assert store.teacher_folder is not None
            head = head_of(store.teacher_folder, multimodal=documents.has_media).output_head()
    with _section_errors(section):
        proof = prove(store, documents, data.tokenizer, local=local, head=head, media_inputs=data.train.media_inputs)
    store.proof, store.prove_every = proof, teacher.prove_every
    per_token = store.signal.bytes_per_token(store.width)
    log_rank0(
        f"{section}: {store.signal}, {per_token:,} bytes per token, from {store.name} ({store.api.kind.name}); "
        f"proven with {'; '.join(proof.findings)}"
    )
