"""Opens the stores of teachers' signals that a configuration names, and proves that they fit the run."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, NamedTeacherConfig, RunConfig, TeacherConfig
from stillhouse.data import Documents
from stillhouse.libraries import reading
from stillhouse.models import Decoder
from stillhouse.objective import forward_kl
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import Ranks, is_first, log_rank0
from stillhouse.run.cross_tokenizer_rules import open_cross_tokenizer
from stillhouse.run.inputs import RunData
from stillhouse.serving.client import (
    NeedsModelError,
    RemoteSignals,
    SignalRequest,
    connect,
    prove,
)
from stillhouse.signals import SignalCache, SignalStore
from stillhouse.signals.teacher_folder import files_of_head, head_of

TOKEN = "STILLHOUSE_TOKEN"
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
#: with teacher.prove=auto, a model with at most these bytes of weights is loaded for the comparison
SMALL = 2**30


def open_stores(config: RunConfig) -> dict[str, SignalStore]:
    """The stores of teachers' signals that the configuration names, by the keys of the teachers' sections.

    Raises ConfigError for one that cannot be used.
    """
    stores: dict[str, SignalStore] = {}
    for section, teacher in config.teacher_sections.items():
        temperature = _temperature(config, teacher)
        if teacher.cross_tokenizer is not None:
            stores[section] = open_cross_tokenizer(config, section, temperature)
        elif teacher.cache is not None or teacher.url is not None:
            stores[section] = _open(section, teacher, temperature)
    return stores


def _open(section: str, teacher: TeacherConfig, temperature: float) -> SignalStore:
    with _as_config_error(section, teacher):
        if teacher.cache is not None:
            return SignalCache(Path(teacher.cache))
        return connect(
            teacher.urls,
            SignalRequest(teacher.signal, teacher.top_k, temperature, teacher.dtype),
            api=teacher.api,
            model_folder=None if teacher.model is None else _teacher_files(teacher),
            timeout=teacher.timeout,
            token=os.environ.get(TOKEN),
            warn=lambda line: log_rank0(f"warning: {line}"),
        )


@contextmanager
def _as_config_error(section: str, teacher: TeacherConfig) -> Iterator[None]:
    """Raise an error of a store as a ConfigError with the key that names the store."""
    try:
        yield
    except NeedsModelError as error:
        raise ConfigError(f"{section}.model", f"is missing: {error}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(_key(section, teacher), str(error)) from error


def require_signals(config: RunConfig, data: RunData, stores: Mapping[str, SignalStore], ranks: Ranks) -> None:
    """Raise ConfigError if a store of a teacher's signals does not fit the data or the objective.

    A server is also asked for the signals of some documents, to prove that they are those of the teacher.
    """
    for section, store in stores.items():
        teacher = config.teacher_sections[section]
        _require_objective(config, section, store)
        with ranks.all_raise(ConfigError), _as_config_error(section, teacher):
            own = _documents_of(config, section, data.train.documents)
            store.require(own, "data.train")
            if config.rollout is not None:
                longest = _with_completion(own, config.rollout.max_new_tokens)
                store.require(longest, "the longest prompt of data.train with rollout.max_new_tokens")
            if data.dataset is not None:
                store.require(_documents_of(config, section, data.dataset), "data.train")
            if data.evaluation is not None:
                store.require(_documents_of(config, section, data.evaluation.documents), "data.eval")
            if isinstance(store, RemoteSignals):
                _prove(section, teacher, own, data.tokenizer, store, ranks.device)


def _with_completion(documents: Documents, tokens: int) -> Documents:
    """The longest document, with so many more tokens."""
    longest = documents.select([int(documents.lengths_D.argmax())])
    tokens_N = np.concatenate([longest.tokens_N, np.repeat(longest.tokens_N[-1:], tokens)])
    targets_N = np.zeros(len(tokens_N), dtype=bool)
    return replace(longest, tokens_N=tokens_N, targets_N=targets_N, offsets=np.array([0, len(tokens_N)]))


def _require_objective(config: RunConfig, section: str, store: SignalStore) -> None:
    """Raise ConfigError if the objective cannot be computed from the store's signals."""
    signal, wanted = store.signal, _temperature(config, config.teacher_sections[section])
    if signal.temperature not in (None, wanted):
        own = f"{section}.temperature"
        raise ConfigError(
            "objective.temperature" if section == "teacher" else own,
            f"got {wanted:g}, but {store.name} holds {signal}: expected the same "
            "temperature, or hidden states, which give every temperature",
        )
    if signal.kind == "sampled" and parse_objective(config.objective.loss).divergence not in (None, forward_kl()):
        raise ConfigError("objective.loss", f"got {config.objective.loss!r}: draws can only estimate forward_kl")
    if config.teachers is not None and config.teachers.sum == "distributions" and not signal.is_exact:
        raise ConfigError(
            f"{section}.cache", f"holds {signal}: expected hidden states, from which distributions can be summed"
        )


def _temperature(config: RunConfig, teacher: TeacherConfig) -> float:
    """The temperature of a teacher's divergence."""
    own = teacher.temperature if isinstance(teacher, NamedTeacherConfig) else None
    return config.objective.temperature if own is None else own


def _documents_of(config: RunConfig, section: str, documents: Documents) -> Documents:
    """The documents that a teacher judges, with its prefixes."""
    name, route = section.partition(".")[2], None if config.teachers is None else config.teachers.route
    if route is not None:
        documents = documents.select([at for at, value in enumerate(documents.columns[route]) if value == name])
    return documents.as_read_by(name)


def _prove(
    section: str,
    teacher: TeacherConfig,
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    store: RemoteSignals,
    device: torch.device,
) -> None:
    """Prove the servers. The first rank also compares them with the model itself, if that is asked for."""
    local = head = None
    if is_first():
        if _is_readable(teacher):
            assert teacher.model is not None
            local = Decoder.from_pretrained(
                teacher.model,
                revision=teacher.revision,
                dtype=teacher.dtype,
                device=device,
                quantize=store.servers[0].quantize,
            )
        if store.signal.is_exact:
            assert store.teacher_folder is not None
            head = head_of(store.teacher_folder).output_head()
    proof = prove(store, documents, tokenizer, local=local, head=head)
    store.proof, store.prove, store.prove_every = proof, proof.repeat, teacher.prove_every
    per_token = store.signal.bytes_per_token(store.width)
    log_rank0(
        f"{section}: {store.signal}, {per_token:,} bytes per token, from {store.name} ({store.api.name}); "
        f"proven with {'; '.join(proof.findings)}"
    )


def _teacher_files(teacher: TeacherConfig) -> Path:
    """A folder with the teacher's configuration and tokenizer, and with hidden states the files of its output head.

    Of a model on the hub, no more than these files are downloaded.
    """
    assert teacher.model is not None
    if os.path.isdir(teacher.model):
        return Path(teacher.model)
    with reading(f"the teacher {teacher.model!r} cannot be read from the hub"):
        folder = Path(snapshot_download(teacher.model, revision=teacher.revision, allow_patterns=SMALL_FILES))
        if teacher.signal == "hidden":
            index = folder / "model.safetensors.index.json"
            names = files_of_head(json.loads(index.read_text())) if index.is_file() else ["model.safetensors"]
            snapshot_download(teacher.model, revision=teacher.revision, allow_patterns=names)
    return folder


def _is_readable(teacher: TeacherConfig) -> bool:
    """Whether the teacher is to be loaded here, to compare the server with it."""
    if teacher.model is None or teacher.prove == "never":
        return False
    if teacher.prove == "always":
        return True
    files = Path(teacher.model).glob("*.safetensors") if os.path.isdir(teacher.model) else ()
    return 0 < sum(path.stat().st_size for path in files) <= SMALL


def _key(section: str, teacher: TeacherConfig) -> str:
    if teacher.cross_tokenizer is not None:
        return f"{section}.cross_tokenizer"
    return f"{section}.cache" if teacher.cache is not None else f"{section}.url"
