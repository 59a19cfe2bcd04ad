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
from kit.image_models import image_tokenizer, picture, write_image_model
from kit.ranks import run_ranks
from kit.runs import forward_backward, metrics, session_of, write_run
from kit.teacher_gradients import assert_same_as_float64, named_gradients
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from stillhouse.config import ConfigError
from stillhouse.data import DataError
from stillhouse.data.render.image_processor import ImageProcessor
from stillhouse.data.render.processors import load_processor
from stillhouse.loops.held_out_metrics import evaluate
from stillhouse.loops.rollouts import first_rollouts
from stillhouse.output.folder import RunFolder
from stillhouse.run.session import Session
from stillhouse.signals.cache.files import target_rows
from stillhouse.signals.signal_spec import DocumentRows
from stillhouse.tools.merge_caches import merge_caches
from stillhouse.tools.write_cache import write_cache

RECORDS = 12
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


def images_of(number: int) -> list[int]:
    """The pictures of a record's turns: of most records, one before each answer."""
    return [[10 * number, 10 * number + 1], [10 * number], []][number % 3]


def turns_of(number: int) -> list[dict[str, Any]]:
    """Two questions and answers. An image of the second question is between targets."""
    turns = []
    for turn in range(2):
        text = [{"type": "text", "text": f"what is {number} and {turn}?"}]
        image = [{"type": "image", "image": f"{at}.png"} for at in images_of(number)[turn : turn + 1]]
        answer = [{"type": "text", "text": f"number {number} of {turn}"}]
        turns += [{"role": "user", "content": text + image}, {"role": "assistant", "content": answer}]
    return turns


def write_data(folder: Path, **columns: Callable[[int], str]) -> None:
    for number in range(RECORDS):
        for at in images_of(number):
            picture(at, 8 + 4 * (at % 5), 8 + 4 * (number % 3)).save(folder / f"{at}.png")
    lines = [
        json.dumps({"messages": turns_of(number)} | {name: of(number) for name, of in columns.items()})
        for number in range(RECORDS)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "eval.jsonl").write_text("\n".join(lines[:3]))


def write_models(folder: Path, student: str, teacher: str) -> None:
    write_image_model(student, folder / "student", seed=1, tokenizer_of=[teacher])
    write_image_model(teacher, folder / "teacher", seed=2, tokenizer_of=[student])
    if teacher == student:  # with larger images
        change_processor(folder / "teacher", size={"shortest_edge": 256, "longest_edge": 1024})


def change_processor(folder: Path, **settings: Any) -> None:
    path = folder / "processor_config.json"
    processor = json.loads(path.read_text())
    processor["image_processor"] |= settings
    path.write_text(json.dumps(processor))


class Plain:
    """A model of plain transformers in float64 with its processor; a text model has none."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.processor = folder, None
        if (folder / name / "processor_config.json").exists():
            self.processor: Any = load_processor(str(folder / name))
            self.model: Any = AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float64)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)

    def read(
        self, pieces: list[str], pictures: list[int], tokenizer: Any, completion: list[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [S, V]; the ids [N] and the places of the tokens of pieces of text with pictures between them."""
        special = not pieces[0].startswith("<s>") and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        texts = [
            tokenizer(piece, add_special_tokens=special and not at)["input_ids"] for at, piece in enumerate(pieces)
        ]
        if self.processor is None:
            assert not pictures
            inputs = {"input_ids": torch.tensor([texts[0]])}
        else:
            images = [[Image.open(self.folder / f"{at}.png") for at in pictures]] if pictures else None
            text = self.processor.image_token.join(pieces)
            inputs = self.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=special)
        texts[-1] = texts[-1] + (completion or [])
        if completion:  # its tokens have the kind of text
            behind = {"input_ids": completion, "attention_mask": [1] * len(completion)}
            inputs = {
                name: torch.cat([value, torch.tensor([behind.get(name, [0] * len(completion))])], 1)
                if name in behind or "token_type" in name
                else value
                for name, value in inputs.items()
            }
        ids, places = inputs["input_ids"][0].tolist(), list[int]()
        for piece in texts:
            start = places[-1] + 1 if places else 0
            start = next(at for at in range(start, len(ids)) if ids[at : at + len(piece)] == piece)
            places += range(start, start + len(piece))
        logits_SV = self.model(**inputs, use_cache=False).logits[0]
        return logits_SV, torch.tensor(ids)[places], torch.tensor(places)


def jsd(p_log: Tensor, q_log: Tensor) -> Tensor:
    """Row by row, of log-probabilities."""
    middle = torch.logaddexp(p_log, q_log) - math.log(2)
    return 0.5 * (p_log.exp() * (p_log - middle) + q_log.exp() * (q_log - middle)).sum(1)


def expected(
    session: Session, folder: Path, teachers: dict[str, str], column: str = "", prefix: str = ""
) -> dict[str, Tensor]:
    """The first step's loss and gradients in float64. teachers: the folder of each teacher by its name"""
    student = Plain(folder, "student")
    student.model.train()
    models = {name: Plain(folder, model) for name, model in teachers.items()}
    documents, step = session.train.documents, session.step_schedule.micro_batches(session.train, 0)
    chosen = sorted({number for batch in step for number in batch.document_T.tolist()} - {-1})
    total, count = torch.zeros((), dtype=torch.float64), 0
    for document in chosen:
        number = int(documents.sources[document].rpartition(":")[2]) - 1
        text = session.tokenizer.apply_chat_template(turns_of(number), tokenize=False)
        placeholder = student.processor.image_token
        name = documents.columns[column][document] if column else next(iter(models))
        pictures, pieces = images_of(number), text.split(placeholder)
        q_SV, ids, places = student.read(pieces, pictures, session.tokenizer)
        with torch.no_grad():
            if prefix:
                turns = [{"role": "system", "content": prefix}, *turns_of(number)]
                pieces = session.tokenizer.apply_chat_template(turns, tokenize=False).split(placeholder)
            p_SV, teacher_ids, teacher_places = models[name].read(pieces, pictures, session.tokenizer)
        assert bool(prefix) == (len(teacher_ids) > len(ids))
        teacher_ids, teacher_places = teacher_ids[-len(ids) :], teacher_places[-len(ids) :]
        assert ids.tolist() == teacher_ids.tolist()
        is_target = torch.tensor(documents.targets(document))[places]
        q, p = q_SV[places[is_target] - 1], p_SV[teacher_places[is_target] - 1]
        p, rows = p[:, : q.shape[1]], len(q)
        total = total + 0.3 * cross_entropy(q, ids[is_target], reduction="sum")
        total = total + 0.7 * jsd(p.log_softmax(1), q.log_softmax(1)).sum()
        count += rows
    (total / count).backward()
    return {"loss": (total / count).detach()} | named_gradients(student.model)


def first_step(session: Session) -> dict[str, Tensor]:
    loss = forward_backward(session).sums["loss"]
    named = named_gradients(session.student.pretrained)
    return {"loss": torch.tensor(loss)} | named


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
    step = session.step_schedule.micro_batches(session.train, 0)
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
    assert session.student.packing.name == "rows"
    assert_expected(session, folder, {"": "teacher"})


@pytest.mark.parametrize("teacher", ["teacher", "student"])
def test_documents_without_images_have_a_text_only_teacher(folder: Path, teacher: str) -> None:
    """Micro-batches have documents of both teachers. The teacher of documents with images may have the student's
    processor, or another one.
    """
    settings = SETTINGS | routed(folder, teacher) | {"train.micro_batch_tokens": 720}
    session = session_of(folder, cached=True, **settings)
    step = session.step_schedule.micro_batches(session.train, 0)
    kinds = [{session.train.documents.columns["by"][at] for at in step.documents_of(n)} for n in range(len(step))]
    assert {"pictures", "texts"} in kinds
    assert_expected(session, folder, {"pictures": teacher, "texts": "text"}, "by")


def test_a_document_with_images_of_a_text_only_teacher_is_refused(folder: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for at in (3, 4):
        lines[at]["by"] = "texts"
    path = folder / "wrong.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    settings = SETTINGS | routed(folder) | {"data.train": str(path)}
    expected_text = r"wrong\.jsonl:4: it has images, and the teacher that reads it has no processor of images \("
    with pytest.raises(DataError, match=expected_text + r"teachers\.texts\.model\)"):
        session_of(folder, cached=True, **settings)
    session = session_of(folder, cached=True, **settings, **{"data.on_error": "skip"})
    assert session.train.documents.report.skipped == 2
    session.close()
    alone = {"teacher.model": str(folder / "text"), "data.on_error": "skip"}
    with pytest.raises(DataError, match=r"train\.jsonl:1: it has images, and .* \(teacher\.model\): expected"):
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
    assert len(session.step_schedule.micro_batches(session.train, 0)) == 3
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
    step = first_rollouts(session, RunFolder(tmp_path / "out"))
    signals = session.source_for(session.engine).request(step).result()
    normalizer = step.of_all_ranks.normalizer
    loss = session.engine.forward_backward(step, signals, normalizer).sums["loss"]
    actual = {"loss": torch.tensor(loss)} | named_gradients(session.student.pretrained)
    documents = step.of_all_ranks.sequences.documents  # type: ignore[attr-defined]
    session.close()
    student, teacher = Plain(folder, "student"), Plain(folder, "teacher")
    total, pictured = torch.zeros((), dtype=torch.float64), 0
    for document in range(len(documents)):
        number = int(documents.sources[document].rpartition(":")[2].partition(" ")[0]) - 1
        turns, pictures = turns_of(number)[:-1], images_of(number)
        text = session.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        pieces, targets = text.split("<|image_pad|>"), documents.targets(document)
        completion = documents.tokens(document)[int(targets.argmax()) :].tolist()
        q_SV, ids, places = student.read(pieces, pictures, session.tokenizer, completion)
        with torch.no_grad():
            p_SV, teacher_ids, teacher_places = teacher.read(pieces, pictures, session.tokenizer, completion)
        assert ids.tolist() == teacher_ids.tolist()
        is_target = torch.tensor(targets)[places]
        q, p = (values[at[is_target] - 1] for values, at in ((q_SV, places), (p_SV, teacher_places)))
        total = total + (q.softmax(1) * (q.log_softmax(1) - p.log_softmax(1))).sum()
        pictured += len(pictures)
    assert pictured
    (total / normalizer).backward()
    reference = {"loss": (total / normalizer).detach()} | named_gradients(student.model)
    assert_same_as_float64(actual, {name: reference[name] for name in actual})


# caches


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
    documents, images = session.train.documents, session.train.image_inputs
    assert images is not None
    ids, rows = documents.tokens(0), target_rows(documents.targets(0))
    (tensors,) = session.stores["teacher"].read([DocumentRows(ids, rows, images=images.of(documents, 0))])
    pieces = session.tokenizer.apply_chat_template(turns_of(0), tokenize=False).split("<|image_pad|>")
    with torch.no_grad():
        p_SV, _, teacher_places = Plain(folder, "teacher").read(pieces, images_of(0), session.tokenizer)
        _, _, places = Plain(folder, "student").read(pieces, images_of(0), session.tokenizer)
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
    with pytest.raises(ValueError, match=r"has another cache: teacher_images '[0-9a-f]{64}' there and "):
        cached(tmp_path, "one", "top_k", top_k=8)
    cached(tmp_path, "other", "top_k", top_k=8)
    with pytest.raises(ValueError, match=r"cannot be merged with .*: teacher_images is "):
        merge_caches([tmp_path / "cache-one", tmp_path / "cache-other"], tmp_path / "both")


def test_hidden_states_of_layers_are_not_compared_with_other_rows(folder: Path) -> None:
    settings = SETTINGS | {"objective.hidden": [{"student": 1, "teacher": 1}]}
    with pytest.raises(ConfigError, match=r"objective\.hidden: .* other tokens of images than the student"):
        session_of(folder, **settings)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace("is 0", "is 9", 1), r"token \d+ before the first image is \d+, not \d+"),
        (lambda text: text + "s", r"\d+ tokens behind 2 images, not \d+"),
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
