"""The commands of the path in docs/, from a real language model to two devices, in the order of the pages.

They run as they are printed, with two steps in place of many and a few records of the text.
"""

import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from kit.gguf_files import real_model

PATH = Path(__file__).parents[2] / "docs" / "path"
PAGES = ("fine_tune", "distil", "lora", "on_policy", "serve", "devices")
#: texts that a command prints
SHOWN = {
    "capital of France": "Paris",
    "check sft.yaml": "⟦",
    "evaluate runs/distilled": "reverse KL",
    "generate ": "records of 64 completions",
    "parity ": "same",
    "plan ": "tokens/s",
    "teacher.url": "proven with",
}


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the content of each code block of a page."""
    return re.findall(r"```(\w+)\n(.*?)```", (PATH / f"{page}.md").read_text(), flags=re.DOTALL)


def write_short(name: str, content: str) -> None:
    Path(name).write_text(
        re.sub(r"\b(steps|every): \d+", lambda match: f"{match[1]}: {2 if match[1] == 'steps' else 1}", content)
    )


def run_in_shell(command: str) -> None:
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for part, text in SHOWN.items():
        assert part not in command or text in done.stdout, f"{command}\n{done.stdout[-3000:]}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_path_runs_on_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = real_model("smollm2").parents[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STILLHOUSE_CACHE", str(cache))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for page in PAGES:
        for language, content in blocks(page):
            if name := re.match(r"# (\w+\.(?:yaml|py))\n", content):
                write_short(name[1], content)
                continue
            assert language == "bash"
            for command in [content] if "kill %1" in content else content.splitlines():
                if command.startswith("pip "):
                    continue
                run_in_shell(re.sub(r" +# .*", "", command))
                if "demo --write text" in command:
                    for path in Path("text").glob("*.jsonl"):
                        path.write_text("".join(islice(path.open(), 2)))
    assert {path.name for path in Path("runs").iterdir()} == {"sft", "distilled", "lora", "on_policy", "two"}
