"""Teachers with other tokens of images than the student, or without images: gradients against plain transformers.

The plain models read one document at a time in float64, each with its own processor, and give whole logits. The rows
of both models that predict the same token are found here by searching the text between the images.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.families import build
from kit.image_models import image_tokenizer, picture
from kit.image_teachers import Plain, change_processor, images_of, turns_of, write_data, write_models
from kit.ranks import run_ranks
from kit.runs import evaluate, metrics, session_of, write_run
from kit.teacher_gradients import assert_same_as_float64, first_step, jsd_of_rows, named_gradients
from torch import Tensor
from torch.nn.functional import cross_entropy

from stillhouse.config import ConfigError
from stillhouse.data import DataError
from stillhouse.images.processor import ImageProcessor
from stillhouse.loops.rollouts import first_rollouts
from stillhouse.loops.session import Session
from stillhouse.output.folder import RunFolder
from stillhouse.signals.cache_files import target_rows
from stillhouse.signals.signal_spec import DocumentRows
from stillhouse.tools.write_cache import write_cache

SETTINGS: dict[str, Any] = {
    "data.max_tokens": 240,
    "train.tokens_per_step": 960,
    "train.micro_batch_tokens": 480,
    "objective.loss": "0.3*cross_entropy + 0.7*jsd(0.5)",
}
#: student, teacher
PAIRS = [
    ("qwen3_vl", "internvl"),
    slow("qwen3_vl", "qwen3_vl"),
    slow("internvl", "qwen3_vl"),
    slow("idefics3", "internvl"),
    slow("qwen3_vl", "idefics3"),
    slow("gemma3", "qwen3_vl"),
]


def expected(
    session: Session, folder: Path, teachers: dict[str, str], column: str = "", prefix: str = ""
) -> dict[str, Tensor]:
    """The first step's loss and gradients in float64. teachers: the folder of each teacher by its name"""
    student = Plain(folder, "student")
    student.model.train()
    models = {name: Plain(folder, model) for name, model in teachers.items()}
    train = session.data.train
    documents, step = train.documents, session.schedule.step_schedule.micro_batches(train, 0)
    chosen = sorted({number for batch in step for number in batch.document_T.tolist()} - {-1})
    total, count = torch.zeros((), dtype=torch.float64), 0
    for document in chosen:
        number = int(documents.sources[document].rpartition(":")[2]) - 1
        text = session.data.tokenizer.apply_chat_template(turns_of(number), tokenize=False)
        placeholder = student.processor.image_token
        name = documents.columns[column][document] if column else next(iter(models))
        pictures, pieces = images_of(number), text.split(placeholder)
        q_SV, ids, places = student.read(pieces, pictures, session.data.tokenizer)
        with torch.no_grad():
            if prefix:
                turns = [{"role": "system", "content": prefix}, *turns_of(number)]
                pieces = session.data.tokenizer.apply_chat_template(turns, tokenize=False).split(placeholder)
            p_SV, teacher_ids, teacher_places = models[name].read(pieces, pictures, session.data.tokenizer)
        assert bool(prefix) == (len(teacher_ids) > len(ids))
        teacher_ids, teacher_places = teacher_ids[-len(ids) :], teacher_places[-len(ids) :]
        assert ids.tolist() == teacher_ids.tolist()
        is_target = torch.tensor(documents.targets(document))[places]
        q, p = q_SV[places[is_target] - 1], p_SV[teacher_places[is_target] - 1]
        p, rows = p[:, : q.shape[1]], len(q)
        total = total + 0.3 * cross_entropy(q, ids[is_target], reduction="sum")
        total = total + 0.7 * jsd_of_rows(p.log_softmax(1), q.log_softmax(1)).sum()
        count += rows
    (total / count).backward()
    return {"loss": (total / count).detach()} | named_gradients(student.model)


def assert_expected(
    session: Session, folder: Path, teachers: dict[str, str], column: str = "", prefix: str = ""
) -> None:
    """Only the language model is trained."""
    actual, reference = first_step(session), expected(session, folder, teachers, column, prefix)
    session.close()
    assert len(actual) > 5
    assert_same_as_float64(actual, {name: reference[name] for name in actual})


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_gradients_with_a_teacher_of_another_processor_are_those_of_whole_logits(
    student: str, teacher: str, tmp_path: Path
) -> None:
    write_models(tmp_path, student, teacher)
    write_data(tmp_path)
    session = session_of(tmp_path, **SETTINGS)
    step = session.schedule.step_schedule.micro_batches(session.data.train, 0)
    assert any(batch.teacher_shift_T is not None for batch in step)
    assert_expected(session, tmp_path, {"": "teacher"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL student with an InternVL teacher, and a text model with their tokenizer. The column `by` routes."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, "qwen3_vl", "internvl")
    tokenizer = image_tokenizer("qwen3_vl", "internvl")
    build("llama", vocab_size=len(tokenizer) // 2 * 2 + 1, seed=3).save_pretrained(folder / "text")
    tokenizer.save_pretrained(folder / "text")
    write_data(folder, by=lambda number: "pictures" if images_of(number) else "texts")
    return folder


ROUTE = {"teachers.route": "by", "data.eval": 0.0}


def routed(folder: Path, pictures: str = "teacher") -> dict[str, Any]:
    by_name = {"pictures": pictures, "texts": "text"}
    return {f"teachers.{name}": {"model": str(folder / model)} for name, model in by_name.items()} | ROUTE


def test_one_document_per_row(folder: Path) -> None:
    session = session_of(folder, **SETTINGS, **{"data.packing": "rows"})
    assert session.models.student.packing.name == "rows"
    assert_expected(session, folder, {"": "teacher"})


@pytest.mark.parametrize("teacher", ["teacher", "student"])
def test_documents_without_images_have_a_text_only_teacher(folder: Path, teacher: str) -> None:
    """Micro-batches have documents of both teachers. The teacher of documents with images may have the student's
    processor, or another one.
    """
    settings = SETTINGS | routed(folder, teacher) | {"train.micro_batch_tokens": 720}
    session = session_of(folder, cached=True, **settings)
    step = session.schedule.step_schedule.micro_batches(session.data.train, 0)
    kinds = [
        {session.data.train.documents.columns["by"][at] for at in step.documents_of(n)} for n in range(len(step))
    ]
    assert {"pictures", "texts"} in kinds
    assert_expected(session, folder, {"pictures": teacher, "texts": "text"}, "by")


def test_a_document_with_images_of_a_text_only_teacher_is_refused(folder: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for at in (3, 4):
        lines[at]["by"] = "texts"
    path = folder / "wrong.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    settings = SETTINGS | routed(folder) | {"data.train": str(path)}
    expected_text = r"wrong\.jsonl:4: the record has images, and its teacher has no processor of images \("
    with pytest.raises(DataError, match=expected_text + r"teachers\.texts\.model\)"):
        session_of(folder, cached=True, **settings)
    session = session_of(folder, cached=True, **settings, **{"data.on_error": "skip"})
    assert session.data.train.documents.report.skipped == 2
    session.close()
    alone = {"teacher.model": str(folder / "text"), "data.on_error": "skip"}
    with pytest.raises(DataError, match=r"train\.jsonl:1: the record has images, .* \(teacher\.model\): expected"):
        session_of(folder, **SETTINGS, **alone)


def test_a_teacher_reads_a_prefix_and_its_own_tokens_of_images(folder: Path) -> None:
    teacher = {"model": str(folder / "teacher"), "prefix": "Look. "}
    session = session_of(folder, cached=True, **SETTINGS, **{"teachers.one": teacher})
    assert_expected(session, folder, {"one": "teacher"}, prefix="Look. ")


@pytest.mark.slow
def test_two_processes_train_as_whole_logits_say(folder: Path) -> None:
    """Three micro-batches on two processes: one of them repeats the first one, without targets and images."""
    settings = SETTINGS | {"train.tokens_per_step": 720, "train.micro_batch_tokens": 240, "train.steps": 2}
    session = session_of(folder, **settings)
    assert len(session.schedule.step_schedule.micro_batches(session.data.train, 0)) == 3
    reference, names = expected(session, folder, {"": "teacher"}), list(first_step(session))
    held_out = evaluate(session)["eval/forward_kl"]
    session.close()
    write_run(folder, **settings)
    out = folder / "two"
    run_ranks(2, "distill", folder / "run.yaml", "parallel.fsdp=2", f"out={out}")
    lines = metrics(out)
    trained = next(line for line in lines if "train/gradient_norm" in line)
    norm = math.sqrt(sum(float(reference[name].square().sum()) for name in names if name != "loss"))
    assert trained["loss/total_nats_per_token"] == pytest.approx(float(reference["loss"]), rel=1e-5)
    assert trained["train/gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert next(line["eval/forward_kl"] for line in lines if "eval/forward_kl" in line) == pytest.approx(
        held_out, rel=1e-5
    )


def test_a_teacher_of_another_processor_reads_completions_of_the_student(folder: Path, tmp_path: Path) -> None:
    """The reverse KL of whole logits, and its gradients."""
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 1, "max_new_tokens": 6, "temperature": 1.0}
    settings = {key: value for key, value in SETTINGS.items() if key != "objective.loss"} | {
        "objective.loss": "reverse_kl",
        "out": str(tmp_path / "out"),
        **{f"rollout.{key}": value for key, value in rollout.items()},
    }
    session = session_of(folder, **settings)
    _, step = first_rollouts(session, RunFolder(tmp_path / "out"))
    signals = session.models.source_for(session.models.engine).request(step).result()
    normalizer = step.all_ranks.normalizer
    loss = session.models.engine.forward_backward(step, signals, normalizer).sums["loss"]
    actual = {"loss": torch.tensor(loss)} | named_gradients(session.models.student.pretrained)
    documents = step.all_ranks.sequences.documents  # type: ignore[attr-defined]
    session.close()
    student, teacher = Plain(folder, "student"), Plain(folder, "teacher")
    total, pictured = torch.zeros((), dtype=torch.float64), 0
    for document in range(len(documents)):
        number = int(documents.sources[document].rpartition(":")[2].partition(" ")[0]) - 1
        turns, pictures = turns_of(number)[:-1], images_of(number)
        text = session.data.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        pieces, targets = text.split("<|image_pad|>"), documents.targets(document)
        completion = documents.tokens(document)[int(targets.argmax()) :].tolist()
        q_SV, ids, places = student.read(pieces, pictures, session.data.tokenizer, completion)
        with torch.no_grad():
            p_SV, teacher_ids, teacher_places = teacher.read(pieces, pictures, session.data.tokenizer, completion)
        assert ids.tolist() == teacher_ids.tolist()
        is_target = torch.tensor(targets)[places]
        q, p = (values[at[is_target] - 1] for values, at in ((q_SV, places), (p_SV, teacher_places)))
        total = total + (q.softmax(1) * (q.log_softmax(1) - p.log_softmax(1))).sum()
        pictured += len(pictures)
    assert pictured
    (total / normalizer).backward()
    reference = {"loss": (total / normalizer).detach()} | named_gradients(student.model)
    assert_same_as_float64(actual, {name: reference[name] for name in actual})


def cached(folder: Path, name: str, *arguments: Any, **options: Any) -> dict[str, Any]:
    out = folder / f"cache-{name}"
    write_cache(write_run(folder, **SETTINGS), out, *arguments, shard_bytes=5000, **options)
    return SETTINGS | {"teacher.cache": str(out)}


def test_gradients_from_a_cache_are_those_of_whole_logits(folder: Path) -> None:
    """Hidden states, and the log-probabilities of all ids."""
    all_ids = len(image_tokenizer("qwen3_vl", "internvl"))
    for settings in (cached(folder, "hidden"), cached(folder, "top_k", "top_k", top_k=all_ids)):
        assert_expected(session_of(folder, cached=True, **settings), folder, {"": "teacher"})


def test_sampled_ids_are_those_of_the_teachers_rows(folder: Path) -> None:
    """Their mean log-probability is minus the entropy of whole logits at the same rows, and less at other rows."""
    settings = cached(folder, "sampled", "sampled", top_k=255) | {"objective.loss": "forward_kl"}
    session = session_of(folder, cached=True, **settings)
    documents, images = session.data.train.documents, session.data.train.media_inputs
    assert images is not None
    ids, rows = documents.tokens(0), target_rows(documents.targets(0))
    (tensors,) = session.models.stores["teacher"].read([DocumentRows(ids, rows, media=images.of(documents, 0))])
    pieces = session.data.tokenizer.apply_chat_template(turns_of(0), tokenize=False).split("<|image_pad|>")
    with torch.no_grad():
        p_SV, _, teacher_places = Plain(folder, "teacher").read(pieces, images_of(0), session.data.tokenizer)
        _, _, places = Plain(folder, "student").read(pieces, images_of(0), session.data.tokenizer)
    session.close()
    is_target = torch.tensor(documents.targets(0))[places]
    row_C = places[is_target] - 1 - rows.start
    counts_CM, ids_CM = tensors["counts"][row_C].double(), tensors["ids"][row_C].long().clamp(min=0)

    def mean_log_prob(shift: int) -> float:
        log_p_CV = p_SV[teacher_places[is_target] - 1 + shift].log_softmax(1)
        return float((counts_CM * log_p_CV.gather(1, ids_CM)).sum() / counts_CM.sum())

    log_p_CV = p_SV[teacher_places[is_target] - 1].log_softmax(1)
    assert mean_log_prob(0) == pytest.approx(float((log_p_CV.exp() * log_p_CV).sum(1).mean()), rel=0.01)
    assert max(mean_log_prob(-1), mean_log_prob(-3)) < mean_log_prob(0) - 0.05


def test_caches_of_other_images_or_processors_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    for name in ("student", "teacher"):
        shutil.copytree(folder / name, tmp_path / name)
    write_data(tmp_path)
    settings = cached(tmp_path, "one", "top_k", top_k=8)
    manifest = json.loads((tmp_path / "cache-one" / "cache.json").read_text())
    assert len(manifest["teacher_images"]) == 64
    picture(99, 8, 8).save(tmp_path / "0.png")  # of the same size, so that the tokens are the same
    with pytest.raises(ConfigError, match=r"teacher\.cache: .* lacks 1 of the 12 documents.*an image changed"):
        session_of(tmp_path, cached=True, **settings)
    picture(0, 8, 8).save(tmp_path / "0.png")
    session_of(tmp_path, cached=True, **settings).close()
    change_processor(tmp_path / "teacher", image_mean=[0.4, 0.4, 0.4])
    with pytest.raises(ValueError, match=r"has another cache: teacher_images '[0-9a-f]{64}', and this command has "):
        cached(tmp_path, "one", "top_k", top_k=8)


def test_hidden_states_of_layers_are_not_compared_with_other_rows(folder: Path) -> None:
    settings = SETTINGS | {"objective.hidden": [{"student": 1, "teacher": 1}]}
    with pytest.raises(ConfigError, match=r"objective\.hidden: .* other tokens of images than the student"):
        session_of(folder, **settings)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace("is 0", "is 9", 1), r"token \d+ before the first image is \d+, not \d+"),
        (lambda text: text + "s", r"\d+ tokens after 2 images, not \d+"),
        (lambda text: text.replace("<IMG_CONTEXT>", "", 1), r"has 1 times the placeholder '<IMG_CONTEXT>' for 2 "),
    ],
)
def test_a_processor_that_changes_the_text_is_refused_with_the_record(
    folder: Path, change: Callable[[str], str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expand = ImageProcessor.expand

    def changed(self: ImageProcessor, text: str, images: Any, **options: Any) -> Any:
        return expand(self, change(text) if self.name.endswith("teacher") else text, images, **options)

    monkeypatch.setattr(ImageProcessor, "expand", changed)
    with pytest.raises(DataError, match=rf"train\.jsonl:1: .*{reason}"):
        session_of(folder, **SETTINGS)
