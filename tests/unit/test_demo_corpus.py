"""The demo's text, tokenizer, shipped teacher and new student."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_teacher import collect_teacher_sources
from stillhouse.tools.demo import corpus, student

TEACHER = student.TEACHER
SPLITS = ("teacher", "student", "held_out")


@pytest.fixture(scope="module")
def documents() -> list[corpus.NamedText]:
    return corpus.collect_documents()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TEACHER)


@pytest.fixture(scope="module")
def teacher():
    return AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()


def of_split(documents: list[corpus.NamedText], split: str) -> list[corpus.NamedText]:
    return [document for document in documents if corpus.split_of(document.name) == split]


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("teacher", ["argparse", "topic:strings", "tkinter.ttk"]),
        ("student", ["inspect", "dataclasses", "topic:import"]),
        ("held_out", ["logging", "collections", "topic:global"]),
    ],
)
def test_a_name_has_the_same_split_for_ever(split, names):
    assert {corpus.split_of(name) for name in names} == {split}


def test_documents_have_names_of_their_own_and_share_no_paragraph(documents):
    """And tests and installed packages are not read."""
    assert all(document.text.strip() for document in documents)
    assert len({document.name for document in documents}) == len(documents)
    parts = {part for document in documents for part in document.name.split(".")}
    assert parts.isdisjoint({"test", "tests", "idle_test", "torch", "site-packages"})
    size = {split: sum(len(document.text) for document in of_split(documents, split)) for split in SPLITS}
    assert size["teacher"] > 4 * size["student"] > 4 * size["held_out"] > 400_000
    owner: dict[str, str] = {}
    for document in documents:
        for paragraph in document.text.split("\n\n"):
            key = " ".join(paragraph.split())
            if len(key) >= corpus.PARAGRAPH_LENGTH:
                assert owner.setdefault(key, document.name) == document.name
    sources = collect_teacher_sources()
    assert len(sources) > 200
    assert {corpus.split_of(source.name.removeprefix("source:")) for source in sources} == {"teacher"}


def write(library: Path, name: str, text: str) -> None:
    path = library / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


SOURCE = '''"""The module."""
# A comment that goes on for long enough to count as prose, since it says
# in two lines what the next function is for and why it is not simpler.
class Tool(Base):
    """A tool."""

    async def use(self, *, hard: bool = False) -> None:
        """Use it."""  # a remark at the end of a line is not prose, however long it may happen to be, or where it is

def silent(): ...
'''


def test_prose_is_docstrings_and_comments_in_source_order(tmp_path):
    write(tmp_path, "tools/__init__.py", SOURCE)
    write(tmp_path, "test/test_tools.py", SOURCE)
    [document] = corpus.collect_documents(tmp_path)
    assert document.name == "tools"
    assert document.text == (
        "The module.\n\n"
        "A comment that goes on for long enough to count as prose, since it says\n"
        "in two lines what the next function is for and why it is not simpler.\n\n"
        "class Tool(Base)\nA tool.\n\n"
        "def Tool.use(self, *, hard: bool=False)\nUse it."
    )


def test_topics_are_read_with_and_without_an_annotation(tmp_path):
    write(tmp_path, "broken.py", "def (:")
    write(tmp_path, "good.py", '"""Some words."""')
    assert corpus.collect_documents(tmp_path) == [corpus.NamedText("good", "Some words.")]
    (tmp_path / "good.py").unlink()
    for assignment in ("topics = ", "topics: dict[str, str] = "):
        write(tmp_path, "pydoc_data/topics.py", assignment + "{'if': 'The if statement.'}")
        assert corpus.collect_documents(tmp_path) == [corpus.NamedText("topic:if", "The if statement.")]


def test_the_shipped_files(teacher):
    assert (TEACHER / "model.safetensors").stat().st_size <= 10_000_000
    assert AutoModelForCausalLM.from_pretrained(TEACHER, dtype="auto").dtype == torch.bfloat16
    assert 3_000_000 <= teacher.num_parameters() <= 5_000_000
    log = [json.loads(line) for line in (TEACHER / "training_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == sorted({line["step"] for line in log})
    assert f"{log[-1]['tokens']:,}" in (TEACHER / "README.md").read_text(encoding="utf-8")


@torch.no_grad()
def nats_per_token(model, tokenizer, documents: list[corpus.NamedText], row: int = 512) -> float:
    """Return the mean cross-entropy over the documents' tokens. No row contains tokens of two documents."""
    total, tokens = 0.0, 0
    for document in documents:
        ids = [tokenizer.eos_token_id, *tokenizer.encode(document.text, add_special_tokens=False)]
        for start in range(0, len(ids) - 1, row):
            ids_T = torch.tensor(ids[start : start + row + 1])
            logits = model(input_ids=ids_T[None, :-1]).logits[0]
            total += cross_entropy(logits.float(), ids_T[1:], reduction="sum").item()
            tokens += len(ids_T) - 1
    return total / tokens


def test_the_teacher_is_as_good_as_its_card_says(teacher, tokenizer, documents):
    card = (TEACHER / "README.md").read_text(encoding="utf-8")
    names, claimed = re.search(r"on (`.*`) alone \| ([\d.]+) nats", card).groups()
    few = [document for document in of_split(documents, "held_out") if f"`{document.name}`" in names]
    assert len(few) == 3
    assert nats_per_token(teacher, tokenizer, few) == pytest.approx(float(claimed), abs=0.1)


def test_a_student_is_a_quarter_of_the_teacher_and_follows_its_seed(teacher, tmp_path):
    before = torch.random.get_rng_state()
    student.save_new_student(tmp_path, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    saved, same, other = AutoModelForCausalLM.from_pretrained(tmp_path), *map(student.new_student, (1, 2))
    assert saved.num_parameters() / teacher.num_parameters() == pytest.approx(0.25, abs=0.02)
    assert saved(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, teacher.config.vocab_size)
    weights = saved.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in same.state_dict().items())
    assert any(not torch.equal(weights[key], value) for key, value in other.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|endoftext|>"
