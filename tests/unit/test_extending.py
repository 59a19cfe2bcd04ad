"""examples/extending/: every distribution is installed, every diff is applied, and the check of each, in
extending_checks.md, runs.
"""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from kit import first_is_quick
from kit.add_ons import write_distribution
from kit.fork_server import command_of_package, run_code
from kit.pages import code_blocks
from kit.ranks import Ranks
from kit.runs import write_run
from kit.toy_tokenizer import toy_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples" / "extending").iterdir())}
SCHEDULE = EXAMPLES["pipeline_schedule"]
CHECKS = {
    name: code
    for part in Path(__file__).with_name("extending_checks.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for name, _, text in [part.partition("\n")]
    for code in code_blocks(text, "python")
}
assert {*EXAMPLES} == {*CHECKS, SCHEDULE.stem}


def extended_package(folder: Path, example: Path) -> Path:
    """Return a folder with a copy of the package, to which a diff is applied or beside which a distribution is
    installed.
    """
    root = folder / "changed"
    shutil.copytree(ROOT / "stillhouse", root / "stillhouse", ignore=shutil.ignore_patterns("__pycache__"))
    if example.is_dir():
        project = tomllib.loads((example / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        modules = {path.name: path.read_text(encoding="utf-8") for path in example.glob("*.py")}
        write_distribution(root, project["entry-points"], modules, project["name"])
    else:
        subprocess.run(["git", "apply", str(example)], cwd=root, check=True)
    return root


def test_the_page_leads_to_every_example_and_shows_one() -> None:
    linked = re.findall(r"\]\(\.\./(examples/extending/[\w./]+)\)", PAGE)
    assert sorted(path.split("/")[2] for path in linked) == sorted(path.name for path in EXAMPLES.values())
    files = ("pyproject.toml", "hellinger.py", "hellinger_maths.py")
    code = [(EXAMPLES["divergence"] / name).read_text(encoding="utf-8") for name in files]
    assert code_blocks(PAGE, "toml") == code[:1]
    assert code_blocks(PAGE, "python") == [
        f"# {name}\n{text}" for name, text in zip(files[1:], code[1:], strict=True)
    ]


@pytest.mark.parametrize("name", first_is_quick(CHECKS))
def test_the_extension_is_installed_and_its_check_runs(tmp_path: Path, name: str) -> None:
    changed, code = extended_package(tmp_path, EXAMPLES[name]), CHECKS[name]
    exit_code, errors = run_code(code, tmp_path, changed)
    assert exit_code == 0, errors
    # without the extension the check fails
    exit_code, _ = run_code(code, tmp_path, ROOT)
    assert exit_code != 0


@pytest.mark.slow
def test_a_new_schedule_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    changed = extended_package(tmp_path, SCHEDULE)
    for name, layers in (("student", 4), ("teacher", 6)):
        save_llama(tmp_path / name, layers)
    write_run(tmp_path)
    ranks = Ranks(2, hook=command_of_package, hook_arguments=(changed, "parity", str(tmp_path / "run.yaml")))
    assert ranks.wait(240) == [0, 0], ranks.texts
    rows = {line.split("  ")[0]: line for line in ranks[0].out.splitlines() if line.startswith("pipeline 2")}
    assert "pipeline 2, looped_bfs" in rows, ranks.texts
    assert rows["pipeline 2, looped_bfs"].rstrip().endswith("same")


def save_llama(folder: Path, layers: int) -> None:
    """Save a model with enough layers for two stages on each of two ranks."""
    tokenizer = toy_tokenizer()
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), initializer_range=0.2)
    torch.manual_seed(layers)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
