"""Writes a cache of the signals that a served teacher gives: asked once, for any number of runs."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from stillhouse.config import ConfigError, RunConfig
from stillhouse.data import tokenizer_fingerprint
from stillhouse.parallel import watchdog
from stillhouse.run.agreement import library_versions
from stillhouse.run.inputs import load_run_data
from stillhouse.run.session import connect_ranks
from stillhouse.run.stores import open_stores, require_signals
from stillhouse.serving.client import RemoteSignals
from stillhouse.signals.cache.content import problem_in
from stillhouse.signals.cache.files import Manifest
from stillhouse.signals.signal_spec import DocumentRows
from stillhouse.signals.teacher_folder import head_of, save_teacher
from stillhouse.tools.cache_folder import write_documents
from stillhouse.tools.write_cache import cache_entries


def write_served_cache(
    config: RunConfig, out: Path, *, packed: bool = False, shard_bytes: int | None = None
) -> Manifest:
    """Write the signals of `teacher.url` for a run's training and held-out documents, or continue to write them.

    `teacher.signal`, `teacher.top_k` and `teacher.dtype` say what is asked for. A collective of all processes of a
    job. Raises ConfigError for a server that is not the teacher that is meant, or that does not offer its tokenizer.
    """
    device, _ = connect_ranks(config)
    stores = open_stores(config)
    store = stores["teacher"]
    assert isinstance(store, RemoteSignals)
    data = load_run_data(config, stores)
    require_signals(config, data, stores, device)
    folder = store.teacher_folder
    if folder is None or store.vocabulary is None:
        raise ConfigError("teacher.model", "is missing: a cache has a copy of the teacher's tokenizer")
    if store.signal.kind == "chosen":
        raise ConfigError("teacher.signal", "got chosen: these ids are the student's, so they cannot be cached")
    entries = list(cache_entries(data))
    about = Manifest(
        store.signal,
        store.servers[0].model,
        store.identity,
        tokenizer_fingerprint(data.tokenizer),
        store.vocabulary,
        store.width,
        0,
        0,
        "",
        0,
        library_versions(),
        packed,
    )

    def read(numbers: Sequence[int]) -> list[dict[str, Tensor]]:
        wanted = [entries[at].documents.tokens(entries[at].number) for at in numbers]
        found = store.read(
            [DocumentRows(tokens, entries[at].rows) for tokens, at in zip(wanted, numbers, strict=True)]
        )
        for at, each in zip(numbers, found, strict=True):
            if problem := problem_in(store.signal, about.vocabulary, each):
                source = entries[at].documents.sources[entries[at].number]
                raise ValueError(f"the teacher's {problem} on {source}: nothing of this shard is written")
        return found

    def save(into: Path) -> None:
        save_teacher(into, head_of(folder), data.tokenizer, with_head=store.signal.is_exact)

    watchdog.enter("writing the cache", timed=False)
    try:
        documents = [(each.id, each.rows) for each in entries]
        return write_documents(out, about, documents, read, save, shard_bytes)
    finally:
        store.close()
