"""Writes a cache in the form of another project: the command `stillhouse cache export`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from stillhouse.config import yaml_text
from stillhouse.output.disk import atomic_folder
from stillhouse.run.inputs import RunData
from stillhouse.signals import SignalCache
from stillhouse.signals.cache.files import document_id
from stillhouse.signals.cache.formats.distillkit import CONFIGURATION, Compression, write_parquet
from stillhouse.tools.write_cache import data_splits


def export_distillkit(folder: Path, load_data: Callable[[], RunData], out: Path) -> Compression:
    """Write DistillKit's Parquet file and its compression configuration to a new folder, completely or not at all.

    The log-probabilities are written unchanged. DistillKit's format has no field for the mass outside the ids.

    load_data: returns the documents of the cache; the cache itself has only a hash of their tokens.

    Raises ValueError if the signals are not top-k ids, if a cached document is not in the data, or if the cache lacks
    rows of a document: DistillKit needs all of them.
    """
    cache = SignalCache(folder)
    spec = cache.signal
    if spec.kind != "top_k" or spec.with_label:
        raise ValueError(f"{folder} has {spec}: DistillKit reads top-k log-probabilities without the actual token's")
    if cache.manifest.images is not None:
        raise ValueError(
            f"{folder} has documents with images, which DistillKit cannot read: expected a cache of texts"
        )
    if out.exists():
        raise ValueError(f"{out} exists: expected a new folder")
    compression = Compression(cache.manifest.vocabulary, spec.entries, spec.dtype, delta_encoding=False)
    data, stored = load_data(), dict(cache.documents())

    def documents() -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        for split in data_splits(data):
            for number in range(len(split)):
                tokens = split.tokens(number)
                rows = stored.pop(document_id(tokens), None)
                if rows is None:
                    continue
                if rows != range(len(tokens) - 1):
                    raise ValueError(
                        f"{folder} has rows {rows.start} to {rows.stop - 1} of the {len(tokens)} tokens of "
                        f"{split.sources[number]}: expected all but the last; write the cache with "
                        "objective.tokens=all"
                    )
                yield tokens, cache.read_document(document_id(tokens), rows)

    with atomic_folder(out, exclusive=True) as partial:
        write_parquet(partial / "data_0.parquet", compression, documents())
        if stored:
            raise ValueError(f"{folder} has {len(stored):,} documents that are not in the data of this configuration")
        text = yaml_text.write_yaml(compression.as_dict())
        (partial / CONFIGURATION).write_text(text, encoding="utf-8")
    return compression
