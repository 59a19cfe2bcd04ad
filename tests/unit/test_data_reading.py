"""Reading records from every kind of source and format, and errors that name the file and line."""

import gzip
import json
import os
import re
import socket
from contextlib import chdir
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from kit.config_cases import refused_calls

from stillhouse.data import DataError, NoSourceError, read_records
from stillhouse.data.read.data_source import local_files


def write_lines(path: Path, *lines: str | bytes | dict) -> Path:
    encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in encoded))
    return path


def write_parquet(path: Path, *rows: dict) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def texts(source: Path | str) -> list[str]:
    records = list(read_records(source))
    assert not [record.problem for record in records if record.problem]
    return [record.fields["text"] for record in records]


@pytest.mark.parametrize(
    ("content", "by_line"),
    [
        (b'{"text": "one"}\n\n{"text": "two"}\n', {1: "one", 3: "two"}),
        ('{"text": "a\u2028b"}\r\n{"text": "c"}'.encode(), {1: "a\u2028b", 2: "c"}),  # only \n ends a line
        (b'\xef\xbb\xbf{"text": "a"}', {1: "a"}),  # a byte order mark
    ],
)
def test_json_lines_name_file_and_line(tmp_path: Path, content: bytes, by_line: dict[int, str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    expected = [(f"{path}:{number}", {"text": text}) for number, text in by_line.items()]
    assert [(record.where, record.fields) for record in read_records(path)] == expected


@pytest.mark.parametrize(("call", "reason"), refused_calls("lines"))
def test_a_bad_line_is_handed_on_with_its_reason(tmp_path: Path, call: str, reason: str) -> None:
    line = eval(call)
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, line, {"text": "three"})
    first, second, third = read_records(path)
    assert (first.problem, third.problem) == ("", "")
    assert (second.where, second.fields) == (f"{path}:2", {})
    assert second.problem.startswith(reason)


def test_parquet_names_file_and_row(tmp_path: Path) -> None:
    rows = [{"text": f"text {number}"} for number in range(3000)]
    path = write_parquet(tmp_path / "a.parquet", *rows)
    records = list(read_records(path))
    assert [record.fields for record in records] == rows
    assert (records[0].where, records[-1].where) == (f"{path}:1", f"{path}:3000")
    write_lines(path, b"PAR1 nonsense PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable Parquet file"):
        list(read_records(path))


def test_a_saved_dataset_of_several_splits_asks_which(tmp_path: Path) -> None:
    split, saved = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}]), tmp_path / "saved"
    datasets.DatasetDict(train=split, test=split).save_to_disk(str(saved))
    with pytest.raises(ValueError, match=r"contains the splits test, train: .*saved/train"):
        read_records(saved)
    datasets.DatasetDict(train=split).save_to_disk(str(tmp_path / "single"))
    for folder in (saved / "train", tmp_path / "single"):
        assert texts(folder) == ["one", "two"]
        assert [record.where for record in read_records(folder)] == [f"{folder}:1", f"{folder}:2"]


def test_a_folder_and_a_glob_come_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name, text in (("b.jsonl", "b"), ("a.jsonl", "a"), ("inner/d.jsonl", "d")):
        write_lines(tmp_path / name, {"text": text})
    write_parquet(tmp_path / "c.parquet", {"text": "c"})
    write_lines(tmp_path / "notes.txt", "not data")
    assert texts(tmp_path) == ["a", "b", "c"]
    assert texts(f"{tmp_path}/*.jsonl") == ["a", "b"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["a", "b", "d"]
    odd = tmp_path / "name:en@test"
    odd.mkdir()
    write_lines(odd / "a:b@c.jsonl", {"text": "here"})
    assert texts(odd) == texts(odd / "a:b@c.jsonl") == ["here"]


def no_file(kind: str, path: Path) -> None:
    """Put something at a path that is no regular file."""
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as unix, chdir(path.parent):  # such an address has at most 107 bytes
            unix.bind(path.name)
    elif kind == "a folder":
        path.mkdir()
    else:
        target = {"a link to a device": "/dev/zero", "a link to a named pipe": "pipe"}.get(kind, "nowhere")
        if target == "pipe":
            os.mkfifo(path.parent / target)
        path.symlink_to(target)


KINDS = ["a named pipe", "a socket", "a folder", "a link to a device", "a link to a named pipe"]
KINDS.append(r"a link to nowhere, which cannot be followed \(No such file or directory\)")


@pytest.mark.parametrize("name", ["b.jsonl", "b.json", "b.csv.gz", "b.jsonl.zst", "b.parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, name: str) -> None:
    """Whoever opens a pipe waits for ever, and a device never ends."""
    write_lines(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "c.jsonl").symlink_to("a.jsonl")
    assert texts(tmp_path) == ["a", "a"]
    no_file(kind, tmp_path / name)
    expected = rf"^{tmp_path}/{name} is {kind}: expected a regular file"
    for list_or_read in (read_records, local_files):
        with pytest.raises(ValueError, match=f"{expected}$"):
            list_or_read(tmp_path)
        if kind == "a folder":
            assert texts(f"{tmp_path}/*") == ["a", "a"]  # a glob may match folders
            continue
        with pytest.raises(ValueError, match=f"{expected}$"):
            list_or_read(f"{tmp_path}/*.*")
        with pytest.raises(NoSourceError, match=f"{expected} or a folder$"):
            list_or_read(tmp_path / name)


@pytest.mark.parametrize("file", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow", "more"])
@pytest.mark.parametrize("split", ["", "train"])
def test_a_saved_dataset_with_a_pipe_is_refused(tmp_path: Path, file: str, split: str) -> None:
    dataset = datasets.Dataset.from_list([{"text": "one"}])
    (datasets.DatasetDict(train=dataset) if split else dataset).save_to_disk(str(tmp_path))
    path = tmp_path / split / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for list_or_read in (read_records, local_files):
        with pytest.raises(ValueError, match=f"^{path} is a named pipe: expected a regular file$"):
            list_or_read(tmp_path)


PATHS = ["missing.jsonl", "./missing", "/missing/place", "a/b/c", "./missing@test", "missing.jsonl:en@test"]


@pytest.mark.parametrize("source", [*PATHS, "org/name@", "nowhere-*.jsonl"])
def test_a_path_is_never_requested_from_the_hub(source: str) -> None:
    reason = "no file matches" if "*" in source else "no such file or folder:"
    with pytest.raises(NoSourceError, match=re.escape(f"{reason} {source}")):
        read_records(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Some-Org/some.data_set", ("Some-Org/some.data_set", None, "train")),
        ("org/name@test_sft", ("org/name", None, "test_sft")),
        ("org/name:en", ("org/name", "en", "train")),
        ("org/name:20231101.en@validation", ("org/name", "20231101.en", "validation")),
    ],
)
def test_a_hub_id_is_passed_on(monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[Any, ...]) -> None:
    requests = []

    # the test replaces the network
    def load_dataset(name: str, config: str | None, *, split: str) -> datasets.Dataset:
        requests.append((name, config, split))
        return datasets.Dataset.from_list([{"text": "far"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    records = list(read_records(source))
    assert requests == [expected]
    assert [(record.where, record.fields) for record in records] == [(f"{source}:1", {"text": "far"})]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a dataset's repository below the current folder under its whole name, where `datasets` looks first."""
    folder = tmp_path / "org" / "name"
    head = ["---", "configs:"]
    for config in ("de", "en"):
        head += [f"- config_name: {config}", "  data_files:"]
        (folder / config).mkdir(parents=True)
        for split in ("train", "validation"):
            head += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
            write_lines(folder / config / f"{split}.jsonl", {"text": f"{config} {split}"})
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("repository")
def test_configuration_and_split_choose_a_part() -> None:
    for config in ("de", "en"):
        assert texts(f"org/name:{config}") == [f"{config} train"]
        assert texts(f"org/name:{config}@validation") == [f"{config} validation"]
    assert next(read_records("org/name:en@validation")).where == "org/name:en@validation:1"


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(("call", "reason"), refused_calls("parts of a hub's dataset"))
def test_a_part_that_is_not_there_is_an_error_that_names_what_was_given(call: str, reason: str) -> None:
    source = eval(call)
    with pytest.raises(ValueError, match=rf"(?s)^{source}: the hub's dataset .*{reason}"):
        read_records(source)


@pytest.mark.parametrize(("call", "message"), refused_calls("errors of the hub"))
def test_a_failing_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, call: str, message: str) -> None:
    raised = eval(call)

    def load_dataset(*_: Any, **__: Any) -> datasets.Dataset:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=message):
        read_records("org/name")


def compress(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content)
    else:
        path.write_bytes(content)
    return path


LINES = [{"text": "one\u2028"}, {"text": "two"}, {"text": "x" * 5000}]
CONTENTS = {
    "jsonl": "".join(json.dumps(record) + "\n" for record in LINES),
    "json": json.dumps(LINES, indent=1),
    "csv": "text\n" + "".join(f'"{record["text"]}"\n' for record in LINES),
    "tsv": "text\n" + "".join(f"{record['text']}\n" for record in LINES),
}


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", list(CONTENTS))
def test_every_format_gives_the_same_records(tmp_path: Path, kind: str, ending: str) -> None:
    path = compress(tmp_path / f"a.{kind}{ending}", CONTENTS[kind].encode())
    assert [record.fields for record in read_records(path)] == LINES
    assert [record.fields for record in read_records(tmp_path)] == LINES


def test_lines_of_csv_and_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    text = '\ufeffprompt,completion\r\n"a, ""b""\n\nc",d\r\n\r\ne,f\nonly one\n"g\n",h\n'
    path.write_bytes(text.encode() + b"\xff,i\nj,k")
    records = list(read_records(path))
    assert [record.where.removeprefix(str(path)) for record in records] == [":2", ":6", ":7", ":8", ":10", ":11"]
    assert records[0].fields == {"prompt": 'a, "b"\n\nc', "completion": "d"}
    assert records[3].fields == {"prompt": "g\n", "completion": "h"}
    assert records[2].problem == "has 1 fields, expected 2: prompt, completion"
    assert records[4].problem == "not UTF-8 text in the column 'prompt'"
    path = tmp_path / "a.json"
    path.write_text('\n [\n {"text":\n "a"},\n\n 3, {"text": "b"}]\n')
    records = list(read_records(path))
    assert [record.where for record in records] == [f"{path}:{line}" for line in (3, 6, 6)]
    assert [record.fields for record in records] == [{"text": "a"}, {}, {"text": "b"}]
    assert records[1].problem == "expected an array of JSON objects, got a number (3) in it"


@pytest.mark.parametrize(("call", "reason"), refused_calls("damaged files of records"))
def test_damage_behind_which_no_record_can_be_found_stops_the_reading(tmp_path: Path, call: str, reason: str) -> None:
    kind, text, line = eval(call)
    path = tmp_path / f"a.{kind}"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        list(read_records(path))
    assert str(error.value).startswith(f"{path}:{line}: {reason}")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_that_was_cut_is_refused(tmp_path: Path, ending: str) -> None:
    complete = compress(tmp_path / f"a.jsonl{ending}", CONTENTS["jsonl"].encode()).read_bytes()
    cut = tmp_path / f"cut.jsonl{ending}"
    for size in range(len(complete)):
        cut.write_bytes(complete[:size])
        with pytest.raises(ValueError, match=rf"cut\.jsonl\{ending}: .*(damaged or cut off|is empty)"):
            list(read_records(cut))
    cut.write_bytes(CONTENTS["jsonl"].encode())
    with pytest.raises(ValueError, match="damaged or cut off"):
        list(read_records(cut))


def test_a_folder_with_a_file_and_its_compressed_form_is_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        compress(tmp_path / name, CONTENTS["jsonl"].encode())
    with pytest.raises(ValueError, match=r"has both a\.jsonl\.gz and a\.jsonl"):
        read_records(tmp_path)
