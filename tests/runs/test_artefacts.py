"""Files that released versions wrote are read by this version, with the results that were recorded then.

CHANGELOG.md has the rule, and `tests/artefacts/write_artefacts.py` writes the files of a version. Results are equal
to the bit on the machine and torch version that the files name, and within 1e-5 elsewhere.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from artefacts.write_artefacts import ARTEFACTS, DOCUMENTS, FROM_CACHE, REQUESTS, computed
from kit import slow
from kit.runs import ROOT, run
from kit.serving import Server
from safetensors.torch import load
from transformers import AutoModelForCausalLM

import stillhouse
from benchmarks.unchanged.records import machine
from stillhouse.config import load_config
from stillhouse.config.read_config import dotted_values
from stillhouse.hashing import json_hash
from stillhouse.output.progress import STATE, DamagedCheckpointError, read_state
from stillhouse.serving.wire import KEY, decode_answer, decode_request, header_of
from stillhouse.signals import SignalCache
from stillhouse.tools.write_cache import write_cache

VERSIONS = sorted(folder.name for folder in ARTEFACTS.iterdir() if (folder / "run.yaml").exists())


@pytest.fixture(params=VERSIONS)
def artefacts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a version's files, as the working directory."""
    folder = shutil.copytree(ARTEFACTS / request.param, tmp_path / request.param)
    monkeypatch.chdir(folder)
    return folder


def assert_as_recorded(out: Path, name: str) -> None:
    expected = json.loads(Path("expected.json").read_text())
    actual = computed(out)
    if expected["machine"] == machine():
        assert actual == expected[name]
    for key in ("losses", "gradient_norms", "evaluation"):
        assert actual[key] == pytest.approx(expected[name][key], rel=1e-5)


def test_a_configuration_means_what_it_meant(artefacts: Path) -> None:
    """Every value that the version wrote to the run's folder, defaults included, is still a key with that value."""
    written, present = (dict(dotted_values(load_config(name))) for name in ("run/config.yaml", "run.yaml"))
    assert present == written
    recorded = Path("run/config.yaml").read_text()
    assert len(written) >= recorded.count(":") // 2


def test_a_killed_run_continues_from_its_checkpoint(artefacts: Path) -> None:
    before = {path: path.read_bytes() for path in Path("run/checkpoints").rglob("*") if path.is_file()}
    run("distill", "run.yaml")
    assert before.items() <= {path: path.read_bytes() for path in before}.items()
    assert_as_recorded(Path("run"), "run")
    assert "WRONG" not in run("verify", "run").out


def test_a_state_with_fields_of_removed_keys_is_read_and_a_foreign_one_refused(artefacts: Path) -> None:
    checkpoint = Path("run/checkpoints/step-00000002").resolve()
    content = json.loads((checkpoint / STATE).read_text())
    del content["sha256"]
    expected = read_state(checkpoint)
    content["progress"] |= {"gate": {}, "teacher_gradients": {"math": 1.5}}
    (checkpoint / STATE).write_text(json.dumps(content | {"sha256": json_hash(content)}))
    assert read_state(checkpoint) == expected
    for progress in (3, {"gates": {}}):
        content["progress"] = progress
        (checkpoint / STATE).write_text(json.dumps(content | {"sha256": json_hash(content)}))
        with pytest.raises(DamagedCheckpointError, match=r"is of another version: state\.json: progress"):
            read_state(checkpoint)


@pytest.mark.slow
def test_a_run_is_reported_and_exported(artefacts: Path) -> None:
    run("report", "run")
    assert "uPlot" in Path("run/report.html").read_text()
    run("export", "run", "--out", "exported")
    exported, trained = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in ("exported", "run/checkpoints/step-00000002/student")
    )
    assert all(torch.equal(*pair) for pair in zip(exported.parameters(), trained.parameters(), strict=True))


@pytest.mark.parametrize("name", [slow(name) for name in FROM_CACHE])
def test_a_run_reads_a_cache(artefacts: Path, name: str) -> None:
    run("cache", "verify", f"caches/{name}")
    run("distill", "run.yaml", *FROM_CACHE[name])
    assert_as_recorded(Path(f"from_{name}"), f"from_{name}")


def test_packed_signals_are_read(artefacts: Path) -> None:
    """The signals that this version writes unpacked, up to rounding: a draw near a border may be another one."""
    for kind, top_k in (("sampled", 50), ("top_k", 4)):
        written = write_cache(load_config("run.yaml"), Path("unpacked", kind), kind, top_k=top_k)
        packed, unpacked = SignalCache(Path("caches", kind)), SignalCache(Path("unpacked", kind))
        assert (packed.manifest.packed, written.packed) == (True, False)
        rows_of = {document: stored.rows for document, stored in packed.documents.items()}
        assert rows_of == {document: stored.rows for document, stored in unpacked.documents.items()}
        equal = []
        for document, rows in rows_of.items():
            for part in (rows, rows[len(rows) // 2 :], rows[:1]):
                stored, expected = packed.read_document(document, part), unpacked.read_document(document, part)
                assert stored.keys() == expected.keys()
                equal += (stored["ids"] == expected["ids"]).all(1).tolist()
                for name in stored.keys() - {"ids", "counts"}:
                    torch.testing.assert_close(stored[name], expected[name], rtol=1e-4, atol=1e-5)
        assert np.mean(equal) > 0.95


def test_a_recorded_answer_is_decoded(artefacts: Path) -> None:
    """What a later client does with the answer of an earlier server."""
    info = json.loads(Path("wire/info.json").read_text())
    for file, path, kind in REQUESTS:
        if path != "/v1/score":
            continue
        signal, documents = decode_request(Path("wire", file).read_bytes(), kind, 10)
        assert [document.tokens.tolist() for document in documents] == DOCUMENTS
        content = Path("wire", f"{file}.answer").read_bytes()
        teacher, signals = decode_answer(content, signal, info["width"], documents)
        assert teacher == info["teacher"]
        assert [len(next(iter(part.values()))) for part in signals] == [len(tokens) for tokens in DOCUMENTS]


@pytest.mark.slow
def test_a_recorded_request_is_answered(artefacts: Path) -> None:
    """What a later server does with the request of an earlier client: the same answer, with the same names."""
    with Server(artefacts / "teacher", "--dtype", "float32") as server:
        info = json.loads(Path("wire/info.json").read_text())
        changed = {"stillhouse", "model"}
        present = server.info()
        assert {key: present[key] for key in info.keys() - changed} == {
            key: info[key] for key in info.keys() - changed
        }
        for file, path, kind in REQUESTS:
            answer = server.client.post(path, content=Path("wire", file).read_bytes(), headers={"content-type": kind})
            assert answer.status_code == 200, answer.text
            expected = Path("wire", f"{file}.answer").read_bytes()
            if path == "/v1/score":
                assert header_of(answer.content, KEY) == header_of(expected, KEY)
                assert_close(load(answer.content), load(expected))
            else:
                assert_close(answer.json()["choices"], json.loads(expected)["choices"])


def assert_close(actual: Any, expected: Any) -> None:
    """Compare nested values; an answer may have more keys than the recorded one."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_close(actual[key], value)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            assert_close(*pair)
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    elif isinstance(expected, float):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    else:
        assert actual == expected


def test_the_files_of_this_release_are_small_and_name_no_place() -> None:
    version = ARTEFACTS / stillhouse.__version__
    assert version.is_dir(), "tests/artefacts/write_artefacts.py writes the files of a new release"
    files = [path for path in version.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert not [path for path in files if str(ROOT).encode() in path.read_bytes()]
