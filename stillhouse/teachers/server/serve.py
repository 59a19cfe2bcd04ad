"""Serves a teacher's exact signals over HTTP: the command `stillhouse serve`.

The model runs in the main thread, which takes batches from the queue. HTTP runs in a thread of its own.
Under torchrun, the ranks share the model (tensor parallel); rank 0 speaks HTTP, and the other ranks compute the same
batches.

The first SIGTERM or Ctrl-C: accept nothing more, answer what was accepted, end with exit code 0. The second one ends
the process at once.
"""

import gc
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import uvicorn

from stillhouse.display import first_line
from stillhouse.parallel import destroy_process_group, is_first, log_rank0, wait_for_all, watchdog
from stillhouse.preemption import finishing, requested
from stillhouse.teachers.scorer import Scorer
from stillhouse.teachers.server.app import Service, make_app
from stillhouse.teachers.server.batching import Item, RequestQueue, ScoringFailedError
from stillhouse.teachers.server.gate import AnsweredByProtocol
from stillhouse.teachers.server.limits import SIGNALS, SIGNALS_OF_SHARDS, Limits
from stillhouse.teachers.server.metrics import Metrics
from stillhouse.teachers.server.ranks import Ranks
from stillhouse.teachers.server.teacher import HEAD, ServedTeacher, load_teacher, longest_sequence, with_limits

#: how often the main thread looks for a signal, how often idle ranks hear from rank 0, and how long the last answers
#: may take to be sent
LOOK_SECONDS, BEAT_SECONDS, LAST_SECONDS = 0.1, 60.0, 60.0
#: how long a thread may keep the interpreter while another one waits. Python's 5 ms would be added to each request
#: several times, because the model's thread hardly ever gives it up before
SWITCH_SECONDS = 0.0005
#: so many batches in a row whose pass fails, for another reason than too little memory, end the server
MOST_FAILURES = 3
#: connections at a time; uvicorn answers 503 to more
CONNECTIONS = 2048


def serve(
    teacher: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    require_token: bool = True,
    dtype: str = "auto",
    device: str = "auto",
    attention: str | None = None,
    revision: str | None = None,
    batch_tokens: int = 16384,
    queue_tokens: int | None = None,
    max_top_k: int = 256,
    stop: threading.Event | None = None,
) -> None:
    """Serve a teacher until a signal comes (see `preemption.handling`) or `stop` is set.

    teacher: a folder or a hub id. port: 0 for a free one. token: the bearer token of all routes but /healthz. An
    address other than loopback needs one, unless require_token is False. batch_tokens: the most tokens of a forward
    pass, and so of a sequence. queue_tokens: the most tokens of all requests at a time; 16 batches by default.
    max_top_k: the most ids per token.

    Raises ValueError for a teacher that cannot be served, and OSError for an address that cannot be used.
    """
    _check(host, token, batch_tokens, queue_tokens, max_top_k, require_token=require_token)
    queue_tokens = 16 * batch_tokens if queue_tokens is None else queue_tokens
    # before the model is loaded, so that a port in use is reported at once
    sockets = [_listening(host, port)] if is_first() else []
    with TemporaryDirectory(prefix="stillhouse-serve-") as temporary:
        folder = Path(temporary) / "teacher"
        served = load_teacher(teacher, folder, dtype=dtype, device=device, attention=attention, revision=revision)
        wait_for_all()  # a rank that cannot load the model ends the command before it is said to be ready
        watchdog.enter("serving", timed=False)
        scorer, ranks = Scorer(served.runner, served.device), Ranks(served.mesh)
        sys.setswitchinterval(SWITCH_SECONDS)
        with finishing("the requests that were accepted"):
            if is_first():
                decoder = served.runner.students()[0]
                longest = longest_sequence(decoder, batch_tokens)
                most = max(batch_tokens, queue_tokens // 4)
                signals = SIGNALS if served.mesh is None else SIGNALS_OF_SHARDS
                limits = Limits(decoder.vocabulary_rows, longest, most, max_top_k, signals)
                queue = RequestQueue(batch_tokens, queue_tokens)
                service = _service(served, limits, queue, token)
                server = _Http(service, sockets)
                _print_ready(service, sockets[0], served)
                _Loop(scorer, ranks, service, server, stop).run()
            else:
                ranks.follow(scorer)
        destroy_process_group()


class _Http:
    """uvicorn in a thread of its own. There it installs no signal handlers: the main thread tells it to end."""

    def __init__(self, service: Service, sockets: Sequence[socket.socket]):
        config = uvicorn.Config(
            AnsweredByProtocol(make_app(service)),
            http="h11",
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            ws="none",
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=int(LAST_SECONDS),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=(list(sockets),), name="http", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join(2 * LAST_SECONDS)


class _Loop:
    """The main thread of rank 0: takes batches from the queue until the server ends."""

    def __init__(self, scorer: Scorer, ranks: Ranks, service: Service, server: _Http, stop: threading.Event | None):
        self._scorer, self._ranks, self._service, self._server, self._stop = scorer, ranks, service, server, stop
        self._failures = 0

    def run(self) -> None:
        queue, sent = self._service.queue, time.monotonic()
        try:
            while True:
                if requested() or (self._stop is not None and self._stop.is_set()):
                    queue.drain()
                if not self._server.is_alive:
                    raise RuntimeError("the HTTP thread has ended")
                if batch := queue.next_batch(LOOK_SECONDS):
                    self._score(batch)
                    sent = time.monotonic()
                elif queue.is_draining:
                    break
                elif not self._ranks.is_alone and time.monotonic() - sent > BEAT_SECONDS:
                    self._ranks.send_nothing()
                    sent = time.monotonic()
            self._ranks.send_end()
            queue.wait_until_answered(LAST_SECONDS)
        finally:
            queue.drain()
            queue.fail_all(ScoringFailedError("the server ends because of an error"))
            self._server.end()

    def _score(self, batch: Sequence[Item]) -> None:
        queue, metrics = self._service.queue, self._service.metrics
        parts = [ticket.parts[number] for ticket, number in batch]
        tokens, started = sum(part.tokens for part in parts), time.monotonic()
        try:
            self._ranks.send(parts)
            outcomes = self._scorer.score(parts)
        except RuntimeError as error:
            # Too little memory, and whatever else a kernel reports for this batch alone: only its requests fail. The
            # server ends after several such batches in a row, because the GPU may be lost. Of several ranks, others
            # may still be in the pass that has failed here, so nothing can follow.
            metrics.failed_batch()
            is_memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)
            what = (
                "too little memory for a batch: send less at a time" if is_memory else "the forward pass has failed"
            )
            for ticket, _ in batch:
                ticket.fail(ScoringFailedError(what))
            print(f"a batch of {tokens:,} tokens failed: {first_line(error)}", file=sys.stderr, flush=True)
            self._failures += not is_memory
            if not self._ranks.is_alone or self._failures >= MOST_FAILURES:
                raise
            _free_memory()
            return
        self._failures = 0
        seconds = time.monotonic() - started
        queue.record_speed(tokens, seconds)
        metrics.batch(tokens, seconds)
        for (ticket, number), outcome in zip(batch, outcomes, strict=True):
            ticket.finish(number, outcome)


def _service(served: ServedTeacher, limits: Limits, queue: RequestQueue, token: str | None) -> Service:
    info = with_limits(served.info, limits)
    return Service(
        name=served.name,
        identity=served.identity,
        info=info,
        folder=served.folder,
        files=info["files"],
        head=HEAD,
        tokenizer=served.tokenizer,
        limits=limits,
        queue=queue,
        metrics=Metrics(queue),
        token=token,
    )


def _print_ready(service: Service, listening: socket.socket, served: ServedTeacher) -> None:
    info, mesh = service.info, served.mesh
    over = "" if mesh is None else f" over {mesh.everyone.size()} ranks"
    log_rank0(
        f"teacher {info['model']}: vocabulary of {info['vocabulary']:,} rows, width {info['width']:,}, "
        f"{info['dtype']} on {served.device.type}{over}"
    )
    log_rank0(
        f"signals: {', '.join(info['signals'])}; at most {info['max_top_k']} ids per token, {info['max_tokens']:,} "
        f"tokens per sequence, {info['max_request_tokens']:,} per request"
    )
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log_rank0(f"serving on http://{shown}:{port}{'' if service.token is None else ' with a bearer token'}")


def _check(
    host: str,
    token: str | None,
    batch_tokens: int,
    queue_tokens: int | None,
    max_top_k: int,
    *,
    require_token: bool,
) -> None:
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(
            "the token is empty or has characters that no HTTP header holds: expected ASCII without spaces"
        )
    if token is None and require_token and not _is_loopback(host):
        raise ValueError(
            f"host {host} is reachable from other machines and no token is set: expected STILLHOUSE_TOKEN, --token, "
            "or --no-token to serve everyone"
        )
    if batch_tokens < 1 or max_top_k < 1:
        raise ValueError(f"batch tokens {batch_tokens}, top-k {max_top_k}: expected 1 or more of each")
    if queue_tokens is not None and queue_tokens < batch_tokens:
        raise ValueError(f"queue tokens {queue_tokens}: expected at least the {batch_tokens} tokens of a batch")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # another name


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol named, asyncio sets TCP_NODELAY; without it, each answer waits 40 ms for an acknowledgement
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise OSError(f"host {host}, port {port} cannot be used: {error}") from error
    return listening


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
