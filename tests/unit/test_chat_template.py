"""data.chat_template: conversations get their template from a file or another tokenizer; the student keeps it."""

import shutil
from pathlib import Path

import pytest
from kit.runs import contents, run, session_of, write_records, write_run
from transformers import AutoTokenizer

from stillhouse.checkpoint.identity import configuration_hash
from stillhouse.config.read_config import dotted_values

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A student without a chat template, conversations, and the same student with a template."""
    write_run(tmp_path)
    turns = [
        [{"role": "user", "content": f"Two and {number}?"}, {"role": "assistant", "content": f"It is {number + 2}."}]
        for number in range(12)
    ]
    write_records(tmp_path / "train.jsonl", [{"messages": messages} for messages in turns])
    write_records(tmp_path / "eval.jsonl", [{"messages": messages} for messages in turns[:3]])
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    for name in ("student", "teacher"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        tokenizer.chat_template = TEMPLATE
        shutil.copytree(tmp_path / name, tmp_path / f"{name} with it")
        tokenizer.save_pretrained(tmp_path / f"{name} with it")
    return tmp_path


def test_the_run_is_that_of_a_tokenizer_with_the_template(folder: Path) -> None:
    run("distill", folder / "run.yaml", f"student.model={folder / 'student with it'}", f"out={folder / 'own'}")
    run("distill", folder / "run.yaml", f"data.chat_template={folder / 'chat.jinja'}", f"out={folder / 'given'}")
    from_model, from_file = (contents(folder / name / "model") for name in ("own", "given"))
    assert from_file.pop("tokenizer_config.json") is not None
    from_model.pop("tokenizer_config.json")  # it has the path of the model
    assert from_file == from_model
    run("export", folder / "given", "--out", folder / "exported")
    for made in ("given/model", "given/checkpoints/step-00000006/student", "exported"):
        assert AutoTokenizer.from_pretrained(folder / made).chat_template == TEMPLATE
    assert "Chat template: of chat.jinja, as in training" in (folder / "exported" / "README.md").read_text()


@pytest.mark.parametrize("source", ["chat.jinja", "teacher with it"])
def test_targets_are_the_assistants_words(folder: Path, source: str) -> None:
    session = session_of(folder, **{"data.chat_template": str(folder / source)})
    assert session.tokenizer.chat_template == TEMPLATE
    documents = session.train.documents
    ids, targets = documents.tokens(0), documents.targets(0)
    assert session.tokenizer.decode(ids[targets].tolist()).endswith(f".{session.tokenizer.eos_token}")
    assert "<user>" in session.tokenizer.decode(ids[~targets].tolist())


def test_a_run_with_it_is_another_run(folder: Path) -> None:
    plain, other = (write_run(folder, **{"data.chat_template": path}) for path in (None, str(folder / "chat.jinja")))
    assert configuration_hash(dotted_values(plain)) != configuration_hash(dotted_values(other))
    failed = run("check", folder / "run.yaml", "data.chat_template=null", code=1)
    assert "has no chat template; give 'text'" in failed.err
    assert "or set data.chat_template" in failed.err


@pytest.mark.slow
def test_a_template_that_does_not_end_is_stopped(folder: Path) -> None:
    """It may be a hub's: it is tried in the process with limits in which the data are rendered."""
    (folder / "chat.jinja").write_text(
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}" + TEMPLATE
    )
    failed = run("check", folder / "run.yaml", f"data.chat_template={folder / 'chat.jinja'}", code=2)
    assert "error: data.chat_template: " in failed.err
    assert "chat.jinja: the chat template of " in failed.err
