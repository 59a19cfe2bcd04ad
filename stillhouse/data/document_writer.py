"""Collects documents while a dataset is read: their tokens in memory or in files, and all else in memory.

N tokens of all documents, D documents.
"""

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stillhouse.data.data_report import DataReport
from stillhouse.data.documents import Documents
from stillhouse.data.media_files import MediaWriter
from stillhouse.data.offsets import offsets_of
from stillhouse.data.render.templates import Encoded
from stillhouse.data.substitutions import Substitution, Substitutions
from stillhouse.data.token_cache import IMAGES, TARGETS, TOKENS


class DocumentWriter:
    """Collects the documents of one source.

    folder: for the files of tokens, targets and media; None: they stay in memory.
    """

    def __init__(self, folder: Path | None):
        self._files: list[BinaryIO] = [
            io.BytesIO() if folder is None else (folder / f"{name}.bin").open("wb") for name in (TOKENS, TARGETS)
        ]
        self._media = MediaWriter(None if folder is None else folder / IMAGES)
        # one entry per document
        self.sources: list[str] = []
        self._lengths: list[int] = []
        self._keys: list[int] = []
        self._values: list[list[Any]] = []
        self._substitutions: list[Mapping[str, list[Substitution]]] = []
        self._records: list[dict[str, Any]] = []

    def add(
        self,
        document: Encoded,
        source: str,
        key: int,
        values: list[Any],
        substitutions: Mapping[str, list[Substitution]],
        record: dict[str, Any] | None,
    ) -> None:
        """Add a document. source: `file:line`. key: of its record's content. values: of the kept columns.
        substitutions: what teachers read in place of some tokens, by their names. record: to keep; or None.
        """
        for file, array in zip(self._files, (document.ids, document.targets), strict=True):
            file.write(array.tobytes())
        self._media.add(document.media)
        self.sources.append(source)
        self._lengths.append(len(document.ids))
        self._keys.append(key)
        self._values.append(values)
        self._substitutions.append(substitutions)
        if record is not None:
            self._records.append(record)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of all documents, [N] each."""
        return self._array(0, np.int32), self._array(1, np.bool_)

    def documents(
        self, report: DataReport, columns: Sequence[str], prefixes: Collection[str], teachers: Iterable[str]
    ) -> Documents:
        """All documents. columns: the names of the kept columns.

        prefixes: the names of teachers with a prefix. teachers: those that may have other tokens of media.
        """
        values = map(list, zip(*self._values, strict=True))
        media = self._media.finish()
        return Documents(
            *self.arrays(),
            offsets_of(self._lengths),
            np.asarray(self._keys, dtype=np.uint64),
            self.sources,
            report,
            dict(zip(columns, values, strict=True)),
            self._by_teacher(prefixes, teachers),
            self._records,
            media=media if len(media.table) else None,
        )

    def close(self) -> None:
        self._media.close()
        for file in self._files:
            if not isinstance(file, io.BytesIO):  # the arrays use the buffer of a BytesIO
                file.close()

    def _by_teacher(self, prefixes: Collection[str], teachers: Iterable[str]) -> dict[str, Substitutions]:
        """The substitutions of each teacher that has a prefix or other tokens of media."""
        names = dict.fromkeys([*prefixes, *teachers])
        by_name = {name: [by_teacher.get(name, []) for by_teacher in self._substitutions] for name in names}
        return {name: Substitutions.of(lists) for name, lists in by_name.items() if name in prefixes or any(lists)}

    def _array(self, number: int, dtype: type[np.generic]) -> np.ndarray:
        file = self._files[number]
        if isinstance(file, io.BytesIO):
            return np.frombuffer(file.getbuffer(), dtype=dtype)
        file.flush()
        return np.memmap(file.name, dtype=dtype, mode="r")
