"""Reads records of Arrow tables: Parquet files, folders saved by `datasets`, and datasets of the hub.

In Arrow, all objects of a column have the same keys. Keys that an object lacks are filled with null. Chat templates
would write such nulls in messages and tools, so these nulls are removed. JSON values (`Json` of `datasets`) are
decoded and keep their nulls.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from stillhouse.data.read.reader import DROPS_NULL, Reader
from stillhouse.data.record import NoSourceError, Record
from stillhouse.display import name_list
from stillhouse.libraries import reading

_BATCH = 1024  # the number of rows that are converted at once
#: the columns with messages or tools
_CONVERSATIONS = frozenset({"messages", "prompt", "completion", "tools", "conversations"})


def conversation_columns(columns: Mapping[str, str]) -> frozenset[str]:
    """The columns of the files that have messages or tools. columns: as in `read_records`."""
    return frozenset(_CONVERSATIONS.union(column for name, column in columns.items() if name in _CONVERSATIONS))


class Parquet(Reader):
    capabilities = (DROPS_NULL,)

    @classmethod
    def read(cls, path: Path, conversations: Collection[str] = _CONVERSATIONS) -> Iterator[Record]:
        import pyarrow.parquet

        with reading(f"{path}: not a readable Parquet file"):
            file = pyarrow.parquet.ParquetFile(path)
        with file:
            batches = file.iter_batches(batch_size=_BATCH)
            yield from _records(f"{path}", "not a readable Parquet file", batches, conversations)


def is_saved(folder: Path) -> bool:
    """Whether a folder was saved by `datasets`."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def read_saved(folder: Path, conversations: Collection[str]) -> Iterator[Record]:
    """The records of a saved dataset. Raises ValueError if it is damaged or empty, or has several splits."""
    import datasets

    for state in (folder / "state.json", *sorted(folder.glob("*/state.json"))):
        if state.is_file():
            with reading(f"{folder}: not a readable saved dataset"):
                files = json.loads(state.read_bytes())["_data_files"]
            if not files:
                raise ValueError(f"{state.parent}: the saved dataset is empty; expected records")
    with reading(f"{folder}: not a readable saved dataset"):
        loaded = datasets.load_from_disk(str(folder))
        splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"": loaded}
        for split in splits.values():
            split.data.table.validate(full=True)  # a damaged offset could point to any memory address
    if not splits:
        raise ValueError(f"{folder}: the saved dataset is empty; expected a split with records")
    if len(splits) > 1:
        raise ValueError(
            f"{folder}: contains the splits {name_list(splits)}: expected the folder of one split, such as "
            f"{folder / min(splits, key=lambda split: split != 'train')}"
        )
    return _records_of_dataset(str(folder), next(iter(splits.values())), conversations)


def read_hub(
    source: str, conversations: Collection[str], name: str, configuration: str | None, split: str
) -> Iterator[Record]:
    """The records of a split of a dataset on the hub. source: the split as the user wrote it, for messages."""
    import datasets

    try:
        dataset = datasets.load_dataset(name, configuration, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise NoSourceError(
            f"{source}: no file or folder on this machine has this name, and no dataset on the hub: {error}"
        ) from error
    except ValueError as error:  # the split or configuration is unknown, or missing although there are several
        raise ValueError(
            f"{source}: the hub's dataset cannot be loaded (expected {name}:configuration@split): {error}"
        ) from error
    return _records_of_dataset(source, dataset, conversations)


def _records_of_dataset(name: str, dataset: Any, conversations: Collection[str]) -> Iterator[Record]:
    tables = dataset.with_format("arrow").iter(batch_size=_BATCH)  # as Arrow, so that images are not decoded
    return _records(name, "not a readable record", tables, conversations)


def _records(name: str, problem: str, tables: Iterator[Any], conversations: Collection[str]) -> Iterator[Record]:
    """The rows of tables or batches of Arrow. problem: the error's text for a table that cannot be read.
    conversations: the columns with messages or tools.
    """
    number = 0
    while True:
        with reading(f"{name}: {problem}{f' after row {number}' if number else ''}"):
            if (table := next(tables, None)) is None:
                return
            changed = [field for field in table.schema if field.name in conversations or _has_json(field)]
            rows: list[dict[str, Any]] = table.to_pylist()
            for row in rows:
                for field in changed:
                    row[field.name] = _as_written(row[field.name], field, drops_null=field.name in conversations)
        for row in rows:
            number += 1
            yield Record(f"{name}:{number}", row)


def _as_written(value: Any, field: Any, *, drops_null: bool) -> Any:
    """A column's value as it was before it was stored in Arrow. field: the name and type of the column."""
    if value is None:
        return None
    if _is_json(field):
        return json.loads(value)
    children = [field.type.field(number) for number in range(field.type.num_fields)]
    if isinstance(value, dict):
        return {
            child.name: _as_written(value[child.name], child, drops_null=drops_null)
            for child in children
            if value[child.name] is not None or not drops_null
        }
    if isinstance(value, list) and len(children) == 1:
        return [_as_written(item, children[0], drops_null=drops_null) for item in value]
    return value


def _has_json(field: Any) -> bool:
    return _is_json(field) or any(_has_json(field.type.field(number)) for number in range(field.type.num_fields))


def _is_json(field: Any) -> bool:
    """Whether the field's strings are JSON. Before version 19, pyarrow has the type only in the metadata."""
    name = (
        getattr(field.type, "extension_name", "") or (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    )
    return name == "arrow.json"
