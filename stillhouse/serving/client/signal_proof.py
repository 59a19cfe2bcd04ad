"""Proves before the first step that servers give the signals of the configured teacher.

A server can answer without an error and still be wrong. For example, its rows may be shifted by a token, it may
ignore the temperature, or it may have lost its weights in a sleep mode. The proof sends a few documents of the run's
data to every server, and an error says what is wrong.

N rows, K ids per row.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.config.servers import ServerError
from stillhouse.data import Documents
from stillhouse.data.media import MediaInputs
from stillhouse.libraries import reading
from stillhouse.models import Decoder, NotFiniteError
from stillhouse.objective import OutputHead, linear_log_probs
from stillhouse.parallel import single_process_runner
from stillhouse.proofs.servers import (
    SAME,
    require_aligned,
    require_informed,
    require_near,
    require_temperature,
    row_differences,
)
from stillhouse.serving.client.apis.server_api import NeedsModelError, UnknownTokenizerError
from stillhouse.serving.client.remote_signals import RemoteSignals
from stillhouse.serving.client.signal_probes import (
    changed_place,
    image_places,
    is_placeholder,
    make_probes,
    with_changed_token,
    with_other_images,
)
from stillhouse.signals.scorer import Scorer, ScoreRequest, proven_media_inputs
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: seconds for a repeated proof of one server
REPEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Proof:
    """The requests at the start of the run, and the answers. Later answers are compared with them.

    findings: the results of the proof, in words.
    """

    store: RemoteSignals
    spec: SignalSpec
    probes: Sequence[DocumentRows]
    answers: Sequence[dict[str, Tensor]]
    findings: Sequence[str]

    def repeat(self, urls: Sequence[str]) -> set[str]:
        """Raise ValueError if one of these servers no longer gives the answers of the start.

        Returns the URLs of the servers that have answered.
        """
        proven: set[str] = set()
        for url in urls:
            try:
                answers = self.store.scores(self.probes, url=url, spec=self.spec, timeout=REPEAT_SECONDS)
            except ServerError:
                continue
            self._require_same(answers, f"{url} no longer gives the signals that it gave at the start")
            proven.add(url)
        return proven

    def compare(self, path: Path) -> None:
        """Raise ValueError if the answers differ from those that `save` wrote to this file."""
        with reading(f"{path} is damaged: restore it, or choose another folder as out"):
            tensors = load_file(path)
            before = [
                {name: tensors[f"{number} {name}"] for name in answer} for number, answer in enumerate(self.answers)
            ]
            if any(
                one[name].shape != other[name].shape
                for one, other in zip(before, self.answers, strict=True)
                for name in one
            ):
                raise ValueError("it is of another run")
        self._require_same(before, f"{self.store.name} does not give the signals that it gave when this run began")

    def save(self, path: Path) -> None:
        """Write the answers, so that a resumed run can detect another teacher at the same address."""
        named = {
            f"{number} {name}": tensor.contiguous()
            for number, answer in enumerate(self.answers)
            for name, tensor in answer.items()
        }
        save_file(named, path)

    def _require_same(self, other: Sequence[dict[str, Tensor]], what: str) -> None:
        require_near(self.answers, other, what, "were its weights changed?")


def prove(
    store: RemoteSignals,
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    *,
    local: Decoder | None = None,
    head: OutputHead | None = None,
    media_inputs: MediaInputs | None = None,
) -> Proof:
    """Score a few documents on every server. Raises ValueError for a wrong answer.

    tokenizer: the student's tokenizer. local: the teacher in this process, with which the answers are compared. head:
    the teacher's output head, with which the cross-entropy of the next tokens is computed from hidden states.
    media_inputs: makes the tensors of the documents' images; None without images.
    """
    probes = make_probes(documents, media_inputs)
    _prove_tokenizer(store, probes, tokenizer)
    spec = _comparable(store)
    first = store.scores(probes, url=store.servers[0].url, spec=spec)
    for server in store.servers:
        proof = _ServerProof(store, spec, probes, server.url, store.scores(probes, url=server.url, spec=spec))
        require_informed(server.url, proof.answers, store.vocabulary)
        proof.prove_alignment()
        proof.prove_images()
        proof.prove_temperature()
        both = f"{server.url} and {store.servers[0].url} give different signals for the same tokens"
        require_near(proof.answers, first, both, "expected servers of the same teacher")
        proof.prove_signal_of_run()
    findings = [f"{len(probes)} documents on {len(store.servers)} server(s)"]
    findings += _cross_entropy(probes, first, head, store.vocabulary)
    if local is not None:
        findings.append(_prove_local(store, spec, probes, first, local, media_inputs))
    elif store.servers[0].identity is None:
        findings.append("its weights were not compared with files here")
    return Proof(store, spec, probes, first, findings)


def _comparable(store: RemoteSignals) -> SignalSpec:
    """The run's signal. For "chosen" and "sampled", a "top_k" signal, whose answers can be compared."""
    spec = store.signal
    if spec.kind not in ("chosen", "sampled"):
        return spec
    caps = [server.max_top_k for server in store.servers if server.max_top_k is not None]
    most = min([64, store.vocabulary or 64, *caps])
    return replace(spec, kind="top_k", top_k=most if spec.kind == "sampled" else min(most, spec.top_k or most))


def _prove_tokenizer(
    store: RemoteSignals, probes: Sequence[DocumentRows], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Compare the servers' tokenizer with the run's, unless the teacher's files are here to be compared instead."""
    if store.teacher_folder is not None:
        return
    text = tokenizer.decode(probes[0].tokens.tolist(), skip_special_tokens=True)
    for server in store.servers:
        ask = store.pool.asker(server.url)
        try:
            store.api.require_tokenizer(ask, server.url, server.model, tokenizer, text)
        except UnknownTokenizerError as error:
            raise NeedsModelError(
                f"{server.url} does not tell its tokenizer, and an id beyond its vocabulary may stop it; expected "
                "the model that the server has loaded"
            ) from error


@dataclass(frozen=True)
class _ServerProof:
    """One server's answers for the probes, and the checks of these answers."""

    store: RemoteSignals
    spec: SignalSpec
    probes: Sequence[DocumentRows]
    url: str
    answers: Sequence[dict[str, Tensor]]

    def prove_alignment(self) -> None:
        """Change one token of each document. Its row and later rows must change, and earlier rows must not."""
        places = [changed_place(probe) for probe in self.probes]
        changed = [
            with_changed_token(probe, place, self.probes) for probe, place in zip(self.probes, places, strict=True)
        ]
        others = self.store.scores(changed, url=self.url, spec=self.spec)
        require_aligned(self.url, places, self.answers, others)

    def prove_images(self) -> None:
        """Change the images of each document. The rows from the first image on must change, and no earlier rows."""
        numbers = [number for number, probe in enumerate(self.probes) if probe.media is not None]
        if not numbers:
            return
        changed = [with_other_images(self.probes[number]) for number in numbers]
        others = self.store.scores(changed, url=self.url, spec=self.spec)
        for number, other in zip(numbers, others, strict=True):
            first = image_places(self.probes[number])[0]
            differences_N = row_differences(self.answers[number], other)
            before, after = float(differences_N[:first].sum()), float(differences_N[first:].max())
            if not after > 5 * before or not after > 0:
                raise ValueError(
                    f"{self.url} ignores images: with other images in a document, its rows before the first image "
                    f"changed by {before:.2g}, and those from it on by {after:.2g}"
                )

    def prove_temperature(self) -> None:
        """Raise ValueError unless gaps of log-probabilities at temperature τ are those at 1, divided by τ."""
        temperature = self.spec.temperature
        if temperature is None or temperature == 1.0:
            return
        at_1 = self.store.scores(self.probes, url=self.url, spec=replace(self.spec, temperature=1.0))
        require_temperature(self.url, temperature, self.answers, at_1)

    def prove_signal_of_run(self) -> None:
        """If `spec` is not the run's signal, request the run's signal. If that is "chosen", compare both answers."""
        if self.spec == self.store.signal:
            return
        is_chosen = self.store.signal.kind == "chosen"
        with_ids = [
            replace(probe, ids_NK=answer["ids"]) for probe, answer in zip(self.probes, self.answers, strict=True)
        ]
        again = self.store.scores(with_ids if is_chosen else self.probes, url=self.url)
        if is_chosen:
            what = f"{self.url} scores chosen ids otherwise than the same ids as its top ids"
            require_near(again, self.answers, what, "expected the same rows and temperature")


def _cross_entropy(
    probes: Sequence[DocumentRows],
    answers: Sequence[dict[str, Tensor]],
    head: OutputHead | None,
    vocabulary: int | None,
) -> Iterator[str]:
    """The mean cross-entropy of the next tokens, in words. It is high if the teacher does not fit the data."""
    losses: list[Tensor] = []
    about = ""
    for document, tensors in zip(probes, answers, strict=True):
        next_N = torch.from_numpy(document.tokens[1:].astype(np.int64))
        is_text_N = torch.from_numpy(~is_placeholder(document)[1:])
        if head is not None and "hidden" in tensors:
            losses.append(-linear_log_probs(tensors["hidden"].to(head.weight_VD.dtype), head, next_N)[0][is_text_N])
        elif "ids" in tensors:
            is_next_NK = tensors["ids"] == next_N[:, None]
            outside_N = tensors["tail_log_prob"].double()
            if vocabulary is None:
                about = "at least "
            else:  # an estimate: the probability outside the ids is divided equally among all other tokens
                about, outside_N = "about ", outside_N - math.log(max(1, vocabulary - is_next_NK.shape[1]))
            next_log_prob_N = tensors["log_probs"].double().masked_fill(~is_next_NK, -math.inf).amax(1)
            losses.append(-torch.where(is_next_NK.any(1), next_log_prob_N, outside_N)[is_text_N])
    if losses:
        mean = float(torch.cat(losses).detach().mean())
        uniform = "" if vocabulary is None else f", {math.log(vocabulary):.2f} if it knew nothing"
        yield f"cross-entropy {about}{mean:.2f} nats per token{uniform}"


def _prove_local(
    store: RemoteSignals,
    spec: SignalSpec,
    probes: Sequence[DocumentRows],
    answers: Sequence[dict[str, Tensor]],
    local: Decoder,
    media_inputs: MediaInputs | None,
) -> str:
    first_parameter = next(local.parameters())
    has_images = media_inputs is not None and any(probe.media is not None for probe in probes)
    inputs = proven_media_inputs(local, media_inputs.processor) if media_inputs is not None and has_images else None
    scorer = Scorer(single_process_runner(local, None), first_parameter.device, inputs)
    scored: list[dict[str, Tensor]] = []
    for outcome in scorer.score([ScoreRequest(probe, spec) for probe in probes]):
        if isinstance(outcome, NotFiniteError):
            raise outcome
        scored.append(outcome)
    # a server that does not report its dtype may compute in half precision
    is_float32 = {store.servers[0].dtype, spec.dtype, str(first_parameter.dtype)[6:]} == {"float32"}
    both = f"{store.name} and the model in this process give different signals for the same tokens"
    worst = require_near(answers, scored, both, "expected the same weights", 1e-3 if is_float32 else SAME)
    return f"it differs from the same model in this process by at most {worst:.1e}"
