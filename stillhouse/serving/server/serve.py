"""Serves a teacher's exact signals over HTTP: the command `stillhouse serve`.

The model runs in the main thread, which takes batches from the queue. HTTP runs in a thread of its own.
Under torchrun, the ranks share the model (tensor parallel); rank 0 speaks HTTP, and the other ranks compute the same
batches.

The first SIGTERM or Ctrl-C: accept nothing more, answer what was accepted, end with exit code 0. The second one ends
the process at once.
"""

import socket
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from stillhouse.parallel import destroy_process_group, is_first, log_rank0, wait_for_all, watchdog
from stillhouse.preemption import finishing
from stillhouse.serving.server.app import Service, make_app
from stillhouse.serving.server.batching import RequestQueue
from stillhouse.serving.server.http import (
    HttpThread,
    bound,
    check_address,
    check_sizes,
    ready_line,
)
from stillhouse.serving.server.limits import SIGNALS, SIGNALS_OF_SHARDS, Limits
from stillhouse.serving.server.loop import Loop, is_ending
from stillhouse.serving.server.metrics import Metrics
from stillhouse.serving.server.ranks import Ranks
from stillhouse.serving.server.teacher import (
    HEAD,
    ServedTeacher,
    load_teacher,
    longest_sequence,
    with_limits,
)
from stillhouse.signals.scorer import Outcome, Part, Scorer


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
    quantize: str | None = None,
    batch_tokens: int = 16384,
    queue_tokens: int | None = None,
    max_top_k: int = 256,
    stop: threading.Event | None = None,
) -> None:
    """Serve a teacher until a signal comes (see `preemption.handling`) or `stop` is set.

    teacher: a folder or a hub id. quantize: "int8" or "nf4", for a single process. port: 0 for a free one. token: the
    bearer token of all routes but /healthz. An address other than loopback needs one, unless require_token is False.
    batch_tokens: the most tokens of a forward pass, and so of a sequence. queue_tokens: the most tokens of all
    requests at a time; 16 batches by default. max_top_k: the most ids per token.

    Raises ValueError for a teacher that cannot be served, and OSError for an address that cannot be used.
    """
    check_address(host, token, require_token=require_token)
    check_sizes(batch_tokens, queue_tokens)
    if max_top_k < 1:
        raise ValueError(f"top-k {max_top_k}: expected 1 or more")
    queue_tokens = 16 * batch_tokens if queue_tokens is None else queue_tokens
    # before the model is loaded, so that a port in use is reported at once
    sockets = [bound(host, port)] if is_first() else []
    with TemporaryDirectory(prefix="stillhouse-serve-") as temporary:
        folder = Path(temporary) / "teacher"
        served = load_teacher(
            teacher,
            folder,
            dtype=dtype,
            device=device,
            attention=attention,
            revision=revision,
            quantize=quantize,
        )
        wait_for_all()  # a rank that cannot load the model ends the command before it is said to be ready
        watchdog.enter("serving", timed=False)
        scorer, ranks = Scorer(served.runner, served.device), Ranks(served.mesh)
        with finishing("the requests that were accepted"):
            if is_first():
                decoder = served.runner.students()[0]
                longest = longest_sequence(decoder, batch_tokens)
                most = max(batch_tokens, queue_tokens // 4)
                signals = SIGNALS if served.mesh.ranks.size == 1 else SIGNALS_OF_SHARDS
                limits = Limits(decoder.vocabulary_rows, longest, most, max_top_k, signals)
                queue = RequestQueue(batch_tokens, queue_tokens, partial(is_ending, stop))
                service = _service(served, limits, queue, token)
                server = HttpThread(make_app(service), sockets)
                _print_ready(service, sockets[0], served)

                def score(parts: Sequence[Part]) -> list[Outcome]:
                    ranks.send(parts)
                    return scorer.score(parts)

                Loop(score, service, server, between=ranks.beat, at_end=ranks.send_end, survives=ranks.is_alone).run()
            else:
                ranks.follow(scorer)
        destroy_process_group()


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
    over = "" if mesh.ranks.size == 1 else f" over {mesh.ranks.size} ranks"
    log_rank0(
        f"teacher {info['model']}: vocabulary of {info['vocabulary']:,} rows, width {info['width']:,}, "
        f"{info['quantize'] or info['dtype']} on {served.device.type}{over}"
    )
    log_rank0(
        f"signals: {', '.join(info['signals'])}; at most {info['max_top_k']} ids per token, {info['max_tokens']:,} "
        f"tokens per sequence, {info['max_request_tokens']:,} per request"
    )
    log_rank0(ready_line(listening, service.token))
