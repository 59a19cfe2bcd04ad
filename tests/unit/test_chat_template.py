"""data.chat_template: conversations get their template from a file or another tokenizer; the student keeps it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kit.layout_runs import distill
from kit.runs import contents, run, session_of, write_records, write_run
from kit.toy_tokenizer import SPECIAL, TEMPLATES
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.checkpoint.resume import configuration_hash
from stillhouse.config.read_config import dotted_values

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path)
    texts = [(f"Two and {number}?", f"It is {number + 2}.") for number in range(12)]
    turns = [[{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in texts]
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
    assert session.data.tokenizer.chat_template == TEMPLATE
    documents = session.data.train.documents
    ids, targets = documents.tokens(0), documents.targets(0)
    assert session.data.tokenizer.decode(ids[targets].tolist()).endswith(f".{session.data.tokenizer.eos_token}")
    assert "<user>" in session.data.tokenizer.decode(ids[~targets].tolist())


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


def ends_of(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


@pytest.fixture
def base(folder: Path) -> Path:
    """A base student: its configuration ends texts with `</s>`, and its template ends turns with another token."""
    (folder / "chat.jinja").write_text(TEMPLATES["plain"])
    configuration = folder / "student" / "generation_config.json"
    configuration.write_text(json.dumps(json.loads(configuration.read_text()) | {"eos_token_id": 2}))
    settings = {"data.chat_template": str(folder / "chat.jinja"), "train.steps": 2, "checkpoint.every": 1}
    write_run(folder, **settings)
    return folder


@pytest.mark.parametrize("adapter", ["null", "{r: 2, alpha: 4}"])
def test_a_saved_student_lists_the_token_that_ends_its_turns(base: Path, adapter: str) -> None:
    adapted = f"student.adapter={adapter}"
    distill(base, "out", 1, adapted)
    first = base / "out" / "checkpoints" / "step-00000001"
    run("distill", base / "run.yaml", f"checkpoint.resume={first}", f"out={base / 'again'}", adapted)
    run("export", base / "out", "--out", base / "exported")
    for made in ("out/model", "again/model", "exported", "out/checkpoints/step-00000001/student"):
        assert ends_of(base / made) == [2, SPECIAL.index("<|im_end|>")], made
    assert AutoModelForCausalLM.from_pretrained(base / "exported").generation_config.eos_token_id == [2, 5]
    assert json.loads((base / "out" / "data.json").read_text())["train"]["trained_ends"] == [5]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "pipeline"])
def test_it_lists_the_token_under_torchrun(base: Path, layout: str) -> None:
    distill(base, "out", 2, f"parallel.{layout}=2", "teacher=null", "objective.loss=cross_entropy")
    assert ends_of(base / "out" / "model") == [2, 5]
    assert ends_of(base / "out" / "checkpoints" / "step-00000001" / "student") == [2, 5]


def test_a_student_that_writes_its_completions_lists_what_ends_them(base: Path) -> None:
    """The tokenizer's end-of-sequence token, and a special token among rollout.stop."""
    write_records(base / "prompts.jsonl", [{"prompt": "two and"}] * 4)
    session = session_of(
        base,
        **{"data.train": str(base / "prompts.jsonl"), "objective.loss": "reverse_kl", "data.eval": 0},
        **{"rollout.prompts_per_step": 2, "rollout.max_new_tokens": 4, "rollout.stop": ["<|im_end|>", "\n\n"]},
    )
    assert session.models.student.pretrained.generation_config.eos_token_id == [2, 5]
