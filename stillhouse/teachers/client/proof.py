"""Proves before the first step that servers give the signals of the teacher that is meant.

A server that is wrong may still answer: with the rows of the next token, with a temperature that it ignores, with
weights that it lost in a sleep. Each proof asks every server for a few documents of the run's own data, and refuses
what it finds by name.

N rows, K ids per row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents
from stillhouse.models import Decoder
from stillhouse.teachers.client.remote import RemoteSignals
from stillhouse.teachers.extract import Extract
from stillhouse.teachers.spec import DocumentRows, SignalSpec

#: documents that are scored, and how many tokens of each
PROBES, PROBE_TOKENS = 4, 128
#: between two answers to the same request: of a batch of other requests, on another kernel, in half precision
SAME = 0.05
#: between a server and the same model in this process
LOCAL = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}


@dataclass(frozen=True)
class Proof:
    """What was asked at the start and how the servers answered, so that it can be asked again.

    findings: what was proven, in words.
    """

    store: RemoteSignals
    spec: SignalSpec
    probes: Sequence[DocumentRows]
    answers: Sequence[dict[str, Tensor]]
    findings: Sequence[str]

    def repeat(self) -> None:
        """Raise ValueError if a server no longer answers what it answered at the start."""
        for server in self.store.servers:
            found = self.store.scores(self.probes, url=server.url, spec=self.spec)
            worst = _worst(found, self.answers)
            if not worst < SAME:
                raise ValueError(
                    f"{server.url} no longer gives the signals that it gave at the start (they differ by "
                    f"{worst:.2g}): were its weights changed?"
                )


def prove(
    store: RemoteSignals, documents: Documents, tokenizer: PreTrainedTokenizerBase, local: Decoder | None = None
) -> Proof:
    """Score a few documents on every server. Raises ValueError for whatever the servers get wrong.

    tokenizer: the run's own. local: the teacher in this process, to compare with.
    """
    probes = _probes(documents)
    _prove_tokenizer(store, probes, tokenizer)
    spec = store.signal
    if spec.kind in ("chosen", "sampled"):  # the same server gives ids that can be compared between requests
        spec = replace(spec, kind="top_k", top_k=min(64, store.vocabulary or 64))
    first = store.scores(probes, url=store.servers[0].url, spec=spec)
    for server in store.servers:
        found = store.scores(probes, url=server.url, spec=spec)
        _prove_informed(found, store.vocabulary, server.url)
        _prove_alignment(store, spec, probes, found, server.url)
        _prove_temperature(store, spec, probes, found, server.url)
        worst = _worst(found, first)
        if not worst < SAME:
            raise ValueError(
                f"{server.url} and {store.servers[0].url} give different signals for the same tokens (they differ by "
                f"{worst:.2g}): expected servers of the same teacher"
            )
    findings = [f"{len(probes)} documents on {len(store.servers)} server(s): aligned, informed"]
    if local is not None:
        findings.append(_prove_local(store, spec, probes, first, local))
    return Proof(store, spec, probes, first, findings)


def _probes(documents: Documents) -> list[DocumentRows]:
    """The beginnings of a few documents, the longest of the first hundred."""
    candidates = sorted(range(min(100, len(documents))), key=lambda number: -documents.lengths_D[number])
    beginnings = [documents.tokens(number)[:PROBE_TOKENS] for number in candidates[:PROBES]]
    return [DocumentRows(each, range(len(each) - 1)) for each in beginnings if len(each) > 1]


def _prove_tokenizer(
    store: RemoteSignals, probes: Sequence[DocumentRows], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Compare the server's tokenizer with the run's, if its files are not here to be compared."""
    if store.teacher_folder is not None:
        return
    text = tokenizer.decode(probes[0].tokens.tolist(), skip_special_tokens=True)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    for server in store.servers:
        found = store.api.tokenize(store.pool, server, text)
        if found is None:
            raise ValueError(
                f"{server.url} does not tell its tokenizer, and an id beyond its vocabulary may stop it: expected "
                "teacher.model, the model that the server has loaded"
            )
        if found != expected:
            at = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), -1)
            raise ValueError(
                f"{server.url} has another tokenizer than the student: of one text it makes {len(found)} ids and the "
                f"student's tokenizer {len(expected)}; they differ from id {at} on. Expected the same tokenizer"
            )


def _prove_informed(found: Sequence[dict[str, Tensor]], vocabulary: int | None, url: str) -> None:
    """Refuse a uniform distribution, and one that does not depend on the tokens: the server has lost its weights."""
    if "hidden" in found[0]:
        hidden_NE = torch.cat([each["hidden"] for each in found]).float()
        spread = (hidden_NE - hidden_NE[0]).norm() / hidden_NE.norm().clamp_min(1e-30)
        if not spread > 1e-6:
            raise ValueError(f"{url} gives the same hidden state for every token: it has lost the teacher's weights")
        return
    log_probs_NK = torch.cat([each["log_probs"] for each in found]).float()
    if (log_probs_NK.amax(1) - log_probs_NK.amin(1)).max() < 1e-4 and log_probs_NK.shape[1] > 1:
        uniform = "" if vocabulary is None else f" (−ln {vocabulary} is {-math.log(vocabulary):.4f})"
        raise ValueError(
            f"{url} gives every id the log-probability {float(log_probs_NK.mean()):.4f}{uniform}: the teacher is "
            "uniform; it has lost its weights"
        )


def _prove_alignment(
    store: RemoteSignals,
    spec: SignalSpec,
    probes: Sequence[DocumentRows],
    found: Sequence[dict[str, Tensor]],
    url: str,
) -> None:
    """Change one token of each document: the rows before it must stay, and its own row must change."""
    places = [(len(each.tokens) - 1) // 2 for each in probes]
    changed = [_changed(each, place, probes) for each, place in zip(probes, places, strict=True)]
    others = store.scores(changed, url=url, spec=spec)
    before, own = 0.0, 0.0
    for place, one, other in zip(places, found, others, strict=True):
        differences_N = _differences(one, other)
        before += float(differences_N[:place].max()) if place else 0.0
        own += float(differences_N[place])
    if not own > 5 * before or not own > 0:
        raise ValueError(
            f"{url}: after one token was changed, the rows before it changed by {before:.2g} and its own row by "
            f"{own:.2g}. The rows are shifted, or the model is not causal; row t must be the distribution of token "
            "t + 1"
        )


def _changed(document: DocumentRows, place: int, probes: Sequence[DocumentRows]) -> DocumentRows:
    """The document with another token of the data at one place."""
    tokens = document.tokens.copy()
    known = np.unique(np.concatenate([each.tokens for each in probes]))
    others = known[known != tokens[place]]
    tokens[place] = others[place % len(others)] if len(others) else (tokens[place] + 1) % max(2, int(known[0]) + 1)
    return replace(document, tokens=tokens)


def _prove_temperature(
    store: RemoteSignals,
    spec: SignalSpec,
    probes: Sequence[DocumentRows],
    found: Sequence[dict[str, Tensor]],
    url: str,
) -> None:
    """Gaps between log-probabilities at temperature τ are those at temperature 1 divided by τ."""
    if spec.temperature in (None, 1.0):
        return
    assert spec.temperature is not None
    plain = store.scores(probes, url=url, spec=replace(spec, temperature=1.0))
    gap, gap_at_1 = (
        sum(float((each["log_probs"][:, 0] - each["log_probs"][:, -1]).double().sum()) for each in answers)
        for answers in (found, plain)
    )
    if not abs(gap * spec.temperature - gap_at_1) <= 0.01 * abs(gap_at_1):
        raise ValueError(
            f"{url} ignores the temperature {spec.temperature:g}: the gaps between log-probabilities add up to "
            f"{gap:.4g}, and to {gap_at_1:.4g} at temperature 1"
        )


def _prove_local(
    store: RemoteSignals,
    spec: SignalSpec,
    probes: Sequence[DocumentRows],
    found: Sequence[dict[str, Tensor]],
    local: Decoder,
) -> str:
    own = [_scored_here(local, spec, each) for each in probes]
    worst = _worst(found, own)
    limit = LOCAL[str(next(local.parameters()).dtype).removeprefix("torch.")] if spec.dtype == "float32" else 0.05
    if not worst < limit:
        raise ValueError(
            f"{store.name} and the model in this process give different signals for the same tokens (they differ by "
            f"{worst:.2g}): expected the same weights, in the same precision"
        )
    return f"as the same model in this process, which differs by at most {worst:.1e}"


def _scored_here(local: Decoder, spec: SignalSpec, document: DocumentRows) -> dict[str, Tensor]:
    device = next(local.parameters()).device
    input_ids_BS = torch.from_numpy(document.tokens.astype(np.int64))[None].to(device)
    positions_BS = torch.arange(input_ids_BS.shape[1], device=device)[None]
    index_C = torch.arange(document.rows.start, document.rows.stop, device=device)
    with torch.no_grad():
        scored: dict[str, Tensor] = local(
            input_ids_BS, position_ids=positions_BS, processor=Extract(spec), context=index_C
        )
    return scored


def _worst(found: Sequence[dict[str, Tensor]], expected: Sequence[dict[str, Tensor]]) -> float:
    """The largest difference of any row; NaN if one of them is NaN."""
    return float(torch.cat([_differences(*each) for each in zip(found, expected, strict=True)]).max())


def _differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
    """How much each row differs, [N] from 0 to about 1.

    Of hidden states the relative error; of ids the total variation, where an id that the other one lacks has
    probability 0 there.
    """
    if "hidden" in one:
        one_NE, other_NE = one["hidden"].double(), other["hidden"].double()
        return (one_NE - other_NE).norm(dim=1) / other_NE.norm(dim=1).clamp_min(1e-30)
    one_NK, other_NK = one["log_probs"].double().exp(), other["log_probs"].double().exp()
    same_NKK = one["ids"][:, :, None] == other["ids"][:, None, :]
    shared_NK = (same_NKK * other_NK[:, None, :]).sum(2)
    absent_NK = ~same_NKK.any(1)
    return ((one_NK - shared_NK).abs().sum(1) + (other_NK * absent_NK).sum(1)) / 2
