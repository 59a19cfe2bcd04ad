"""Writes completions over HTTP: the command `stillhouse serve --generate`.

It is the scoring server with another model loop (see `serving/server/serve.py`): the model runs in the main thread,
HTTP in a thread of its own, and requests that wait together share batches. `POST /v1/weights` replaces the weights
between two batches.
"""

import threading
from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse import __version__
from stillhouse.data import check_vocabulary, load_tokenizer, tokenizer_fingerprint
from stillhouse.generation.generate import Generator, check_generation
from stillhouse.generation.sample import Completion, Sampling
from stillhouse.generation.token_sampler import stop_texts
from stillhouse.models import Decoder, check_finite_weights, eos_ids
from stillhouse.parallel import choose_device, local_folder, log_rank0, process_count
from stillhouse.preemption import finishing
from stillhouse.serving.generate.app import GenerationService, make_app
from stillhouse.serving.generate.protocol import GenerationPart, Written
from stillhouse.serving.generate.updates import FIRST_VERSION, WeightUpdates
from stillhouse.serving.server.batching import RequestQueue
from stillhouse.serving.server.http import (
    HttpThread,
    bound,
    check_address,
    check_sizes,
    ready_line,
)
from stillhouse.serving.server.limits import Limits
from stillhouse.serving.server.loop import Loop, is_ending
from stillhouse.serving.server.metrics import Metrics
from stillhouse.serving.server.teacher import longest_sequence
from stillhouse.signals.scorer import NotFiniteError


class Writer:
    """Writes the completions of a batch. The requests of a batch may draw their tokens in different ways."""

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        batch_tokens: int,
        tokenizer: PreTrainedTokenizerBase,
        updates: WeightUpdates,
    ):
        self._decoder, self._device, self._batch_tokens = decoder, device, batch_tokens
        self._tokenizer, self._updates = tokenizer, updates

    def write(self, parts: Sequence[GenerationPart]) -> list[Written | NotFiniteError]:
        alike: dict[Sampling, list[int]] = {}
        for at, part in enumerate(parts):
            alike.setdefault(part.sampling, []).append(at)
        found: dict[int, Written | NotFiniteError] = {}
        for sampling, members in alike.items():
            generator = Generator(
                self._decoder,
                sampling,
                self._device,
                batch_tokens=self._batch_tokens,
                vocabulary=len(self._tokenizer),
                tokenizer=self._tokenizer,
            )
            try:
                completions = generator.generate([parts[at].request for at in members], 0)
            except NotFiniteError as error:
                found |= dict.fromkeys(members, error)
                continue
            version = self._updates.version
            for at, each in zip(members, completions, strict=True):
                found[at] = Written(each, version, self._stop_text(each, sampling))
        return [found[at] for at in range(len(parts))]

    def _stop_text(self, completion: Completion, sampling: Sampling) -> str | None:
        if completion.finish == "length" or completion.ids_N[-1] in sampling.eos_ids:
            return None
        return stop_texts([completion.ids_N.tolist()], sampling.stop, self._tokenizer)[0]


def serve_completions(
    model: str,
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
    stop: threading.Event | None = None,
) -> None:
    """Serve completions of a model until a signal comes or `stop` is set. The arguments are those of `serve`.

    Raises ValueError for a model that cannot generate and for several processes, and OSError for an address that
    cannot be used.
    """
    check_address(host, token, require_token=require_token)
    check_sizes(batch_tokens, queue_tokens)
    if process_count() > 1:
        raise ValueError(
            f"--generate under {process_count()} processes: expected one process, which has the whole model; start a "
            "server for each GPU, or vLLM for a model that does not fit on one"
        )
    queue_tokens = 16 * batch_tokens if queue_tokens is None else queue_tokens
    listening = bound(host, port)  # before the model is loaded, so that a port in use is reported at once
    chosen = choose_device(device)
    source = local_folder(model, revision)
    tokenizer = load_tokenizer(source)
    decoder = Decoder.from_pretrained(source, dtype=dtype, attention=attention, device=chosen)
    decoder.requires_grad_(False).eval()
    check_finite_weights(decoder, "model")
    check_vocabulary(tokenizer, decoder.vocabulary_rows, "model")
    check_generation(decoder, chosen)
    queue, updates = RequestQueue(batch_tokens, queue_tokens, partial(is_ending, stop)), WeightUpdates(decoder)
    longest = longest_sequence(decoder, batch_tokens)
    ends = eos_ids(tokenizer, decoder)
    service = GenerationService(
        name=model,
        info=_info(model, decoder, tokenizer, longest, ends),
        limits=Limits(decoder.vocabulary_rows, longest, longest, 1, ()),
        queue=queue,
        metrics=Metrics(queue),
        token=token,
        eos=ends,
        updates=updates,
    )
    with finishing("the requests that were accepted"):
        server = HttpThread(make_app(service), [listening])
        log_rank0(
            f"model {model}: vocabulary of {decoder.vocabulary_rows:,} rows, {service.info['dtype']} on "
            f"{chosen.type}; completions of at most {longest:,} tokens with their prompt"
        )
        log_rank0(ready_line(listening, token))
        writer = Writer(decoder, chosen, batch_tokens, tokenizer, updates)
        Loop(writer.write, service, server, between=updates.apply, at_end=updates.close).run()


def _info(
    model: str, decoder: Decoder, tokenizer: PreTrainedTokenizerBase, longest: int, ends: tuple[int, ...]
) -> dict[str, object]:
    return {
        "stillhouse": __version__,
        "model": model,
        "generates": True,
        "version": FIRST_VERSION,
        "vocabulary": decoder.vocabulary_rows,
        "dtype": str(next(decoder.parameters()).dtype).removeprefix("torch."),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "eos_token_ids": list(ends),
        "max_tokens": longest,
    }
