"""The commands of the path in docs/, from a real language model to two devices, in the order of the pages.

They run as they are printed, with few steps and tokens and a part of the text.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.gguf_files import real_model
from kit.runs import write_records

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
#: keys and options with the numbers that the test gives them
SHORT = {"steps: ": 2, "every: ": 1, "tokens_per_step: ": 128, "max_tokens: ": 64, "max_tokens=": 64}
SHORT |= {"max_new_tokens: ": 8, "max-new-tokens ": 8}


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the content of each code block of a page."""
    return re.findall(r"```(\w+)\n(.*?)```", (PATH / f"{page}.md").read_text(), flags=re.DOTALL)


def shortened(text: str) -> str:
    """The same configuration or command with few steps and tokens."""
    for name, number in SHORT.items():
        text = re.sub(rf"\b({name})\d+", rf"\g<1>{number}", text)
    return text


def run_in_shell(command: str) -> None:
    command = f"trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{command}"  # also ends a server if a check fails
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for part, text in SHOWN.items():
        assert part not in command or text in done.stdout, f"{command}\n{done.stdout[-3000:]}"


@pytest.mark.slow
@pytest.mark.skipif("STILLHOUSE_PATH" not in os.environ, reason="about ten minutes; with STILLHOUSE_PATH=1")
@pytest.mark.timeout(1800)
def test_the_path_runs_on_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = real_model("smollm2").parents[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STILLHOUSE_CACHE", str(cache))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for page in PAGES:
        for language, content in blocks(page):
            if name := re.match(r"# (\w+\.(?:yaml|py))\n", content):
                Path(name[1]).write_text(shortened(content))
                continue
            assert language == "bash"
            for command in [content] if "kill %1" in content else content.splitlines():
                if command.startswith(("pip ", ". ")):
                    continue
                run_in_shell(shortened(re.sub(r" +# .*", "", command)))
                if "demo --write text" in command:
                    for path in Path("text").glob("*.jsonl"):
                        text = "".join(json.loads(line)["text"] for line in path.read_text().splitlines())
                        write_records(path, [{"text": text[start : start + 400]} for start in range(0, 1600, 400)])
    assert {path.name for path in Path("runs").iterdir()} == {"sft", "distilled", "lora", "on_policy", "two"}
