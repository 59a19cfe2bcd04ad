"""Reads records of Arrow tables: Parquet files, folders saved by `datasets`, and datasets of the hub."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillhouse.data.read.open_files import require_regular
from stillhouse.data.record import NoSourceError, Record
from stillhouse.display import name_list
from stillhouse.libraries import reading


def read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow.parquet

    number = 0
    with reading(f"{path}: not a readable Parquet file"):
        file = pyarrow.parquet.ParquetFile(path)
    with file:
        batches = file.iter_batches(batch_size=1024)
        while True:
            with reading(f"{path}: not a readable Parquet file{f' after row {number}' if number else ''}"):
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            for fields in rows:
                number += 1
                yield Record(f"{path}:{number}", fields)


def is_saved(folder: Path) -> bool:
    """Whether a folder was saved by `datasets`."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def saved_files(folder: Path) -> list[Path]:
    """All files of a saved dataset. Each split is in a subfolder, or the folder itself is a split."""
    folders = [folder, *(state.parent for state in folder.glob("*/state.json"))]
    return require_regular(sorted(path for inner in folders for path in inner.iterdir() if not path.is_dir()))


def read_saved(folder: Path) -> Iterator[Record]:
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
            f"{folder}: contains the splits {name_list(splits)}; name the folder of one split, such as "
            f"{folder / min(splits, key=lambda split: split != 'train')}"
        )
    return _read_rows(str(folder), next(iter(splits.values())))


def read_hub(source: str, name: str, configuration: str | None, split: str) -> Iterator[Record]:
    """The records of a split of a dataset on the hub. source: its full name, for locations and errors."""
    import datasets

    try:
        dataset = datasets.load_dataset(name, configuration, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise NoSourceError(
            f"{source}: no file or folder of this name here, and no dataset on the hub: {error}"
        ) from error
    except ValueError as error:  # no such split or configuration, or several of them and `source` names none
        raise ValueError(
            f"{source}: the hub's dataset cannot be loaded ({name}:configuration@split names a part of it): {error}"
        ) from error
    return _read_rows(source, dataset)


def _read_rows(name: str, dataset: Any) -> Iterator[Record]:
    if _has_images(dataset.features):  # as Arrow tables, whose images are not decoded
        rows = (table.to_pylist()[0] for table in dataset.with_format("arrow"))
    else:
        rows = iter(dataset)
    for number in itertools.count(1):
        with reading(f"{name}:{number}: not a readable record"):
            fields = next(rows, None)
        if fields is None:
            return
        yield Record(f"{name}:{number}", fields)


def _has_images(features: Any) -> bool:
    """Whether a feature of `datasets`, or a part of it, is an image."""
    if isinstance(features, dict):
        return any(map(_has_images, features.values()))
    if isinstance(features, list):
        return any(map(_has_images, features))
    return type(features).__name__ == "Image" or _has_images(getattr(features, "feature", None) or {})
