"""Proves before the first step that servers give the signals of the configured teacher.

A server can answer without an error and still be wrong: its rows may be shifted by a token, it may ignore the
temperature, or it may have lost its weights. So every server scores a few documents of the run's data, and changed
copies of these documents. N is the number of rows, E the teacher's width, and K the number of ids per row.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.config.servers import ServerError
from stillhouse.data import Documents
from stillhouse.data.media import DocumentMedia, MediaInputs, MediaTensors
from stillhouse.libraries import reading
from stillhouse.models import Decoder, NotFiniteError
from stillhouse.models.load_proof import compare
from stillhouse.objective import OutputHead, linear_log_probs
from stillhouse.parallel import single_process_runner
from stillhouse.serving.client.server_api import NeedsModelError, UnknownTokenizerError
from stillhouse.signals.scorer import Scorer, ScoreRequest, proven_media_inputs
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

if TYPE_CHECKING:
    from stillhouse.serving.client.served_teacher import RemoteSignals

#: a signal's tensors for the rows of one document
Signal = Mapping[str, Tensor]
#: requests the signals of documents from one server
Score = Callable[[Sequence[DocumentRows]], Sequence[Signal]]

#: the maximum number of seconds for a repeated proof of one server
REPEAT_SECONDS = 5.0
#: the largest allowed `_row_differences` of two answers to one request; rounding depends on batches and kernels
SAME = 0.05
#: the most documents without images and with images that are scored, and the most tokens of a document without images
PROBES, IMAGE_PROBES, PROBE_TOKENS = 4, 2, 128
#: the fewest tokens of a document, because `_prove_alignment` needs a row before the changed token and a row after it
LEAST_TOKENS = 4
#: the probes are chosen among the first documents: this number with images, and this number without images
_CHOICE = 100


@dataclass(frozen=True)
class Proof:
    """The requests at the start of the run, and the answers. Later answers are compared with these answers.

    findings: the results of the proof, in words.
    """

    store: "RemoteSignals"
    spec: SignalSpec
    probes: Sequence[DocumentRows]
    answers: Sequence[Signal]
    findings: Sequence[str]

    def repeat(self, urls: Iterable[str]) -> set[str]:
        """Send the requests again; return the servers that answer. Raises ValueError if an answer has changed."""
        proven: set[str] = set()
        for url in urls:
            try:
                answers = self.store.scores(self.probes, url=url, spec=self.spec, timeout=REPEAT_SECONDS)
            except ServerError:
                continue
            changed = f"{url} no longer gives the signals that it gave at the start"
            _require_near(self.answers, answers, changed, "were its weights changed?")
            proven.add(url)
        return proven

    def compare(self, path: Path) -> None:
        """Raise ValueError if the answers differ from those that `save` wrote to this file."""
        with reading(f"{path} is damaged: restore it, or choose another folder as out"):
            tensors = load_file(path)
            before = [{name: tensors[f"{at} {name}"] for name in answer} for at, answer in enumerate(self.answers)]
            pairs = zip(before, self.answers, strict=True)
            if any(one[name].shape != other[name].shape for one, other in pairs for name in one):
                raise ValueError("it belongs to another run")
        changed = f"{self.store.name} does not give the signals that it gave when this run began"
        _require_near(self.answers, before, changed, "were its weights changed?")

    def save(self, path: Path) -> None:
        """Write the answers, so that a resumed run can detect another teacher at the same address."""
        answers = enumerate(self.answers)
        save_file({f"{at} {name}": it.contiguous() for at, answer in answers for name, it in answer.items()}, path)


def prove(
    store: "RemoteSignals",
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    *,
    local: Decoder | None = None,
    head: OutputHead | None = None,
    media_inputs: MediaInputs | None = None,
) -> Proof:
    """Score a few documents on every server. Raises ValueError for a wrong answer.

    tokenizer: the student's tokenizer.
    local: the teacher in this process, with whose signals the servers' signals are compared; None skips this.
    head: the teacher's output head, for the cross-entropy of hidden states.
    media_inputs: makes the tensors of images; None if no document has images.
    """
    probes, spec, servers = make_probes(documents, media_inputs), store.signal, store.servers
    if store.teacher_folder is None:  # otherwise the tokenizer of the teacher's files is compared with the run's
        text = tokenizer.decode(probes[0].tokens.tolist(), skip_special_tokens=True)
        for server in servers:
            try:
                store.api.require_tokenizer(store.pool.asker(server.url), server.url, server.model, tokenizer, text)
            except UnknownTokenizerError as error:
                raise NeedsModelError(
                    f"{server.url} does not report its tokenizer, and an id beyond its vocabulary may stop it; "
                    "expected the model that the server has loaded"
                ) from error
    if spec.kind in ("chosen", "sampled"):  # the proof of these signals compares answers of "top_k"
        most = min([64, store.vocabulary or 64, *(s.max_top_k for s in servers if s.max_top_k is not None)])
        spec = replace(spec, kind="top_k", top_k=most if spec.kind == "sampled" else min(most, spec.top_k or most))
    first = store.scores(probes, url=servers[0].url, spec=spec)
    for server in servers:
        _prove_server(store, spec, probes, server.url, first)
    findings = [f"{len(probes)} documents on {len(servers)} server(s)"]
    findings += _cross_entropy(probes, first, head, store.vocabulary)
    if local is not None:
        first_parameter = next(local.parameters())
        inputs = None
        if media_inputs is not None and any(probe.media is not None for probe in probes):
            inputs = proven_media_inputs(local, media_inputs.processor)
        scorer = Scorer(single_process_runner(local, None), first_parameter.device, inputs)
        scored = list[Signal]()
        for outcome in scorer.score([ScoreRequest(probe, spec) for probe in probes]):
            if isinstance(outcome, NotFiniteError):
                raise outcome
            scored.append(outcome)
        # the tolerance 1e-3 needs a server that reports float32; other servers may compute in half precision
        is_float32 = {servers[0].dtype, spec.dtype, str(first_parameter.dtype)[6:]} == {"float32"}
        both = f"{store.name} and the model in this process give different signals for the same tokens"
        worst = _require_near(first, scored, both, "expected the same weights", 1e-3 if is_float32 else SAME)
        findings.append(f"it differs from the same model in this process by at most {worst:.1e}")
    elif servers[0].identity is None:
        findings.append("its weights were not compared with local files")
    return Proof(store, spec, probes, first, findings)


def make_probes(documents: Documents, media_inputs: MediaInputs | None = None) -> list[DocumentRows]:
    """Return the beginnings of long documents without images, and short documents with images.

    media_inputs: makes the tensors of images; None if no document has images.
    Raises ValueError if the documents are too short.
    """
    images, lengths_D = documents.media, documents.lengths_D
    has_images_D = np.zeros(len(documents), dtype=bool) if images is None else np.diff(images.offsets) > 0
    texts = sorted(np.flatnonzero(~has_images_D)[:_CHOICE].tolist(), key=lambda number: -lengths_D[number])
    beginnings = [documents.tokens(number)[:PROBE_TOKENS] for number in texts[:PROBES]]
    probes = [DocumentRows(tokens, range(len(tokens) - 1)) for tokens in beginnings if len(tokens) >= LEAST_TOKENS]
    has_image_probe = False
    numbers = sorted(np.flatnonzero(has_images_D)[:_CHOICE].tolist(), key=lambda number: lengths_D[number])
    for number in numbers:
        assert media_inputs is not None
        whole = DocumentRows(documents.tokens(number), range(1), media=media_inputs.of(documents, number))
        # keep at least LEAST_TOKENS tokens after the last image
        tokens = whole.tokens[: max(PROBE_TOKENS, np.flatnonzero(_is_placeholder(whole))[-1] + 1 + LEAST_TOKENS)]
        probe = replace(whole, tokens=tokens, rows=range(len(tokens) - 1))
        if _changeable(probe).any():
            has_image_probe = True
            probes.append(probe)
        if sum(probe.media is not None for probe in probes) == IMAGE_PROBES:
            break
    if numbers and not has_image_probe:
        raise ValueError(
            f"none of the first {len(numbers)} documents with images has {LEAST_TOKENS} tokens after its images, "
            "so the teacher cannot be proven on images; expected longer documents"
        )
    if not probes:
        raise ValueError(
            f"none of the first hundred documents has {LEAST_TOKENS} tokens, so the teacher cannot be proven; "
            "expected longer documents"
        )
    return probes


def _is_placeholder(document: DocumentRows) -> np.ndarray:
    return np.isin(document.tokens, [] if document.media is None else list(document.media.placeholder_ids))


def _changeable(probe: DocumentRows) -> np.ndarray:
    """Return which tokens may be changed: all after the images, but neither the first token nor the last two."""
    places = np.arange(len(probe.tokens))
    first = 1 if probe.media is None else np.flatnonzero(_is_placeholder(probe))[-1] + 1
    return (places >= first) & (places <= len(places) - 3)


def _row_differences(one: Signal, other: Signal) -> Tensor:
    """Return the differences [N] between two answers for the same rows, from 0 to about 1.

    For hidden states, a difference is the relative error. For ids, it is the total variation distance; an id that
    only one of the answers has counts with probability 0 in the other answer.
    """
    if "hidden" in one:
        one_NE, other_NE = one["hidden"].double(), other["hidden"].double()
        return (one_NE - other_NE).norm(dim=1) / other_NE.norm(dim=1).clamp_min(1e-30)
    one_NK, other_NK = one["log_probs"].double().exp(), other["log_probs"].double().exp()
    same_NKK = one["ids"][:, :, None] == other["ids"][:, None, :]
    shared_NK = (same_NKK * other_NK[:, None, :]).sum(2)
    absent_NK = ~same_NKK.any(1)
    return ((one_NK - shared_NK).abs().sum(1) + (other_NK * absent_NK).sum(1)) / 2


def _require_near(
    answers: Sequence[Signal], expected: Sequence[Signal], what: str, fix: str, tolerance: float = SAME
) -> float:
    """Return the largest row difference. If it exceeds the tolerance, raise ValueError with `what` and `fix`."""
    differences = [_row_differences(*pair) for pair in zip(answers, expected, strict=True)]
    return compare(torch.cat(differences), tolerance, f"{what} (they differ by {{error:.2g}}): {fix}", ValueError)


def _prove_server(
    store: "RemoteSignals", spec: SignalSpec, probes: Sequence[DocumentRows], url: str, first: Sequence[Signal]
) -> None:
    """Prove one server. first: the answers of the first server for the probes."""
    score = partial(store.scores, url=url)
    answers = score(probes, spec=spec)
    _prove_informed(url, answers, store.vocabulary)
    _prove_alignment(url, partial(score, spec=spec), probes, answers)
    _prove_images(url, partial(score, spec=spec), probes, answers)
    temperature = spec.temperature
    if temperature is not None and temperature != 1.0:  # the temperature must divide the gaps
        at_1 = score(probes, spec=replace(spec, temperature=1.0))
        gap, gap_at_1 = (
            sum(float((answer["log_probs"][:, 0] - answer["log_probs"][:, -1]).double().sum()) for answer in scored)
            for scored in (answers, at_1)
        )
        if not abs(gap * temperature - gap_at_1) <= 0.01 * abs(gap_at_1):
            raise ValueError(
                f"{url} ignores the temperature {temperature:g}: the gaps between log-probabilities add up to "
                f"{gap:.4g}, and to {gap_at_1:.4g} at temperature 1"
            )
    both = f"{url} and {store.servers[0].url} give different signals for the same tokens"
    _require_near(answers, first, both, "expected servers of the same teacher")
    if spec != store.signal and store.signal.kind == "chosen":
        again = score([replace(probe, ids_NK=answer["ids"]) for probe, answer in zip(probes, answers, strict=True)])
        what = f"{url} gives chosen ids other log-probabilities than the same ids in the signal top_k"
        _require_near(again, answers, what, "expected the same rows and temperature")
    elif spec != store.signal:
        score(probes)


def _prove_informed(url: str, answers: Sequence[Signal], vocabulary: int | None) -> None:
    """Raise ValueError for uniform distributions or equal hidden states, which show that the server has lost the
    weights. Also raise it for normalised hidden states.
    """
    if "hidden" in answers[0]:
        hidden_NE = torch.cat([answer["hidden"] for answer in answers]).float()
        spread = (hidden_NE - hidden_NE[0]).norm() / hidden_NE.norm().clamp_min(1e-30)
        if not spread > 1e-6:
            raise ValueError(f"{url} gives the same hidden state for every token: it has lost the teacher's weights")
        if ((hidden_NE.norm(dim=1) - 1).abs() < 5e-3).all():
            raise ValueError(f"{url} gives hidden states of length 1: expected a server that does not normalise them")
        return
    log_probs_NK = torch.cat([answer["log_probs"] for answer in answers]).float()
    if (log_probs_NK.amax(1) - log_probs_NK.amin(1)).max() < 1e-4 and log_probs_NK.shape[1] > 1:
        uniform = "" if vocabulary is None else f" (−ln {vocabulary} is {-math.log(vocabulary):.4f})"
        raise ValueError(
            f"{url} gives every id the log-probability {float(log_probs_NK.mean()):.4f}{uniform}: its "
            "distributions are uniform, because it has lost the teacher's weights"
        )


def _prove_alignment(url: str, score: Score, probes: Sequence[DocumentRows], answers: Sequence[Signal]) -> None:
    """Raise ValueError unless a change of one token changes its row and later rows, but not the earlier rows."""
    text_tokens = np.unique(np.concatenate([probe.tokens[~_is_placeholder(probe)] for probe in probes]))
    changed, places = list[DocumentRows](), list[int]()
    for probe in probes:
        changeable, tokens = np.flatnonzero(_changeable(probe)), probe.tokens.copy()
        place = int(changeable[(len(changeable) - 1) // 2])
        others = text_tokens[text_tokens != tokens[place]]
        tokens[place] = others[place % len(others)] if len(others) else int(tokens[place] == 0)
        changed.append(replace(probe, tokens=tokens))
        places.append(place)
    before = at_token = after = 0.0
    for place, answer, other in zip(places, answers, score(changed), strict=True):
        differences_N = _row_differences(answer, other)
        before += float(differences_N[:place].max())
        at_token += float(differences_N[place])
        after += float(differences_N[place + 1 :].max())
    if not at_token > 5 * before or not at_token > 0:
        raise ValueError(
            f"{url}: after one token was changed, the rows before it changed by {before:.2g} and its own row by "
            f"{at_token:.2g}. The rows are shifted, or the model is not causal; row t must be the distribution of "
            "token t + 1"
        )
    if not after > before:
        raise ValueError(f"{url}: no row depends on an earlier token: the server has lost the teacher's layers")


def _prove_images(url: str, score: Score, probes: Sequence[DocumentRows], answers: Sequence[Signal]) -> None:
    """Raise ValueError unless changed images (inverted and mirrored) change rows, but none before the first image."""
    changed, expected = list[DocumentRows](), list[Signal]()
    for probe, answer in zip(probes, answers, strict=True):
        if (images := probe.media) is not None:
            tensors, sizes = images.read()
            other = {name: -it.flip(-1) if it.is_floating_point() else it for name, it in tensors.items()}
            made = MediaTensors(other, sizes)
            media = DocumentMedia(b"", lambda made=made: made, images.placeholder_ids)  # type: ignore[misc]
            changed.append(replace(probe, media=media))
            expected.append(answer)
    for probe, answer, changed_answer in zip(changed, expected, score(changed) if changed else [], strict=True):
        first, differences_N = np.flatnonzero(_is_placeholder(probe))[0], _row_differences(answer, changed_answer)
        before, after = float(differences_N[:first].sum()), float(differences_N[first:].max())
        if not after > 5 * before or not after > 0:
            raise ValueError(
                f"{url} ignores images: with other images in a document, its rows before the first image changed by "
                f"{before:.2g}, and its later rows by {after:.2g}"
            )


def _cross_entropy(
    probes: Sequence[DocumentRows], answers: Sequence[Signal], head: OutputHead | None, vocabulary: int | None
) -> list[str]:
    """Return the mean cross-entropy of the next tokens in words. It is high if the teacher does not fit the data."""
    losses: list[Tensor] = []
    about = ""
    for document, tensors in zip(probes, answers, strict=True):
        next_N = torch.from_numpy(document.tokens[1:].astype(np.int64))
        is_text_N = torch.from_numpy(~_is_placeholder(document)[1:])
        if head is not None and "hidden" in tensors:
            losses.append(-linear_log_probs(tensors["hidden"].to(head.weight_VD.dtype), head, next_N)[0][is_text_N])
        elif "ids" in tensors:
            is_next_NK = tensors["ids"] == next_N[:, None]
            outside_N = tensors["tail_log_prob"].double()
            if vocabulary is None:
                about = "at least "
            else:  # estimate: all other tokens have the same share of the probability outside the ids
                about, outside_N = "about ", outside_N - math.log(max(1, vocabulary - is_next_NK.shape[1]))
            next_log_prob_N = tensors["log_probs"].double().masked_fill(~is_next_NK, -math.inf).amax(1)
            losses.append(-torch.where(is_next_NK.any(1), next_log_prob_N, outside_N)[is_text_N])
    if not losses:
        return []
    mean = float(torch.cat(losses).detach().mean())
    uniform = "" if vocabulary is None else f", {math.log(vocabulary):.2f} if it were uniform"
    return [f"cross-entropy {about}{mean:.2f} nats per token{uniform}"]
