"""Opens the store of a teacher's signals that a configuration names, and proves that it fits the run."""

import os
from pathlib import Path

import torch

from stillhouse.config import ConfigError, RunConfig, TeacherConfig
from stillhouse.data import PackedSequences
from stillhouse.models import Decoder
from stillhouse.objective import forward_kl
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import local_folder, log_rank0
from stillhouse.teachers import RemoteSignals, SignalCache, SignalStore
from stillhouse.teachers.client import Wanted, connect, prove
from stillhouse.train.inputs import RunData

TOKEN = "STILLHOUSE_TOKEN"
#: with teacher.prove=auto, a model with at most these bytes of weights is loaded for the comparison
SMALL = 2**30


def open_store(config: RunConfig) -> SignalStore | None:
    """The store of the teacher's signals, if the configuration names one. Raises ConfigError if it cannot be used."""
    teacher = config.teacher
    if teacher is None or (teacher.cache is None and teacher.url is None):
        return None
    try:
        if teacher.cache is not None:
            return SignalCache(Path(teacher.cache))
        store = connect(
            teacher.urls,
            Wanted(teacher.signal, teacher.top_k, config.objective.temperature, teacher.dtype),
            api=teacher.api,
            model_folder=None if teacher.model is None else Path(local_folder(teacher.model, teacher.revision)),
            timeout=teacher.timeout,
            token=os.environ.get(TOKEN),
            warn=lambda line: log_rank0(f"warning: {line}"),
        )
    except ValueError as error:
        raise ConfigError(_key(teacher), str(error)) from error
    return store


def require_signals(config: RunConfig, data: RunData, store: SignalStore, device: torch.device) -> None:
    """Raise ConfigError if the store of the teacher's signals does not fit the data or the objective.

    A server is also asked for the signals of some documents, to prove that they are those of the teacher.
    """
    assert config.teacher is not None
    signal, key = store.signal, _key(config.teacher)
    if signal.temperature not in (None, config.objective.temperature):
        raise ConfigError(
            "objective.temperature",
            f"got {config.objective.temperature:g}, but {store.name} holds {signal}: expected the same "
            "temperature, or hidden states, which give every temperature",
        )
    if signal.kind == "sampled" and parse_objective(config.objective.loss).divergence not in (None, forward_kl()):
        raise ConfigError("objective.loss", f"got {config.objective.loss!r}: draws can only estimate forward_kl")
    try:
        for name, sequences in (("data.train", data.train), ("data.eval", data.evaluation)):
            if sequences is not None:
                store.require(sequences.documents, name)
        if isinstance(store, RemoteSignals):
            _prove(config.teacher, data, data.train, store, device)
    except ValueError as error:
        raise ConfigError(key, str(error)) from error


def _prove(
    teacher: TeacherConfig, data: RunData, train: PackedSequences, store: RemoteSignals, device: torch.device
) -> None:
    local = None
    if _is_readable(teacher):
        assert teacher.model is not None
        dtype = "auto" if teacher.dtype == "auto" else teacher.dtype
        local = Decoder.from_pretrained(teacher.model, revision=teacher.revision, dtype=dtype, device=device)
    proof = prove(store, train.documents, data.tokenizer, local)
    store.prove, store.prove_every = proof.repeat, teacher.prove_every
    log_rank0(f"teacher: {store.signal} from {store.name} ({store.api.name}); proven: {'; '.join(proof.findings)}")


def _is_readable(teacher: TeacherConfig) -> bool:
    """Whether the teacher is to be loaded here, to compare the server with it."""
    if teacher.model is None or teacher.prove == "never":
        return False
    if teacher.prove == "always":
        return True
    files = Path(teacher.model).glob("*.safetensors") if os.path.isdir(teacher.model) else ()
    return 0 < sum(path.stat().st_size for path in files) <= SMALL


def _key(teacher: TeacherConfig) -> str:
    return "teacher.cache" if teacher.cache is not None else "teacher.url"
