"""DistillKit's Parquet files and speculators' hidden states: read exactly, and refused if they are not the teacher's.

Speculators' files are made of the teacher's own forward pass in transformers; DistillKit's by a small writer of its
form in this file, with bits as text, and by the export.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from kit.runs import contents, run, session_of, write_run
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillhouse.run.setup import RunSetup
from stillhouse.signals import SignalCache
from stillhouse.signals.cache.formats.distillkit import Compression, DistillkitFiles
from stillhouse.tools.export_cache import export_distillkit
from stillhouse.tools.import_cache import import_distillkit, import_speculators
from stillhouse.tools.write_cache import write_cache

FORWARD_KL = {"objective.loss": "forward_kl"}
K, VOCABULARY = 7, 400
EXACT = Compression(VOCABULARY, K, "float32", delta_encoding=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of top-k ids in three dtypes and of hidden states, and what the two projects would have written."""
    folder = tmp_path_factory.mktemp("formats")
    config = write_run(folder, **FORWARD_KL)
    for dtype in ("float32", "bfloat16", "float16"):
        write_cache(config, folder / dtype, "top_k", top_k=K, dtype=dtype)
    write_cache(config, folder / "hidden", "hidden")
    export_distillkit(folder / "float32", RunSetup(config).load_data, folder / "exported")
    write_speculators(folder, folder / "states")
    return folder


def token_lists(folder: Path) -> list[np.ndarray]:
    session = session_of(folder, **FORWARD_KL)
    assert session.evaluation is not None
    splits = (session.train.documents, session.evaluation.documents)
    return [documents.tokens(number) for documents in splits for number in range(len(documents))]


@torch.no_grad()
def write_speculators(folder: Path, out: Path, layers: tuple[int, ...] = (0, 1, 2)) -> None:
    """As vLLM's extraction does: the outputs of some layers before the last norm, row t of token t."""
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    count = model.config.num_hidden_layers
    outputs: dict[int, Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, __, output, number=number: outputs.update({number: output[0]}))
    out.mkdir()
    for number, tokens in enumerate(token_lists(folder)):
        model(torch.from_numpy(tokens)[None].long())
        states = torch.stack([outputs[min(layer, count - 1)].view(len(tokens), -1) for layer in layers], 1)
        ids = torch.from_numpy(tokens).long()
        save_file({"token_ids": ids, "hidden_states": states}, out / f"hs_{number}.safetensors")


def assert_same_rows(first: SignalCache, second: SignalCache, names: tuple[str, ...], rtol: float = 0.0) -> None:
    assert first.documents() == second.documents()
    for document, rows in first.documents().items():
        one, other = first.read_document(document, rows), second.read_document(document, rows)
        for name in names:
            torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=rtol)


def imported(
    folder: Path, out: Path, source: Path | None = None, compression: Compression = EXACT, **options: Any
) -> SignalCache:
    """A cache of DistillKit's files, by default of the export of float32."""
    teacher = str(folder / options.pop("teacher", "teacher"))
    import_distillkit(source or folder / "exported", compression, teacher, out, **options)
    return SignalCache(out)


@pytest.mark.parametrize(("dtype", "packed"), [("float32", False), ("bfloat16", True), ("float16", False)])
def test_an_export_is_imported_to_the_bit(folder: Path, tmp_path: Path, dtype: str, packed: bool) -> None:
    config = write_run(folder, **FORWARD_KL)
    compression = export_distillkit(folder / dtype, RunSetup(config).load_data, tmp_path / "exported")
    assert compression == Compression(VOCABULARY, K, dtype, delta_encoding=False)
    first = SignalCache(folder / dtype)
    second = imported(folder, tmp_path / "back", tmp_path / "exported", compression, packed=packed)
    second.verify()
    assert_same_rows(first, second, ("ids", "log_probs"))
    if dtype == "float32":
        assert_same_rows(first, second, ("tail_log_prob",), rtol=1e-4)
    assert second.manifest.teacher_hash == first.manifest.teacher_hash
    assert second.manifest.tokenizer_hash == first.manifest.tokenizer_hash


def test_the_bytes_of_an_export(folder: Path) -> None:
    """A row: K float32 numbers, and K ids of 9 bits, the most significant bit first."""
    table = pq.read_table(folder / "exported" / "data_0.parquet")
    assert [str(kind) for kind in table.schema.types] == [
        "list<element: uint64>",
        "list<element: list<element: uint8>>",
        "list<element: list<element: uint8>>",
    ]
    tokens = table["input_ids"][3].as_py()
    cache = SignalCache(folder / "float32")
    document = list(cache.documents())[3]
    expected = cache.read_document(document, range(len(tokens) - 1))
    for column, values in (("compressed_logprobs", expected["log_probs"]), ("bytepacked_indices", expected["ids"])):
        rows = table[column][3].as_py()
        assert len(rows) == len(tokens) - 1
        if column == "compressed_logprobs":
            assert [bytes(row) for row in rows] == [row.numpy().astype("<f4").tobytes() for row in values]
        else:
            texts = ["".join(f"{index:09b}" for index in row.tolist()) for row in values]
            assert ["".join(f"{byte:08b}" for byte in row)[: 9 * K] for row in rows] == texts
    assert (folder / "exported" / "compression_config.yaml").read_text().startswith(f"d: {VOCABULARY}\nk: {K}\n")


def with_differences(folder: Path, out: Path) -> Compression:
    """The exported file as DistillKit's default form: each log-probability less the one before it."""
    table = pq.read_table(folder / "exported" / "data_0.parquet")
    documents = []
    for rows in table["compressed_logprobs"].to_pylist():
        values = np.frombuffer(np.array(rows, dtype=np.uint8).tobytes(), dtype="<f4").reshape(len(rows), K)
        differences = np.concatenate([values[:, :1], np.diff(values, axis=1)], 1).astype("<f4")
        documents.append([list(row.tobytes()) for row in differences])
    column = pa.array(documents, type=pa.list_(pa.list_(pa.uint8())))
    out.mkdir()
    pq.write_table(table.set_column(1, "compressed_logprobs", column), out / "data_0.parquet", row_group_size=7)
    return Compression.of({"d": VOCABULARY, "k": K, "exact_k": K, "residual_bins": []}, "a test")


def test_differences_are_added_up(folder: Path, tmp_path: Path) -> None:
    compression = with_differences(folder, tmp_path / "files")
    assert compression.delta_encoding
    first = SignalCache(folder / "float32")
    second = imported(folder, tmp_path / "c", tmp_path / "files", compression, shard_bytes=5000)
    assert second.manifest.shards > 3
    assert_same_rows(first, second, ("ids",))
    assert_same_rows(first, second, ("log_probs",), rtol=1e-6)


def edited(folder: Path, out: Path, change: Callable[[list[dict[str, Any]]], object]) -> Path:
    """The exported file with changed rows."""
    table = pq.read_table(folder / "exported" / "data_0.parquet")
    rows = table.to_pylist()
    change(rows)
    out.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), out / "data_0.parquet")
    return out


def shifted(rows: list[dict[str, Any]]) -> None:
    """Each distribution one token later."""
    for row in rows:
        for name in ("compressed_logprobs", "bytepacked_indices"):
            row[name] = row[name][-1:] + row[name][:-1]


def with_ids(value: list[int]) -> Callable[[list[dict[str, Any]]], object]:
    """Other bytes of the ids of a row of document 5."""
    return lambda rows: rows[5]["bytepacked_indices"].__setitem__(2, value)


def with_log_probs(*values: float) -> Callable[[list[dict[str, Any]]], object]:
    content = list(np.array(values, dtype="<f4").tobytes())
    return lambda rows: rows[5]["compressed_logprobs"].__setitem__(2, content)


DAMAGE: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "an id beyond": (
        with_ids([255] * 8),
        f"row 5: the distribution of token 3 has an id that is not in the vocabulary of {VOCABULARY}",
    ),
    "an id twice": (with_ids([0] * 8), "row 5: the distribution of token 3 has an id twice"),
    "a positive number": (with_log_probs(*[0.1] * 7), "token 3 has a .* NaN or positive"),
    "NaN": (with_log_probs(*[np.nan] * 7), "token 3 has a .* NaN or positive"),
    "too much mass": (with_log_probs(*[-0.5] * 7), "token 3 has more mass than 1"),
    "ascending": (with_log_probs(*[-9.0] * 6, -8.0), "token 3 has .* do not descend"),
    "fewer than k": (with_log_probs(-1.0, *[-np.inf] * 6), "token 3 has fewer entries than k"),
    "a shorter row": (with_log_probs(0, 0, 0), "row 5: 'compressed_logprobs' is no list of rows of 28"),
    "a lost row": (lambda rows: rows[5]["bytepacked_indices"].pop(), "row 5: .* rows of .* tokens: expected"),
    "lost rows": (
        lambda rows: [rows[5][name].pop() for name in ("bytepacked_indices", "compressed_logprobs")],
        "row 5: .* rows of .* tokens: expected",
    ),
    "a token beyond": (lambda rows: rows[5]["input_ids"].__setitem__(1, 10**6), "row 5: token ids from"),
    "a shift": (shifted, "differ from the teacher's by .* nats on average"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_of_distillkit_are_refused_by_row(folder: Path, tmp_path: Path, damage: str) -> None:
    change, message = DAMAGE[damage]
    with pytest.raises(ValueError, match=message):
        imported(folder, tmp_path / "c", edited(folder, tmp_path / "files", change))
    with pytest.raises(ValueError, match=r"is unfinished|is not a cache"):
        SignalCache(tmp_path / "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"polynomial_terms": [0, 1, "sqrt"]}, "polynomial_terms approximates"),
        ({"exact_k": 3, "residual_bins": [{"element_bits": 4}]}, "residual_bins approximates"),
        ({"exact_k": 3}, "exact_k is 3 of k = 7"),
        ({"d": None}, "d is None: expected a positive number"),
        ({"exact_dtype": "float64"}, "exact_dtype 'float64'"),
        ({"k": 6, "exact_k": 6}, "is no list of rows of 24 bytes"),
        ({"d": 2**9 + 1}, "'bytepacked_indices' is no list of rows of 9 bytes"),
        ({"d": 100}, "d = 100, but the teacher has .* tokens"),
        ({"exact_dtype": "float16"}, "is no list of rows of 14 bytes"),
    ],
)
def test_another_configuration_is_refused(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        imported(folder, tmp_path / "c", compression=Compression.of(EXACT.as_dict() | change, "config.yaml"))


def test_another_teacher_or_temperature_is_refused(folder: Path, tmp_path: Path) -> None:
    for options in ({"teacher": "student"}, {"temperature": 2.0}):
        with pytest.raises(ValueError, match="differ from the teacher's by"):
            imported(folder, tmp_path / "c", **options)


def test_files_that_are_no_parquet_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no Parquet files"):
        DistillkitFiles(tmp_path, EXACT)
    (tmp_path / "data_0.parquet").write_bytes((folder / "exported" / "data_0.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"data_0\.parquet is not a Parquet file"):
        DistillkitFiles(tmp_path, EXACT)
    pq.write_table(pa.table({"input_ids": [[1]], "packed_indices": [[1]]}), tmp_path / "data_0.parquet")
    with pytest.raises(ValueError, match="no column compressed_logprobs"):
        DistillkitFiles(tmp_path, EXACT)


def test_an_export_needs_the_data_and_all_rows_of_it(folder: Path, tmp_path: Path) -> None:
    config = write_run(folder, **FORWARD_KL)
    with pytest.raises(ValueError, match="has hidden states in float32: DistillKit reads top-k"):
        export_distillkit(folder / "hidden", RunSetup(config).load_data, tmp_path / "x")
    other = write_run(folder, **FORWARD_KL, **{"data.train": str(folder / "eval.jsonl")})
    with pytest.raises(ValueError, match="has 40 documents that are not in the data"):
        export_distillkit(folder / "float32", RunSetup(other).load_data, tmp_path / "x")
    assert not list(tmp_path.iterdir())
    (tmp_path / "x.partial").mkdir()
    with pytest.raises(ValueError, match=r"x\.partial exists: another process is writing there"):
        export_distillkit(folder / "float32", RunSetup(config).load_data, tmp_path / "x")
    assert (tmp_path / "x.partial").is_dir()


def test_hidden_states_of_speculators_are_the_teachers(folder: Path, tmp_path: Path) -> None:
    import_speculators(folder / "states", str(folder / "teacher"), tmp_path / "c", shard_bytes=5000)
    first, second = SignalCache(folder / "hidden"), SignalCache(tmp_path / "c")
    second.verify()
    assert_same_rows(first, second, ("hidden",), rtol=2e-5)


def test_states_that_are_normed_already_are_stored_as_they_are(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    for number, path in enumerate(sorted((folder / "states").iterdir())):
        stored = load_file(path)
        with torch.no_grad():
            normed = model.model.norm(stored["hidden_states"][:, -1:])
        save_file(stored | {"hidden_states": normed}, tmp_path / "states" / f"hs_{number}.safetensors")
    import_speculators(tmp_path / "states", str(folder / "teacher"), tmp_path / "c")
    assert_same_rows(SignalCache(folder / "hidden"), SignalCache(tmp_path / "c"), ("hidden",), rtol=2e-5)


STATES: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "another layer": ("hidden_states", lambda states: states[:, :1], "its last layer differs"),
    "a shift": ("hidden_states", lambda states: states.roll(1, 0), "its last layer differs"),
    "a lost row": ("hidden_states", lambda states: states[1:], "hidden_states of shape .* for its"),
    "no layers": ("hidden_states", lambda states: states[:, 0], "hidden_states of shape"),
    "NaN": ("hidden_states", lambda states: states * torch.nan, "numbers that are not finite"),
    "another width": ("hidden_states", lambda states: states[..., :-1], "hidden_states of shape"),
    "float64": ("hidden_states", lambda states: states.double(), "hidden_states of torch.float64"),
    "tokens beyond": ("token_ids", lambda ids: ids + 10**6, "token ids from .* of 400"),
    "tokens as numbers": ("token_ids", lambda ids: ids.double(), "token_ids is torch.float64"),
}


@pytest.mark.parametrize("damage", STATES)
def test_states_that_are_not_the_teachers_are_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    name, change, message = STATES[damage]
    (tmp_path / "states").mkdir()
    for path in (folder / "states").iterdir():
        stored = load_file(path)
        save_file(stored | {name: change(stored[name]).contiguous()}, tmp_path / "states" / path.name)
    with pytest.raises(ValueError, match=message):
        import_speculators(tmp_path / "states", str(folder / "teacher"), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_truncated_or_missing_file_of_states_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no files named hs_0\.safetensors"):
        import_speculators(tmp_path, str(folder / "teacher"), tmp_path / "c")
    (tmp_path / "hs_0.safetensors").write_bytes((folder / "states" / "hs_0.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"hs_0\.safetensors is not a file of hidden states"):
        import_speculators(tmp_path, str(folder / "teacher"), tmp_path / "c")


def test_the_commands(folder: Path, tmp_path: Path) -> None:
    write_run(folder, **FORWARD_KL)
    files = tmp_path / "files"
    shown = run("cache", "export", folder / "float32", folder / "run.yaml", "--to", "distillkit", "--out", files).out
    assert "7 of 400 ids per token in float32" in shown
    options = ("--from", "distillkit", "--teacher", folder / "teacher", "--packed")
    shown = run("cache", "import", files, *options, "--out", tmp_path / "c").out
    same = imported(folder, tmp_path / "same", files, packed=True)
    assert shown == same.manifest.summary(tmp_path / "c") + "\n"
    assert contents(tmp_path / "c") == contents(tmp_path / "same")
    (files / "compression_config.yaml").unlink()
    assert "compression_config.yaml is missing" in run("cache", "import", files, *options, "--out", "x", code=2).err
    options = ("--from", "speculators", "--teacher", folder / "teacher")
    shown = run("cache", "import", folder / "states", *options, "--out", tmp_path / "d").out
    assert "hidden states in float32" in shown
