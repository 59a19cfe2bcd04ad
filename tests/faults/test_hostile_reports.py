"""A run folder whose metrics contain a line that no run writes gives an error that names file and line."""

from pathlib import Path

import pytest

from stillhouse.output.report.reading import read_metrics

LINES = [
    *(b'{"loss": 1}', b'{"step": null}', b'{"step": "1"}', b'{"step": true}', b'{"step": 1, "a": "b"}', b"5", b"[]"),
    *(b"\xff", b'{"step": 1e999}', b'{"step": 1, "\\u001b[31m": []}', b"[" * 5000),
    *(b'{"step": ' + b"9" * digits + b"}" for digits in (400, 5000)),
    b'{"step": 1, "a": ' + b"9" * 400 + b"}",
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:20].decode(errors="replace"))
def test_a_metrics_file_with_another_line_in_it(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "loss": 1}\n' + line + b'\n{"step": 2, "loss": 1}\n')
    with pytest.raises(ValueError, match=rf"^{path}:2: ") as error:
        read_metrics(path)
    assert str(error.value).count("\n") < 3
    assert len(str(error.value)) < 400
    assert "\x1b" not in str(error.value)
