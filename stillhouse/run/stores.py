"""Opens the signal stores that a configuration names, and proves that they fit the run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from stillhouse.config import ConfigError, TeacherConfig, as_config_error
from stillhouse.data import Documents, load_tokenizer
from stillhouse.loops.session import Data
from stillhouse.objective import forward_kl
from stillhouse.objective.spec import read_objective
from stillhouse.parallel import Ranks
from stillhouse.registry import load_all
from stillhouse.run.models import load_model, teacher_fingerprint
from stillhouse.run.objective import RunObjective
from stillhouse.signals import SignalStore
from stillhouse.signals.cross_tokenizer import CrossTokenizerStore
from stillhouse.signals.scorer import LocalModelStore
from stillhouse.signals.signal_spec import SignalSpec


def open_stores(
    teachers: Mapping[str, TeacherConfig], objective: RunObjective, batch_tokens: int
) -> dict[str, SignalStore]:
    """Open the signal stores that the configuration names; return them by the keys of the teachers' sections.

    teachers: all teachers, by the keys of their sections
    batch_tokens: the maximum number of tokens in a forward pass of a teacher with another tokenizer

    Raises ConfigError for a store that cannot be used.
    """
    return {
        section: teacher.source_kind.open(section, teacher, objective, batch_tokens)
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
    route = None if objective.teachers is None else objective.teachers.route
    for section, store in stores.items():
        teacher = teachers[section]
        _require_objective(section, store, teacher, objective)
        with ranks.all_raise(ConfigError), as_config_error(f"{section}.{teacher.signals_from}"):
            train = _documents_of(section, route, data.train.documents)
            checked = {"data.train": [train]}
            if objective.rollouts:
                longest = _with_completion(train, [rollout.max_new_tokens for rollout in objective.rollouts])
                checked["the longest prompt of data.train with rollout.max_new_tokens"] = [longest]
            if data.dataset is not None:
                checked["data.train"].append(_documents_of(section, route, data.dataset))
            if data.evaluation is not None:
                checked["data.eval"] = [_documents_of(section, route, data.evaluation.documents)]
            try:
                for what, splits in checked.items():
                    for documents in splits:
                        store.require(documents, what, data.train.media_inputs)
                teacher.source_kind.prove(section, teacher, store, train, data, ranks.device)
            except OSError as error:
                raise ValueError(str(error)) from error


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
        if signal.kind == "sampled" and read_objective(loss, kinds).divergence not in (None, forward_kl()):
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
