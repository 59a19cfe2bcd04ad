"""The documentation as a site, and the commands of its quick start.

The commands run as they are on the page, with small models in the places of its models and smaller sizes.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kit.config_cases import load
from kit.pages import code_blocks
from kit.runs import ROOT, run, save_model, write_texts
from kit.toy_tokenizer import toy_tokenizer
from transformers import AutoModelForCausalLM

from stillhouse.run.run import prepare

pytestmark = pytest.mark.slow

QUICK_START = (ROOT / "docs" / "quick_start.md").read_text()
NAMES = ("NAME", "EMAIL")
#: overrides with which the page's run fits small models
SMALL = ["data.max_tokens=32", "train.tokens_per_step=256", "train.micro_batch_tokens=64", "device=cpu"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` builds it; --strict ends with an error if a link or a page is missing."""
    folder = tmp_path_factory.mktemp("site")
    (linked,) = re.findall(r"ln -sfn (.*) \.\n", (ROOT / "Makefile").read_text())
    (folder / ".site").mkdir()
    for part in linked.split():
        for path in ROOT.glob(Path(part).name):
            (folder / ".site" / path.name).symlink_to(path)
    (folder / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / "site"


def pages() -> Iterator[tuple[Path, str]]:
    for path in (*sorted(ROOT.glob("[!R]*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        yield path, f"{path.relative_to(ROOT).with_suffix('')}/index.html"
    yield ROOT / "README.md", "index.html"


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for path, place in pages():
        html = (site / place).read_text()
        without_code = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert html.count("<table") == len(re.findall(r"^ *\|(?: *:?-+:? *\|)+$", without_code, re.MULTILINE)), path
    loaded = [
        tag
        for path in site.rglob("*.html")
        for tag in re.findall(r"<(?:script|link|img|iframe)[^>]*>", path.read_text())
        if re.search(r"(?:src|href)=[\"']?(?:https?:)?//", tag)
    ]
    assert not loaded
    documents = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    (glossary,) = (page for page in documents if page["location"] == "docs/glossary/" and page["text"])
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 25
    assert all(row.split(" | ")[0][2:] in glossary["text"] for row in rows)


def test_a_version_of_the_site_is_kept_beside_the_others(site: Path) -> None:
    """`make site-version` commits the site of a version to a branch, with the list for the selector."""
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    folder = site.parent
    subprocess.run([*git, "init", "--quiet"], cwd=folder, check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "first"], cwd=folder, check=True)
    environment = os.environ | {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in NAMES}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # mike runs mkdocs
    mike = [sys.executable, "-c", "from mike.driver import main; main()"]
    for version in ("0.1", "0.2"):
        command = [*mike, "deploy", "--update-aliases", version, "latest"]
        deployed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert deployed.returncode == 0, deployed.stderr
    shown = subprocess.run([*git, "show", "gh-pages:versions.json"], cwd=folder, capture_output=True, check=True)
    versions = {entry["version"]: entry["aliases"] for entry in json.loads(shown.stdout)}
    assert versions == {"0.2": ["latest"], "0.1": []}
    for version in versions:
        page = f"gh-pages:{version}/docs/quick_start/index.html"
        shown = subprocess.run([*git, "show", page], cwd=folder, capture_output=True, text=True, check=True)
        assert "Quick start" in shown.stdout


def test_the_commands_of_the_quick_start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("Qwen3-0.6B", 1), ("Qwen3-8B", 2)):
        save_model(tmp_path / "Qwen" / name, "qwen3", seed=seed)
    (tmp_path / "data").mkdir()
    write_texts(tmp_path / "data" / "train.jsonl", records=300)
    (settings,) = code_blocks(QUICK_START, "yaml")
    (tmp_path / "run.yaml").write_text(settings)

    commands = re.findall(r"^ {4}stillhouse (.*?)(?: +#.*)?$", QUICK_START, flags=re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["check", "distill", "report", "verify", "check"]
    printed = {}
    for command in commands:
        more = SMALL if command.split()[0] in ("check", "distill") else []
        printed[command.split()[0]] = run(*command.split(), *more).out
    for what in ("minimise 0.3 × cross-entropy + 0.7 × jsd(0.5)", "sample", "⟦", "packing", "steps", "peak memory"):
        assert what in printed["check"]
    assert "gradient norm" in printed["check"]
    assert "held-out cross entropy" in printed["distill"]
    assert (tmp_path / "runs" / "a" / "report.html").exists()

    (shown,) = code_blocks(QUICK_START, "python")
    names: dict[str, object] = {}
    exec(shown, names)
    assert isinstance(names["model"], type(AutoModelForCausalLM.from_pretrained(tmp_path / "Qwen" / "Qwen3-0.6B")))


def test_the_records_of_the_quick_start_are_read(tmp_path: Path) -> None:
    """Each kind in a file of its own: the sample that `check` shows has the page's words to predict."""
    (shown,) = code_blocks(QUICK_START, "json")
    expected = ["A whole text: every token of it is to be predicted.", " Paris.", "Four."]
    save_model(tmp_path / "model", "qwen3")
    toy_tokenizer(chat="generation").save_pretrained(tmp_path / "model")
    for record, words in zip(shown.splitlines(), expected, strict=True):
        (tmp_path / "data.jsonl").write_text(record + "\n")
        paths = [f"student.model={tmp_path}/model", f"data.train={tmp_path}/data.jsonl", f"out={tmp_path}/out"]
        settings = ["data.eval=0", "data.max_tokens=128", "objective.loss=cross_entropy", "device=cpu"]
        session = prepare(load(*paths, *settings), announce=False)
        (batch,) = session.schedule.step_schedule.micro_batches(session.data.train, 0)
        target = batch.labels_T[batch.labels_T >= 0]
        assert words in toy_tokenizer().decode(target)


def test_the_navigation_has_every_page() -> None:
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(path.relative_to(ROOT)) for path, _ in pages()}
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]["font"] is False
