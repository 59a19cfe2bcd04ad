"""docs/extending.md: every distribution is installed, every diff is applied, and the check of each, in
extending_checks.md, runs.
"""

import re
import shutil
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
SCHEDULE = "A new pipeline schedule"


def sections(page: Path) -> dict[str, str]:
    parts = [part.partition("\n") for part in page.read_text(encoding="utf-8").split("\n## ")[1:]]
    texts = {heading: text for heading, _, text in parts}
    assert len(texts) == len(parts), "two sections have one heading, and only the last one would be tried"
    return texts


SECTIONS = sections(ROOT / "docs" / "extending.md")
CHECKS = {
    heading: code
    for heading, text in sections(Path(__file__).with_name("extending_checks.md")).items()
    for code in code_blocks(text, "python")
}
assert [*SECTIONS] == [*CHECKS, SCHEDULE]


def apply(diff: str, root: Path) -> None:
    """Apply a diff. Files begin with ---, hunks with @@; a hunk's old lines must be in the file exactly once."""
    for name, hunks in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", diff, flags=re.DOTALL | re.MULTILINE):
        path = root / name
        for hunk in hunks.split("@@\n")[1:]:
            lines = hunk.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
            after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            assert text.count(before) == 1 if before else not text, (name, before)
            path.write_text(text.replace(before, after) if before else after, encoding="utf-8")


def extended_package(folder: Path, section: str) -> Path:
    """Return a folder with a copy of the package, to which a section's diff is applied or beside which its
    distribution is installed.
    """
    root = folder / "changed"
    shutil.copytree(ROOT / "stillhouse", root / "stillhouse", ignore=shutil.ignore_patterns("__pycache__"))
    for diff in code_blocks(section, "diff"):
        apply(diff, root)
    for text in code_blocks(section, "toml"):
        project = tomllib.loads(text)["project"]
        modules = [code.removeprefix("# ").partition("\n") for code in code_blocks(section, "python")]
        contents = {name: code for name, _, code in modules}
        write_distribution(root, project["entry-points"], contents, project["name"])
    return root


@pytest.mark.parametrize("heading", first_is_quick(CHECKS))
def test_the_extension_is_installed_and_its_check_runs(tmp_path: Path, heading: str) -> None:
    changed, code = extended_package(tmp_path, SECTIONS[heading]), CHECKS[heading]
    exit_code, errors = run_code(code, tmp_path, changed)
    assert exit_code == 0, errors
    # without the extension the check fails
    exit_code, _ = run_code(code, tmp_path, ROOT)
    assert exit_code != 0


@pytest.mark.slow
def test_a_new_schedule_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    changed = extended_package(tmp_path, SECTIONS[SCHEDULE])
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
