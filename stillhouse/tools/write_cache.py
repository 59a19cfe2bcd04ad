"""Writes a cache of a teacher's signals for the data of a run: the command `stillhouse cache`.

The teacher runs in this job, or is served: then it is asked once, for any number of runs. The documents are divided
into shards once, by their order and size alone. Each process computes every n-th shard.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stillhouse.config import ConfigError, RunConfig, TeacherConfig
from stillhouse.data import Documents, PackedSequences
from stillhouse.parallel import Ranks, single_process_runner, watchdog
from stillhouse.run.inputs import RunData
from stillhouse.run.models import load_model, teacher_fingerprint
from stillhouse.run.setup import RunSetup
from stillhouse.serving.client import RemoteSignals
from stillhouse.signals.cache.files import Manifest, document_id, target_rows
from stillhouse.signals.scorer import Scorer, ScoreRequest
from stillhouse.signals.signal_checks import problem_in
from stillhouse.signals.signal_spec import DocumentRows, SignalKind, SignalSpec
from stillhouse.signals.teacher_folder import head_of, save_teacher
from stillhouse.tools.cache_folder import describe, write_documents


@dataclass(frozen=True)
class Entry:
    """A document to be written: where it is, and which of its rows."""

    documents: Documents
    number: int
    rows: range

    @property
    def document(self) -> DocumentRows:
        return DocumentRows(self.documents.tokens(self.number), self.rows)

    @property
    def id(self) -> bytes:
        return document_id(self.documents.tokens(self.number))


def write_cache(
    config: RunConfig,
    out: Path,
    kind: SignalKind = "hidden",
    *,
    top_k: int = 64,
    dtype: str | None = None,
    with_label: bool = False,
    packed: bool = False,
    shard_bytes: int | None = None,
) -> Manifest:
    """Write the signals of a run's teacher for its training and held-out documents, or continue to write them.

    kind, top_k, dtype, with_label: of a teacher in this job. A served teacher is asked for `teacher.signal`.
    top_k: ids per token of "top_k", draws per token of "sampled"; both are at the temperature of the run's objective
    dtype: of the stored numbers; None: float32, or the teacher's own dtype for hidden states
    with_label: whether "top_k" also has the actual next token
    packed: whether ids and counts have as few bits as they need

    A collective of all processes of a job. Raises ConfigError for a configuration without a teacher, or with a server
    that is not the teacher that is meant, and ValueError for a folder in which something else was written, and for a
    teacher whose signals are not finite.
    """
    setup = RunSetup(config)
    if config.teacher is not None and config.teacher.url is not None:
        return _write_served(setup, out, packed=packed, shard_bytes=shard_bytes)
    teacher_config = _teacher_in_job(setup)
    data = setup.load_data()
    entries = list(cache_entries(data))
    teacher = load_model("teacher", str(teacher_config.model), teacher_config, setup.ranks.device)
    if kind == "hidden":
        spec = SignalSpec("hidden", dtype or str(teacher.config.dtype).removeprefix("torch."), with_label=with_label)
    else:
        spec = SignalSpec(kind, dtype or "float32", top_k, config.objective.temperature, with_label)
    description = describe(
        spec,
        str(teacher_config.model),
        teacher_fingerprint(teacher_config),
        data.tokenizer,
        teacher.vocabulary_rows,
        teacher.config.get_text_config().hidden_size,
        packed=packed,
    )
    scorer = Scorer(single_process_runner(teacher, None), setup.ranks.device)
    return _write_entries(
        out,
        description,
        entries,
        _Writer(scorer, spec, config.train.micro_batch_tokens).compute,
        lambda folder: save_teacher(folder, teacher, data.tokenizer, with_head=spec.is_exact),
        setup.ranks,
        shard_bytes,
        expected="a teacher that can run in this dtype",
    )


def _teacher_in_job(setup: RunSetup) -> TeacherConfig:
    """The teacher that writes the cache. Raises ConfigError if there is none in this job."""
    teacher = setup.config.teacher
    if setup.config.teachers is not None:
        raise ConfigError(
            "teachers",
            "a cache has one teacher's signals; expected the section teacher, and a cache for each of them",
        )
    if teacher is None or teacher.model is None:
        raise ConfigError("teacher.model", "is missing: a cache is written by a teacher that is in this job")
    if teacher.cross_tokenizer is not None:
        raise ConfigError(
            "teacher.cross_tokenizer",
            f"got {teacher.cross_tokenizer}: a cache holds the signals of one tokenizer, expected null",
        )
    return teacher


def _write_served(setup: RunSetup, out: Path, *, packed: bool, shard_bytes: int | None) -> Manifest:
    """Write the signals that a served teacher gives."""
    ranks, store = setup.ranks, setup.stores["teacher"]
    assert isinstance(store, RemoteSignals)
    data = setup.load_data()
    setup.require_signals(data)
    folder = store.teacher_folder
    if folder is None or store.vocabulary is None:
        raise ConfigError("teacher.model", "is missing: a cache has a copy of the teacher's tokenizer")
    if store.signal.kind == "chosen":
        raise ConfigError("teacher.signal", "got chosen: these ids are the student's, so they cannot be cached")
    entries, model = list(cache_entries(data)), store.servers[0].model
    description = describe(
        store.signal, model, store.identity, data.tokenizer, store.vocabulary, store.width, packed=packed
    )

    def save(into: Path) -> None:
        save_teacher(into, head_of(folder), data.tokenizer, with_head=store.signal.is_exact)

    try:
        read = lambda chosen: store.read([entry.document for entry in chosen])  # noqa: E731
        return _write_entries(
            out, description, entries, read, save, ranks, shard_bytes, expected="signals that a teacher can give"
        )
    finally:
        store.close()


def _write_entries(
    out: Path,
    description: Manifest,
    entries: Sequence[Entry],
    read: Callable[[Sequence[Entry]], Sequence[dict[str, Tensor]]],
    save_teacher: Callable[[Path], None],
    ranks: Ranks,
    shard_bytes: int | None,
    *,
    expected: str,
) -> Manifest:
    """Write entries with `write_documents`. Raises ValueError for signals that no teacher can give.

    read: the signals of some entries
    expected: the end of that error's message
    """

    def read_checked(numbers: Sequence[int]) -> Sequence[dict[str, Tensor]]:
        chosen = [entries[number] for number in numbers]
        signals = read(chosen)
        for entry, tensors in zip(chosen, signals, strict=True):
            if problem := problem_in(description.signal, description.vocabulary, tensors):
                raise ValueError(
                    f"the teacher's {problem} on {entry.documents.sources[entry.number]}: nothing of this shard is "
                    f"written; expected {expected}"
                )
        return signals

    watchdog.enter("writing the cache", timed=False)
    documents = [(entry.id, entry.rows) for entry in entries]
    return write_documents(out, description, documents, read_checked, save_teacher, ranks, shard_bytes)


@dataclass(frozen=True)
class _Writer:
    """Runs a teacher on documents, batch_tokens tokens at a time."""

    scorer: Scorer
    spec: SignalSpec
    batch_tokens: int

    def compute(self, entries: Sequence[Entry]) -> list[dict[str, Tensor]]:
        """The signals of some documents."""
        signals: dict[int, dict[str, Tensor]] = {}
        for split in dict.fromkeys(id(entry.documents) for entry in entries):
            numbers = [number for number, entry in enumerate(entries) if id(entry.documents) == split]
            of_split = self._run([entries[number] for number in numbers])
            signals |= {number: of_split[at] for at, number in enumerate(numbers)}
        return [signals[number] for number in range(len(entries))]

    def _run(self, entries: Sequence[Entry]) -> dict[int, dict[str, Tensor]]:
        """The signals of documents of one split, which are packed as in training, by their numbers in `entries`."""
        documents = entries[0].documents.select([entry.number for entry in entries])
        longest = int(documents.lengths_D.max())
        sequences = PackedSequences(documents, max_tokens=longest, seed=0, shuffle=False)
        at_a_time = max(1, self.batch_tokens // longest)
        signals: dict[int, dict[str, Tensor]] = {}
        for start in range(0, len(sequences), at_a_time):
            micro_batch = sequences.micro_batch(range(start, min(start + at_a_time, len(sequences))))
            numbers = [number for number in micro_batch.document_T.unique_consecutive().tolist() if number >= 0]
            requests = {number: ScoreRequest(entries[number].document, self.spec) for number in numbers}
            signals |= self.scorer.tensors(micro_batch, requests)
        return signals


def data_splits(data: RunData) -> list[Documents]:
    """The training documents and the held-out documents of a run."""
    return [sequences.documents for sequences in (data.train, data.evaluation) if sequences is not None]


def cache_entries(data: RunData) -> Iterator[Entry]:
    """Every different document of a run that has a target, once."""
    seen: dict[bytes, range] = {}
    for documents in data_splits(data):
        for number in range(len(documents)):
            rows = target_rows(documents.targets(number))
            known = seen.setdefault(document_id(documents.tokens(number)), rows)
            if known is rows and len(rows):
                yield Entry(documents, number, rows)
            elif known != rows:
                raise ValueError(
                    f"{documents.sources[number]} has the tokens of another document and other targets: expected "
                    "objective.tokens=all, or data without such pairs"
                )
