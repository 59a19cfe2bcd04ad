"""CSV, JSON arrays and compressed files: the records and their lines, and damage that is named."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from kit.config_cases import refused_calls

from stillhouse.data import DataError, read_records


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
    assert [(record.where, record.fields) for record in records] == [
        (f"{path}:3", {"text": "a"}),
        (f"{path}:6", {}),
        (f"{path}:6", {"text": "b"}),
    ]
    assert records[1].problem == "expected an array of JSON objects, got a number (3) in it"


ARRAY = "not a readable JSON array, from this record on: "


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
