"""Reading records from every kind of source, and errors that name the file and line."""

import json
import os
import socket
from contextlib import chdir
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from kit.runs import run, write_run

from stillhouse.data.read.data_source import local_files, read_records
from stillhouse.data.record import NoSourceError


def write_lines(path: Path, *lines: str | bytes | dict) -> Path:
    encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in encoded))
    return path


def texts(source: Path | str) -> list[str]:
    records = list(read_records(source))
    assert not [record.problem for record in records if record.problem]
    return [record.fields["text"] for record in records]


def test_json_lines_names_file_and_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, "", {"text": "two"}, "")
    records = list(read_records(path))
    assert [(record.where, record.fields) for record in records] == [
        (f"{path}:1", {"text": "one"}),
        (f"{path}:3", {"text": "two"}),
    ]


def test_a_line_ends_at_newline_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "a\u2028b"}\r\n{"text": "c"}'.encode())  # a line separator within a string
    assert texts(path) == ["a\u2028b", "c"]


def test_byte_order_mark(tmp_path: Path) -> None:
    assert texts(write_lines(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + b'{"text": "a"}')) == ["a"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            '{"text": "a"',
            "not valid JSON: Expecting ',' delimiter at column 13; expected one object per line",
        ),
        ("[1, 2]", "expected a JSON object per line, got a list ([1, 2])"),
        ('"a"', "expected a JSON object per line, got a string ('a')"),
        ("null", "expected a JSON object per line, got null"),
        (b'{"text": "\xff"}', "not UTF-8 text: byte 11 of the line is 0xff"),
        ('{"n": ' + "1" * 5000 + "}", "not readable as JSON: "),
        ("[" * 100_000, "not readable as JSON: "),
    ],
)
def test_a_bad_line_is_handed_on_with_its_reason(tmp_path: Path, line: str | bytes, reason: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, line, {"text": "three"})
    first, second, third = read_records(path)
    assert (first.problem, third.problem) == ("", "")
    assert second.where == f"{path}:2"
    assert second.problem.startswith(reason)
    assert second.fields == {}


def test_parquet_names_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"text": f"text {number}"} for number in range(3000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    records = list(read_records(path))
    assert [record.fields for record in records] == rows
    assert (records[0].where, records[-1].where) == (f"{path}:1", f"{path}:3000")


def test_a_broken_parquet_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.parquet", b"PAR1 nonsense PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable Parquet file"):
        list(read_records(path))


def test_a_saved_dataset(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}]).save_to_disk(str(tmp_path / "saved"))
    records = list(read_records(tmp_path / "saved"))
    assert [record.fields["text"] for record in records] == ["one", "two"]
    assert records[1].where == f"{tmp_path / 'saved'}:2"


def test_a_saved_dataset_of_several_splits_asks_which(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list([{"text": "one"}])
    datasets.DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"contains the splits test, train; .*saved/train"):
        read_records(tmp_path / "saved")
    assert texts(tmp_path / "saved" / "train") == ["one"]
    datasets.DatasetDict(train=split).save_to_disk(str(tmp_path / "single"))
    assert texts(tmp_path / "single") == ["one"]


def test_a_folder_and_a_glob_come_in_the_order_of_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", {"text": "b"})
    write_lines(tmp_path / "a.jsonl", {"text": "a"})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "c"}]), tmp_path / "c.parquet")
    write_lines(tmp_path / "notes.txt", "not data")
    assert texts(tmp_path) == ["a", "b", "c"]
    assert texts(f"{tmp_path}/*.jsonl") == ["a", "b"]
    (tmp_path / "inner").mkdir()
    write_lines(tmp_path / "inner" / "d.jsonl", {"text": "d"})
    assert texts(f"{tmp_path}/**/*.jsonl") == ["a", "b", "d"]


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


KINDS = [
    "a named pipe",
    "a socket",
    "a folder",
    "a link to a device",
    "a link to a named pipe",
    r"a link to nowhere, which cannot be followed \(No such file or directory\)",
]


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
    if kind != "a folder":
        with pytest.raises(NoSourceError, match=f"{expected} or a folder$"):
            read_records(tmp_path / name)


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


def test_a_run_on_a_folder_with_a_pipe_says_its_name(tmp_path: Path) -> None:
    write_run(tmp_path, teacher=False)
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").symlink_to(tmp_path / "train.jsonl")
    os.mkfifo(data / "b.jsonl")
    assert f"{data}/b.jsonl is a named pipe" in run("check", tmp_path / "run.yaml", f"data.train={data}", code=1).err
    pipe = data / "b.jsonl"
    found = run("check", tmp_path / "run.yaml", f"data.train={pipe}", code=2).err
    assert f"data.train: {pipe} is a named pipe: expected a regular file or a folder" in found


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", "no such file or folder: missing.jsonl"),
        ("./missing", "no such file or folder: ./missing"),
        ("/missing/place", "no such file or folder: /missing/place"),
        ("a/b/c", "no such file or folder: a/b/c"),
        ("./missing@test", "no such file or folder: ./missing@test"),
        ("missing.jsonl:en@test", "no such file or folder: missing.jsonl:en@test"),
        ("org/name@", "no such file or folder: org/name@"),
        ("nowhere-*.jsonl", r"no file matches nowhere-\*.jsonl"),
    ],
)
def test_a_path_is_never_requested_from_the_hub(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_records(source)


def test_unknown_formats(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.xlsx: its format is not known; expected .*\.jsonl"):
        read_records(write_lines(tmp_path / "a.xlsx", "text"))
    with pytest.raises(ValueError, match=r"neither a saved dataset nor a folder with files ending in \.jsonl"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Some-Org/some.data_set", ("Some-Org/some.data_set", None, "train")),
        ("org/name@test_sft", ("org/name", None, "test_sft")),
        ("org/name:en", ("org/name", "en", "train")),
        ("org/name:20231101.en@validation", ("org/name", "20231101.en", "validation")),
    ],
)
def test_a_hub_id_is_passed_on_untouched(
    monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[str, str | None, str]
) -> None:
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
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a dataset's repository below the current folder under its whole name, where `datasets` looks first."""
    folder = tmp_path / "org" / "name"
    parts = [(config, split) for config in ("de", "en") for split in ("train", "validation")]
    head = ["---", "configs:"]
    for config in ("de", "en"):
        head += [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "validation"):
            head += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    for config, split in parts:
        (folder / config).mkdir(parents=True, exist_ok=True)
        write_lines(folder / config / f"{split}.jsonl", {"text": f"{config} {split}"})
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return folder


def test_configuration_and_split_choose_a_part(repository: Path) -> None:
    for config in ("de", "en"):
        assert texts(f"org/name:{config}") == [f"{config} train"]
        assert texts(f"org/name:{config}@validation") == [f"{config} validation"]
    assert next(read_records("org/name:en@validation")).where == "org/name:en@validation:1"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("org/name@validation", r"Config name is missing.*\['de', 'en'\]"),
        ("org/name:fr", r"BuilderConfig 'fr' not found.*\['de', 'en'\]"),
        ("org/name:en@test", 'Unknown split "test"'),
    ],
)
def test_a_part_that_is_not_there_is_an_error_that_names_what_was_given(
    repository: Path, source: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^{source}: the hub's dataset .*{reason}"):
        read_records(source)


def test_a_local_path_is_never_taken_apart(tmp_path: Path) -> None:
    odd = tmp_path / "name:en@test"
    odd.mkdir()
    write_lines(odd / "a:b@c.jsonl", {"text": "here"})
    assert texts(odd) == texts(odd / "a:b@c.jsonl") == ["here"]


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (datasets.exceptions.DatasetNotFoundError("does not exist"), "no dataset on the hub: does not exist"),
        (ConnectionError("unreachable"), "no dataset on the hub: unreachable"),
        (
            ValueError('Unknown split "train"'),
            'org/name:configuration@split names a part of it\\): Unknown split "train"',
        ),
    ],
)
def test_a_failing_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str) -> None:
    def load_dataset(name: str, config: str | None, *, split: str) -> datasets.Dataset:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=message):
        read_records("org/name")
