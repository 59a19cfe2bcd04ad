"""Serves a model over HTTP: the command `stillhouse serve`.

The model runs in the main thread, which takes batches from the queue; HTTP has its own thread. Under torchrun, the
teacher is tensor-parallel over the ranks: rank 0 handles HTTP, and the other ranks compute the same batches.

After the first SIGTERM or Ctrl-C, the server accepts no more requests, answers the accepted ones, and ends with exit
code 0. A second signal ends the process at once.
"""

import socket
import threading
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from stillhouse.models.float8 import FP8
from stillhouse.parallel import (
    destroy_process_group,
    is_first,
    log_rank0,
    process_count,
    use_deterministic_algorithms,
    wait_for_all,
    watchdog,
)
from stillhouse.preemption import finishing
from stillhouse.serving.server.application import Application
from stillhouse.serving.server.generate.completion_writer import load_writer
from stillhouse.serving.server.http_thread import HttpThread, bound, check_address, ready_line
from stillhouse.serving.server.model_loop import ModelLoop, is_ending
from stillhouse.serving.server.request_queue import RequestQueue
from stillhouse.serving.server.role import ModelOptions, Role
from stillhouse.serving.server.score.served_teacher import load_teacher


def serve(
    model: str,
    *,
    generate: bool = False,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    require_token: bool = True,
    dtype: str = "auto",
    device: str = "auto",
    attention: str | None = None,
    revision: str | None = None,
    quantize: str | None = None,
    images: bool = False,
    batch_tokens: int = 16384,
    queue_tokens: int | None = None,
    max_top_k: int = 256,
    weights_root: str | None = None,
    deterministic: bool = False,
    stop: threading.Event | None = None,
) -> None:
    """Serve a model until a signal to end, such as SIGTERM (see `preemption.handling`), or until `stop` is set.

    model: a folder or a hub id. dtype, device, attention, revision, quantize, images: see `ModelOptions`.
    generate: True: generate completions; False: compute a teacher's signals.
    port: 0 means any free port.
    token: the bearer token of all routes except /healthz. An address other than loopback needs a token, unless
        require_token is False.
    batch_tokens: the most tokens of a batch, and therefore of a sequence.
    queue_tokens: the most tokens of all accepted requests; None: 16 · batch_tokens.
    max_top_k: the most ids per token of a signal.
    weights_root: with generate, the folder in which published weights are read; None: anywhere on this machine.
    deterministic: whether each request is computed by itself, with algorithms that give the same bits again.

    Raises ValueError for a model that cannot be served, and OSError for an address that cannot be used.
    """
    check_address(host, token, require_token=require_token)
    _check_sizes(batch_tokens, queue_tokens, max_top_k)
    if generate:
        _check_generation(quantize)
    root = _weights_root(weights_root, generate=generate)
    if deterministic:
        use_deterministic_algorithms()
    queue_tokens = 16 * batch_tokens if queue_tokens is None else queue_tokens
    # bind before the model is loaded, so that a port in use is reported at once
    sockets = [bound(host, port)] if is_first() else []
    options = ModelOptions(model, dtype, device, attention, revision, quantize, images)
    with TemporaryDirectory(prefix="stillhouse-serve-") as folder:
        role: Role
        if generate:
            role = load_writer(options, batch_tokens, root)
        else:
            role = load_teacher(options, Path(folder) / "teacher", batch_tokens, queue_tokens, max_top_k)
        wait_for_all()  # if a rank cannot load the model, the command must end before it prints that it is ready
        watchdog.enter("serving", timed=False)
        queue = RequestQueue(batch_tokens, queue_tokens, partial(is_ending, stop), deterministic=deterministic)
        with finishing("the requests that were accepted"):
            if is_first():
                _run(role, queue, sockets[0], token)
            else:
                role.follow()
        destroy_process_group()


def _run(role: Role, queue: RequestQueue, listening: socket.socket, token: str | None) -> None:
    application = Application(role, queue, token, listening.getsockname()[0])
    server = HttpThread(application.api, listening)
    for line in [*role.description(), ready_line(listening, token)]:
        log_rank0(line)
    ModelLoop(application, server).run()


def _check_generation(quantize: str | None) -> None:
    if process_count() > 1:
        raise ValueError(
            f"--generate under {process_count()} processes: expected one process, which has the whole model; start a "
            "server for each GPU, or vLLM for a model that does not fit on one"
        )
    if quantize == FP8:
        raise ValueError(f"quantize={quantize} with generate: expected int8 or nf4, whose layers take adapters")


def _weights_root(folder: str | None, *, generate: bool) -> Path | None:
    if folder is None:
        return None
    if not generate:
        raise ValueError(f"--weights-root {folder} without --generate: only a server of completions loads weights")
    if not Path(folder).is_dir():
        raise ValueError(f"--weights-root {folder}: expected an existing folder, below which runs publish weights")
    return Path(folder).resolve()


def _check_sizes(batch_tokens: int, queue_tokens: int | None, max_top_k: int) -> None:
    if batch_tokens < 1:
        raise ValueError(f"batch tokens {batch_tokens}: expected 1 or more")
    if queue_tokens is not None and queue_tokens < batch_tokens:
        raise ValueError(f"queue tokens {queue_tokens}: expected at least the {batch_tokens} tokens of a batch")
    if max_top_k < 1:
        raise ValueError(f"top-k {max_top_k}: expected 1 or more")
