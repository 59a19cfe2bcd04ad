"""Serves a model over HTTP: the command `stillhouse serve`.

The model runs in the main thread, which takes batches from the queue; HTTP has its own thread. Under torchrun, the
teacher is tensor-parallel over the ranks, and rank 0 handles HTTP. After the first SIGTERM or Ctrl-C, the server
answers the accepted requests, and ends with exit code 0. A second signal ends the process at once.
"""

import gc
import sys
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from stillhouse.display import first_line
from stillhouse.models import NotFiniteError
from stillhouse.parallel import (
    destroy_process_group,
    is_first,
    log_rank0,
    process_count,
    use_deterministic_algorithms,
    wait_for_all,
    watchdog,
)
from stillhouse.preemption import finishing, requested
from stillhouse.serving.server.application import Application
from stillhouse.serving.server.connection import LAST_SECONDS, HttpThread, bound
from stillhouse.serving.server.gate import RequestError, is_loopback
from stillhouse.serving.server.generation import CompletionWriter
from stillhouse.serving.server.request_queue import Item, RequestQueue
from stillhouse.serving.server.role import ModelOptions, Role
from stillhouse.serving.server.served_teacher import ServedTeacher

#: the maximum number of seconds between two checks of whether the server must end, while no request arrives
LOOK_SECONDS = 0.1
#: the server ends after this number of failed batches in a row. Batches that failed for lack of memory do not count
MAX_FAILURES = 3
#: seconds after which a thread must release the interpreter to another thread. The model's thread rarely releases it
#: earlier, so Python's default of 5 ms would delay each request several times
SWITCH_SECONDS = 0.0005


def run_server(
    model: ModelOptions,
    *,
    generate: bool,
    host: str,
    port: int,
    token: str | None,
    require_token: bool,
    batch_tokens: int,
    queue_tokens: int | None,
    max_top_k: int,
    weights_root: Path | None,
    deterministic: bool,
) -> None:
    """Serve a model until a signal such as SIGTERM arrives. `stillhouse serve --help` describes the options.

    Raises ValueError if the model cannot be served, if the token cannot be sent in a header, or if other machines can
    reach the address and there is no token. Raises OSError if the address cannot be used.
    """
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(
            "the token is empty or cannot be sent in a header: expected printable ASCII characters without spaces"
        )
    if token is None and require_token and not is_loopback(host):
        raise ValueError(
            f"host {host} is reachable from other machines and no token is set: expected STILLHOUSE_TOKEN, --token, "
            "or --no-token to serve everyone"
        )
    if queue_tokens is not None and queue_tokens < batch_tokens:
        raise ValueError(
            f"--queue-tokens {queue_tokens}: expected at least {batch_tokens}, the value of --batch-tokens"
        )
    if generate and process_count() > 1:
        raise ValueError(
            f"--generate under {process_count()} processes: expected one process with the whole model; start a "
            "server for each GPU, or use vLLM if the model does not fit on one GPU"
        )
    if deterministic:
        use_deterministic_algorithms()
    queue_tokens = queue_tokens or 16 * batch_tokens
    # listen before the model is loaded, so that a port in use is reported at once, and clients wait for this server
    http = HttpThread(bound(host, port)) if is_first() else None
    try:
        with TemporaryDirectory(prefix="stillhouse-serve-") as folder:
            role: Role
            if generate:
                role = CompletionWriter(model, batch_tokens, weights_root)
            else:
                role = ServedTeacher(model, Path(folder) / "teacher", batch_tokens, queue_tokens, max_top_k)
            wait_for_all()  # if a rank cannot load the model, the command must end before it prints that it is ready
            watchdog.enter("serving", timed=False)
            queue = RequestQueue(batch_tokens, queue_tokens, lambda: bool(requested()), deterministic=deterministic)
            with finishing("the requests that were accepted"):
                if http is not None:
                    _run(role, queue, http, token)
                elif isinstance(role, ServedTeacher):  # only a teacher may have several processes
                    role.follow()
            destroy_process_group()
    finally:
        if http is not None:
            http.end()


def _run(role: Role, queue: RequestQueue, http: HttpThread, token: str | None) -> None:
    """On the first process, answer requests until the server must end."""
    host, port = http.address
    application = Application(role, queue, token, host)
    http.serve(application.api)
    for line in role.description:
        log_rank0(line)
    shown = f"[{host}]" if ":" in host else host
    log_rank0(f"serving on http://{shown}:{port}{'' if token is None else ' with a bearer token'}")
    sys.setswitchinterval(SWITCH_SECONDS)
    failures = 0
    try:
        while True:
            is_last = queue.is_draining
            if is_last:
                queue.drain()  # after this line, no request enters the queue, so an empty queue stays empty
            if not http.thread.is_alive():
                raise RuntimeError("the HTTP thread has ended")
            role.between_batches()
            if batch := queue.next_batch(LOOK_SECONDS):
                failures = _compute(application, batch, failures)
            elif is_last:
                break
        role.end()
        queue.wait_until_answered(LAST_SECONDS)
    finally:
        queue.fail_all(RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server ends because of an error"))
        http.end()


def _compute(application: Application, batch: Sequence[Item], failures: int) -> int:
    """Compute a batch, and give each request its results or an error.

    failures: the number of consecutive failed batches before this batch. Returns this number for the next batch.
    """
    role, metrics = application.role, application.metrics
    parts = [ticket.parts[number] for ticket, number in batch]
    tokens, started = sum(part.tokens for part in parts), time.monotonic()
    try:
        outcomes = role.compute(parts)
    except (RuntimeError, ValueError) as error:
        # Only the requests of this batch fail. After several failed batches in a row, the server ends, because the
        # GPU may be lost. With several ranks, the server ends at once, because other ranks may still be in the
        # forward pass that has failed on this rank.
        metrics.failed_batches.inc()
        is_memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)
        problem = "too little memory for a batch: send fewer tokens" if is_memory else "the forward pass has failed"
        for ticket, _ in batch:
            ticket.fail(RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, problem))
        print(f"a batch of {tokens:,} tokens failed: {first_line(error)}", file=sys.stderr, flush=True)
        failures += not is_memory
        if not role.survives_failures or failures >= MAX_FAILURES:
            raise
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return failures
    seconds = time.monotonic() - started
    application.queue.record_speed(tokens, seconds)
    metrics.batch(tokens, seconds)
    for (ticket, number), outcome in zip(batch, outcomes, strict=True):
        if isinstance(outcome, NotFiniteError):
            ticket.fail(RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, str(outcome)))
        else:
            ticket.finish(number, outcome)
    return 0
