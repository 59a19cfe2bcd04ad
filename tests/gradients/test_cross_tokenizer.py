"""Runs with a teacher of another tokenizer: its signals by brute force, exact limits, layouts, and a whole run.

T tokens, N rows of a document, V vocabulary, K ids per token.
"""

import json
import math
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.ranks import run_ranks
from kit.runs import Command, contents, forward_backward, metrics, run, session_of, write_records, write_run
from kit.signal_hooks import signal_at
from kit.teacher_gradients import gradients
from kit.tensors import assert_near
from kit.toy_tokenizer import PLAIN_TEMPLATE
from kit.two_tokenizers import GOLD, K, demo_text, tokenizer, write_model, write_pair
from torch import Tensor

from stillhouse.data import DataError, Documents
from stillhouse.models import Decoder
from stillhouse.objective import TEACHER, SpanSignal, TopK
from stillhouse.signals import CrossTokenizerStore, LocalModelStore
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

TAU = 1.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("cross"))


def store_of(folder: Path, student: str, teacher: str, top_k: int = K) -> CrossTokenizerStore:
    path = folder / f"model {teacher}"
    if not path.exists():
        write_model(path, teacher, family="qwen3", seed=2)
    signal = SignalSpec("top_k", "float32", top_k, TAU, with_label=True)
    load = lambda device: Decoder.from_pretrained(path, dtype="float32", device=device)  # noqa: E731
    inner = LocalModelStore("teacher", "hash", signal, load, 64)
    store = CrossTokenizerStore(inner, tokenizer(student), tokenizer(teacher))
    store.start(torch.device("cpu"))
    return store


def token_lists(student: str) -> list[np.ndarray]:
    made = tokenizer(student)
    texts = [*(text[:90] for text in demo_text()[:6]), "Hallå 😀  x1024\n\n中", "ab"]
    return [np.array([*made(text)["input_ids"], made.eos_token_id], dtype=np.int32) for text in texts]


def all_rows(tokens: np.ndarray) -> DocumentRows:
    return DocumentRows(tokens, range(len(tokens) - 1))


def teacher_log_probs(folder: Path, teacher: str, ids: np.ndarray) -> Tensor:
    """log p of every row over the whole vocabulary, [N, V] float64."""
    model = Decoder.from_pretrained(folder / f"model {teacher}", dtype="float64")
    with torch.no_grad():
        return torch.log_softmax(model(torch.from_numpy(ids.astype(np.int64))[None])[0] / TAU, 1)


@pytest.mark.parametrize("top_k", [3, *(pytest.param(top_k, marks=pytest.mark.slow) for top_k in (1, K))])
@pytest.mark.parametrize(
    ("student", "teacher"),
    [("small", "large"), ("large", "small"), ("small", "pieces"), ("pieces", "large"), ("mistral", "deepseek")],
)
def test_merged_probabilities_by_brute_force(folder: Path, student: str, teacher: str, top_k: int) -> None:
    """Every event of the teacher's next token, one by one, from its whole distribution in float64."""
    store = store_of(folder, student, teacher, top_k=top_k)
    documents = token_lists(student)
    merged = 0
    for tokens, tensors, aligned in zip(
        documents, store.read([all_rows(tokens) for tokens in documents]), store.aligner.align(documents), strict=True
    ):
        log_p_NV = teacher_log_probs(folder, teacher, aligned.teacher_tokens)
        first, later = torch.zeros(len(tokens) - 1), torch.zeros(len(tokens) - 1, dtype=torch.float64)
        for span in aligned.spans:
            if span.student.start == 0 or span.teacher.start == 0:
                continue
            border = log_p_NV[span.teacher.start - 1].topk(top_k + 1).values[-2:]
            if border[0] - border[1] < 1e-3:  # which of the two is among the likeliest is a matter of rounding
                first[span.student.start - 1], later[span.student.start : span.student.stop - 1] = (
                    tensors["weight"][span.student.start - 1],
                    tensors["continuation"][span.student.start : span.student.stop - 1],
                )
                continue
            actual = [int(aligned.teacher_tokens[at]) for at in span.teacher]
            log_p = sum(float(log_p_NV[at - 1, token]) for at, token in zip(span.teacher, actual, strict=True))
            row, y_0 = span.student.start - 1, int(tokens[span.student.start])
            begins = span.student.start in aligned.begins
            first_of = store.aligner.first_of_text if begins else store.aligner.first_of
            expected, tail = outcomes(first_of, log_p_NV[span.teacher.start - 1], actual[0], log_p, y_0, top_k)
            check_row({name: values[row] for name, values in tensors.items()}, expected, tail, y_0)
            first[row] = 1.0
            later[span.student.start : span.student.stop - 1] = math.exp(log_p)
            merged += len(actual) > 1 or len(span.student) > 1
        assert torch.equal(tensors["weight"], first)
        torch.testing.assert_close(tensors["continuation"].double(), later, rtol=1e-4, atol=1e-12)
    assert merged > 0


def outcomes(
    first_of: np.ndarray, log_p_V: Tensor, x_0: int, log_p: float, y_0: int, top_k: int
) -> tuple[dict[int, float], float]:
    """The probability of each of the student's outcomes, and that of all others."""
    p_V = log_p_V.exp()
    expected, tail = {y_0: math.exp(log_p)}, 0.0
    known = {*log_p_V.topk(top_k).indices.tolist(), x_0}
    for token in range(len(p_V)):
        probability = float(p_V[token]) - (math.exp(log_p) if token == x_0 else 0.0)
        counts_for = int(first_of[token]) if token in known and token < len(first_of) else -1
        if counts_for < 0:
            tail += probability
        else:
            expected[counts_for] = expected.get(counts_for, 0.0) + probability
    return expected, tail


def check_row(tensors: dict[str, Tensor], expected: dict[int, float], tail: float, y_0: int) -> None:
    ids, p = tensors["ids"].tolist(), tensors["log_probs"].double().exp()
    assert ids[0] == y_0
    present = {token: float(p[at]) for at, token in enumerate(ids) if token >= 0}
    assert len(present) == sum(token >= 0 for token in ids)  # no id comes twice
    assert sum(present.values()) + math.exp(float(tensors["tail_log_prob"])) == pytest.approx(1.0, abs=1e-5)
    for token, probability in expected.items():
        assert present.pop(token, 0.0) == pytest.approx(probability, rel=2e-4, abs=1e-9)
    assert not present
    assert math.exp(float(tensors["tail_log_prob"])) == pytest.approx(tail, rel=2e-4, abs=1e-9)


def test_a_part_of_the_rows(folder: Path) -> None:
    """A context rank asks for some rows of a document; spans may begin before them and end after them."""
    store = store_of(folder, "small", "pieces")
    for tokens, tensors in zip(
        token_lists("small"), store.read([all_rows(tokens) for tokens in token_lists("small")]), strict=True
    ):
        for start in range(0, len(tokens) - 1, 7):
            rows = range(start, min(start + 5, len(tokens) - 1))
            (part,) = store.read([DocumentRows(tokens, rows)])
            for name, values in part.items():
                torch.testing.assert_close(values, tensors[name][rows.start : rows.stop], rtol=1e-5, atol=1e-6)


def test_the_signals_of_a_run(folder: Path) -> None:
    session = session_of(folder, **GOLD, **{"teacher.tail": "renormalize", "objective.temperature": TAU})
    micro_batches = session.models.shard(session.schedule.step_schedule.micro_batches(session.data.train, 0))
    for signals in session.models.source.request(micro_batches).result():
        span = signals[TEACHER]
        assert isinstance(span, SpanSignal)
        assert isinstance(span.first, TopK)
        assert (span.first.tail, span.first.temperature) == ("renormalize", TAU)
    session.close()


@pytest.mark.parametrize("loss", ["forward_kl", "0.3*cross_entropy + 0.7*jsd(0.5)", "reverse_kl"])
def test_all_ids_of_the_same_tokenizer_give_the_live_teachers_gradients(
    folder: Path, tmp_path: Path, loss: str
) -> None:
    """K = V: nothing is left to approximate, and the gradient is that of the exact signal."""
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    write_model(tmp_path / "student", "small", family="llama", seed=1)
    write_model(tmp_path / "teacher", "small", family="qwen3", seed=2)
    vocabulary = len(tokenizer("small"))
    exact = gradients(tmp_path, **{"objective.loss": loss})[1]
    gold = {"teacher.cross_tokenizer": "gold", "teacher.top_k": vocabulary}
    merged = gradients(tmp_path, **{"objective.loss": loss, **gold})[1]
    assert_near(merged, exact, 2e-5)


def test_one_of_several_teachers(folder: Path, tmp_path: Path) -> None:
    """Beside a teacher with the student's tokenizer: the gradients of each alone, with the teachers' weights."""
    write_model(tmp_path / "same", "small", family="qwen3", seed=4)
    loss = {"objective.loss": "forward_kl"}
    gold = {key.removeprefix("teacher."): value for key, value in GOLD.items()}
    other = {"model": str(folder / "teacher"), **gold, "temperature": 2.0}
    both = gradients(
        folder,
        **loss,
        **{"teachers.same": {"model": str(tmp_path / "same")}, "teachers.other": other | {"weight": 3.0}},
    )[1]
    same = gradients(folder, **loss, **{"teacher.model": str(tmp_path / "same")})[1]
    only = gradients(folder, **loss, **GOLD, **{"objective.temperature": 2.0})[1]
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, 0.25 * same[name] + 0.75 * only[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_whole_run_which_is_resumed_to_the_same_weights(folder: Path, tmp_path: Path) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    write_run(folder, **GOLD, **{"checkpoint.every": 2}, out=str(uninterrupted))
    checked = run("check", folder / "run.yaml").out
    assert "an approximation" in checked.splitlines()[0]
    assert "the same for student and teacher" not in checked
    assert "an approximation" in run("distill", folder / "run.yaml").out.splitlines()[0]
    records = metrics(uninterrupted)
    assert records[-1]["step"] == 6
    assert "eval/forward_kl" in records[-1]
    steps = [record for record in records if "loss/total_nats_per_token" in record]
    assert "loss/continuation_nats_per_token" in steps[0]
    assert not (uninterrupted / "tokens.json").exists()
    assert "contains this run, which is complete" in run("check", folder / "run.yaml").out
    command = Command(
        "distill", folder / "run.yaml", f"out={killed}", hook=signal_at, hook_arguments=(3, signal.SIGKILL)
    )
    assert command.wait() == -signal.SIGKILL, command.err
    shutil.copytree(folder / "teacher", tmp_path / "other")
    write_model(tmp_path / "changed", "large", family="qwen3", seed=3)
    shutil.copy(tmp_path / "changed" / "model.safetensors", tmp_path / "other")
    other = f"teacher.model={tmp_path / 'other'}"
    assert (
        "another run, with a different teacher"
        in run("distill", folder / "run.yaml", f"out={killed}", other, code=1).err
    )
    resumed = run("distill", folder / "run.yaml", f"out={killed}")
    assert f"resuming from {killed}/checkpoints/step-00000002\n" in resumed.out
    assert (killed / "model" / "model.safetensors").is_file()
    assert contents(killed / "model") == contents(uninterrupted / "model")


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(folder: Path) -> None:
    """Every layout of two processes, the objective and the temperature of a run: gradients, and not only the loss."""
    write_run(folder, **GOLD, **{"objective.temperature": TAU})
    ranks = run_ranks(2, "parity", folder / "run.yaml")
    for layout in ("fsdp 2", "tensor 2", "context 2", "pipeline 2, 1f1b"):
        (row,) = [line for line in ranks[0].out.splitlines() if line.startswith(f"{layout}  ")]
        assert row.endswith("  same"), ranks.texts


def test_a_chat_of_the_students_template(folder: Path, tmp_path: Path) -> None:
    """The text is that of the student's template; only the assistant's turns have a weight."""
    for name in ("student", "teacher"):
        (tmp_path / name).symlink_to(folder / name)
    student = tokenizer("small")
    student.chat_template = PLAIN_TEMPLATE
    write_model(tmp_path / "chatty", "small", family="llama", seed=1)
    student.save_pretrained(tmp_path / "chatty")
    turns = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Good day 😀"}]
    for name in ("train.jsonl", "eval.jsonl"):
        write_records(tmp_path / name, [{"messages": turns}])
    sizes = {"data.max_tokens": 64, "train.micro_batch_tokens": 64, "train.tokens_per_step": 64}
    session = session_of(tmp_path, **GOLD, **sizes, **{"student.model": str(tmp_path / "chatty")})
    assert isinstance(session.models.stores["teacher"], CrossTokenizerStore)
    tokens = session.data.train.documents.tokens(0)
    (aligned,) = session.models.stores["teacher"].aligner.align([tokens])
    teacher = tokenizer("large")
    assert teacher.decode(aligned.teacher_tokens) == student.decode(tokens)
    assert int(teacher.convert_tokens_to_ids("<|im_end|>")) in aligned.teacher_tokens.tolist()
    output = forward_backward(session)
    assert output.sums["continuation"] > 0
    session.close()


def test_what_a_run_is_of(folder: Path, tmp_path: Path) -> None:
    """The hash of the teacher is part of the run's, and so is that of its tokenizer."""
    hashes = set()
    for name, seed in (("2", 2), ("3", 3), ("changed", 3)):
        write_model(tmp_path / name, "large", family="qwen3", seed=seed)
        if name == "changed":
            changed = json.loads((tmp_path / name / "tokenizer.json").read_text())
            changed["model"]["merges"].pop()
            (tmp_path / name / "tokenizer.json").write_text(json.dumps(changed))
        session = session_of(folder, **GOLD, **{"teacher.model": str(tmp_path / name)})
        hashes.add(session.identity.models["teacher"])
        session.close()
    assert len(hashes) == 3
    assert session.loss.spec.needs_teacher
    with pytest.raises(DataError, match="token"):
        session.models.stores["teacher"].require(bad_documents(session.data.train.documents), "data")


def bad_documents(documents: Documents) -> Documents:
    tokens_N = documents.tokens_N.copy()
    tokens_N[5] = tokenizer("small").convert_tokens_to_ids("<unk>")
    return replace(documents, tokens_N=tokens_N)
