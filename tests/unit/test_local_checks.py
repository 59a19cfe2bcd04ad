"""Mistakes that need no torch are named before torch is imported, also under torchrun; what may be right passes."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from kit.config_cases import MESSAGES, refused_calls

from stillhouse.config import load_config
from stillhouse.run.local_checks import check_local
from stillhouse.user_code.function_files import require_in_file
from stillhouse.user_code.functions import REWARD, load_function

#: runs the commands and prints what each of them says; then, whether a library was imported that takes seconds
COMMANDS = """
import contextlib, io, sys
from stillhouse.cli import run
for command in {commands!r}:
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        code = run([word.replace("\u00a0", " ") for word in command.split(" ")])
    print(code, text.getvalue().strip())
print({{"torch", "transformers", "numpy"}} & {{*sys.modules}})
"""
MISTAKES = {case["call"]: case["error"] for case in MESSAGES["commands before torch"]}
RUN = """
student: {model: student}
teacher: {model: student}
data: {train: train.jsonl, eval: 0, max_tokens: 32}
train: {tokens_per_step: 128, micro_batch_tokens: 64, steps: 2}
out: runs/a
"""
#: files of data whose first record cannot be used, by their names
DATA = {
    "broken.jsonl": '{"text": "a"\n{"text": "b"}\n',
    "answers.jsonl": '{"question": "a", "answer": "b"}\n',
    "empty.jsonl": "",
    "prompts.jsonl": '{"prompt": "a"}\n',
    "mixed/a.jsonl": '{"text": "a"}\n',
    "mixed/b.jsonl": '{"prompt": "a", "completion": "b"}\n',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    for name, text in DATA.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "mine.py").write_text("def accuracy(context): ...\n")
    (tmp_path / "typo.py").write_text("def f(context:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder in which none can be created")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_mistake_is_named_before_torch_is_imported(folder: Path, processes: int) -> None:
    """Two processes: rank 0 of them, with the environment of torchrun."""
    environment = os.environ | ({"RANK": "0", "WORLD_SIZE": "2"} if processes == 2 else {})
    before = sorted(folder.rglob("*"))
    code = COMMANDS.format(commands=list(MISTAKES))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    *answers, imported = done.stdout.splitlines()
    assert imported == "set()"
    for (command, expected), answer in zip(MISTAKES.items(), answers, strict=True):
        assert answer.startswith(expected), command
    assert sorted(folder.rglob("*")) == before


def test_all_mistakes_are_listed_once(folder: Path) -> None:
    overrides = ["student.model=./a", "data.train=b.csv", "rollout.reward=mine:none", "rollout.max_new_tokens=8"]
    config = load_config(folder / "run.yaml", [*overrides, "objective.loss=policy_gradient"])
    with pytest.raises(ValueError, match="expected an existing folder") as error:
        check_local(config, ("data",))
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["student.model", "data.train", "rollout.reward"]


@pytest.mark.parametrize(
    "override",
    [
        *("student.model=Qwen/Qwen3-0.6B", "student.model=gpt2", "data.train=allenai/c4:en@validation"),
        *("data.train=tr*.jsonl", "data.chat_template=Qwen/Qwen3-0.6B", "eval.callbacks=[mine:accuracy]"),
        "out=runs/b/c/d",
    ],
)
def test_what_may_be_right_passes(folder: Path, override: str) -> None:
    check_local(load_config(folder / "run.yaml", [override]), ("data", "run"))
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train=broken.jsonl", "data.on_error=skip"],
        ["data.train=prompts.jsonl", "rollout.max_new_tokens=8", "objective.loss=reverse_kl"],
    ],
)
def test_data_that_a_run_can_use_passes(folder: Path, overrides: list[str]) -> None:
    check_local(load_config(folder / "run.yaml", overrides), ("data",))


@pytest.mark.parametrize(
    ("text", "is_there"),
    [
        *(("def f(a): ...", True), ("async def f(a): ...", True), ("class f: ...", True)),
        *(("if True:\n    f = lambda a: a", True), ("from other import f", True), ("from other import g as f", True)),
        *(("import a.f", False), ("from other import *", True), ("def __getattr__(name): ...", True)),
        *(("globals()['f'] = len", True), ("def g(a): ...", False), ("", False)),
    ],
)
def test_a_function_is_looked_for_in_the_text_of_its_module(folder: Path, text: str, is_there: bool) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "part.py").write_text("assert False\n" + text)
    if is_there:
        require_in_file("package.part:f")
    else:
        with pytest.raises(ValueError, match=r"got 'package\.part:f', but package\.part has no function 'f'"):
            require_in_file("package.part:f")
    with pytest.raises(ValueError, match=r"there is no module 'package\.other'"):
        require_in_file("package.other:f")
    require_in_file("math:sqrt")
    require_in_file("__main__:f")


@pytest.mark.parametrize("file", ["part.py", "__init__.py"])
@pytest.mark.parametrize(("call", "problem"), refused_calls("modules that are no Python"))
def test_broken_modules(folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, call: str, problem: str) -> None:
    text = eval(call)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    (folder / "broken").mkdir()
    (folder / "broken" / "part.py").write_text("def f(a): ...")
    (folder / "broken" / file).write_text(text)
    for refuses in (require_in_file, partial(load_function, REWARD)):
        with pytest.raises(ValueError, match=f"got 'broken.part:f', but importing broken.part raises {problem}"):
            refuses("broken.part:f")
