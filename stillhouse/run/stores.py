"""Opens the signal stores that a configuration names, and proves that they fit the run."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from stillhouse.config import ConfigError, TeacherConfig, as_config_error
from stillhouse.data import Documents, load_tokenizer
from stillhouse.data.render.media_inputs import ImageInputs
from stillhouse.libraries import reading
from stillhouse.loops.session import Data
from stillhouse.models import Decoder
from stillhouse.models.weight_files import json_object, named_weights, weight_files
from stillhouse.objective import forward_kl
from stillhouse.objective.spec import read_objective
from stillhouse.parallel import Ranks, is_first, log_rank0
from stillhouse.registry import load_all
from stillhouse.run.models import load_model, teacher_fingerprint
from stillhouse.run.objective import RunObjective
from stillhouse.serving.client import (
    NeedsModelError,
    RemoteSignals,
    connect,
    prove,
)
from stillhouse.signals import SignalCache, SignalStore
from stillhouse.signals.cross_tokenizer import CrossTokenizerStore
from stillhouse.signals.local_model_store import LocalModelStore
from stillhouse.signals.signal_spec import SignalSpec
from stillhouse.signals.teacher_folder import files_of_head, head_of

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
#: with teacher.prove=auto, a local model with at most this many bytes of weights is compared with the servers
SMALL = 2**30


def open_stores(
    teachers: Mapping[str, TeacherConfig], objective: RunObjective, batch_tokens: int
) -> dict[str, SignalStore]:
    """Open the signal stores that the configuration names; return them by the keys of the teachers' sections.

    teachers: all teachers, by the keys of their sections
    batch_tokens: the maximum number of tokens in a forward pass of a teacher with another tokenizer

    Raises ConfigError for a store that cannot be used.
    """
    return {
        section: resolve_name(teacher.source_kind.made_by)(section, teacher, objective, batch_tokens)
        for section, teacher in teachers.items()
        if teacher.source_kind.is_store
    }


def open_cross_tokenizer(
    section: str, teacher: TeacherConfig, objective: RunObjective, batch_tokens: int
) -> CrossTokenizerStore:
    """Open the store of a teacher with another tokenizer. The store's `start` loads the teacher.

    Raises ConfigError if the tokenizers cannot be aligned.
    """
    student = objective.student
    assert teacher.model is not None
    assert teacher.cross_tokenizer is not None
    ours = load_tokenizer(student.model, student.revision, student.trust_remote_code)
    theirs = load_tokenizer(teacher.model, teacher.revision, teacher.trust_remote_code)
    if teacher.top_k > len(theirs):
        raise ConfigError(
            f"{section}.top_k", f"got {teacher.top_k}, expected at most {len(theirs)}, the tokens of the teacher"
        )
    model = LocalModelStore(
        teacher.model,
        teacher_fingerprint(teacher),
        SignalSpec("top_k", "float32", teacher.top_k, objective.temperature_of(teacher), with_label=True),
        partial(load_model, section, teacher.model, teacher),
        batch_tokens,
    )
    with as_config_error(f"{section}.cross_tokenizer"):
        return CrossTokenizerStore(model, ours, theirs, teacher.cross_tokenizer)


def open_cache(section: str, teacher: TeacherConfig, *_: object) -> SignalCache:
    with _store_errors(section, teacher):
        return SignalCache(Path(str(teacher.cache)))


def open_servers(section: str, teacher: TeacherConfig, objective: RunObjective, _: int) -> RemoteSignals:
    with _store_errors(section, teacher):
        return connect(
            teacher,
            objective.temperature_of(teacher),
            model_folder=None if teacher.model is None else _teacher_files(teacher),
            warn=lambda line: log_rank0(f"warning: {line}"),
            section=section,
        )


@contextmanager
def _store_errors(
    section: str, teacher: TeacherConfig, kinds: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Convert an error of a store to a ConfigError with the key that names the store."""
    try:
        yield
    except NeedsModelError as error:
        raise ConfigError(f"{section}.model", f"is missing: {error}") from error
    except kinds as error:
        raise ConfigError(f"{section}.{teacher.signals_from}", str(error)) from error


def require_signals(
    stores: Mapping[str, SignalStore],
    teachers: Mapping[str, TeacherConfig],
    objective: RunObjective,
    data: Data,
    ranks: Ranks,
) -> None:
    """Raise ConfigError if a signal store does not fit the data or the objective.

    teachers: all teachers, by the keys of their sections

    Servers score some documents here, to prove that they serve the teacher.
    """
    route, image_inputs = None if objective.teachers is None else objective.teachers.route, data.train.image_inputs
    for section, store in stores.items():
        teacher = teachers[section]
        _require_objective(section, store, teacher, objective)
        with ranks.all_raise(ConfigError), _store_errors(section, teacher, (ValueError, OSError)):
            train = _documents_of(section, route, data.train.documents)
            store.require(train, "data.train", image_inputs)
            if objective.rollouts:
                longest = _with_completion(train, [rollout.max_new_tokens for rollout in objective.rollouts])
                what = "the longest prompt of data.train with rollout.max_new_tokens"
                store.require(longest, what, image_inputs)
            if data.dataset is not None:
                store.require(_documents_of(section, route, data.dataset), "data.train", image_inputs)
            if data.evaluation is not None:
                held_out = _documents_of(section, route, data.evaluation.documents)
                store.require(held_out, "data.eval", image_inputs)
            if teacher.source_kind.proved_by:
                prove_store = resolve_name(teacher.source_kind.proved_by)
                prove_store(section, teacher, train, data.tokenizer, store, ranks.device, image_inputs)


def _with_completion(documents: Documents, tokens_of_sources: Sequence[int]) -> Documents:
    """The longest document, extended by the tokens of its source."""
    set_D = np.zeros(len(documents), dtype=np.int64) if documents.set_D is None else documents.set_D
    added_D = np.array(tokens_of_sources)[set_D]
    number = int((documents.lengths_D + added_D).argmax())
    longest, tokens = documents.select([number]), int(added_D[number])
    tokens_N = np.concatenate([longest.tokens_N, np.repeat(longest.tokens_N[-1:], tokens)])
    targets_N = np.zeros(len(tokens_N), dtype=bool)
    return replace(longest, tokens_N=tokens_N, targets_N=targets_N, offsets=np.array([0, len(tokens_N)]))


def _require_objective(section: str, store: SignalStore, teacher: TeacherConfig, objective: RunObjective) -> None:
    """Raise ConfigError if the objective cannot be computed from the store's signals."""
    signal, temperature = store.signal, objective.temperature_of(teacher)
    if signal.temperature not in (None, temperature):
        raise ConfigError(
            "objective.temperature" if section == "teacher" else f"{section}.temperature",
            f"got {temperature:g}, but {store.name} holds {signal}: expected the same "
            "temperature, or hidden states, which give every temperature",
        )
    kinds = load_all("stillhouse.divergences")
    for key, loss in objective.objective.losses.items():
        if signal.kind == "sampled" and read_objective(loss, kinds).divergence not in (
            None,
            forward_kl(),
        ):
            raise ConfigError(key, f"got {loss!r}: sampled ids can only estimate forward_kl")
    several = objective.teachers
    if several is not None and several.sum == "distributions" and not signal.is_exact:
        raise ConfigError(
            f"{section}.{teacher.signals_from}",
            f"holds {signal}: expected hidden states, from which distributions can be summed",
        )


def _documents_of(section: str, route: str | None, documents: Documents) -> Documents:
    """The documents that a teacher scores, with its prefix. route: the column that names the teacher of a document"""
    name = section.partition(".")[2]
    if route is not None:
        numbers = [number for number, value in enumerate(documents.columns[route]) if value == name]
        documents = documents.select(numbers)
    return documents.as_read_by(name)


def prove_servers(
    section: str,
    teacher: TeacherConfig,
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    store: RemoteSignals,
    device: torch.device,
    image_inputs: ImageInputs | None = None,
) -> None:
    """Prove the servers' signals. If `teacher.prove` requires it, rank 0 loads the model and compares its signals."""
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
                images=documents.has_images,
            )
        if store.signal.is_exact:
            assert store.teacher_folder is not None
            head = head_of(store.teacher_folder, images=documents.has_images).output_head()
    proof = prove(store, documents, tokenizer, local=local, head=head, image_inputs=image_inputs)
    store.proof, store.prove_every = proof, teacher.prove_every
    per_token = store.signal.bytes_per_token(store.width)
    log_rank0(
        f"{section}: {store.signal}, {per_token:,} bytes per token, from {store.name} ({store.api.kind.name}); "
        f"proven with {'; '.join(proof.findings)}"
    )


def _teacher_files(teacher: TeacherConfig) -> Path:
    """A folder with the teacher's configuration and tokenizer. If the servers send hidden states, it also has the
    files of the output head. Only these files are downloaded from the hub.
    """
    assert teacher.model is not None
    if os.path.isdir(teacher.model):
        return Path(teacher.model)
    unreadable = f"the teacher {teacher.model!r} cannot be read from the hub"
    with reading(unreadable):
        folder = Path(snapshot_download(teacher.model, revision=teacher.revision, allow_patterns=SMALL_FILES))
    if teacher.signal == "hidden":
        with reading(unreadable):
            download = partial(snapshot_download, teacher.model, revision=teacher.revision)
            # a single file comes before the files of an index
            single = named_weights(str(folder), json_object(folder, CONFIG_NAME)) or SAFE_WEIGHTS_NAME
            download(allow_patterns=[single])
            download(allow_patterns=files_of_head(folder))
    return folder


def _is_readable(teacher: TeacherConfig) -> bool:
    """Whether this process loads the teacher's model to compare it with the servers."""
    if teacher.model is None or teacher.prove == "never":
        return False
    if teacher.prove == "always":
        return True
    files = weight_files(teacher.model) if os.path.isdir(teacher.model) else []
    return all(path.is_file() for path in files) and 0 < sum(path.stat().st_size for path in files) <= SMALL
