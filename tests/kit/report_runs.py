"""Artificial run folders for the tests of the report, and the page as a browser parses it.

The files have the format of a real run, but the numbers are invented.
"""

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

from stillhouse.output.folder import RunFolder
from stillhouse.output.records import SampleRecord, SampleToken
from stillhouse.output.rollout_log import RolloutLog

HOSTILE = 'if a < b && b > c:</script><b id="injected">\n\treturn "x"  # <!-- \u2028 &amp; \'quoted\'\x00'

TEXT = '''"""Read a configuration file.

The *path* is opened with the given encoding; a missing file
raises :exc:`FileNotFoundError`.
"""
def load(path, *, encoding="utf-8"):
    with open(path, encoding=encoding) as file:
        return parse(file.read())
'''


EVAL_SAMPLE = {
    "step": 0, "number": 0, "source": "eval.jsonl:0", "prompt": "<b>Two & three</b>\n", "reference": " is five",
    "completion": " is", "tokens": 3, "finish": "length",
}  # fmt: skip


def make_run(folder: Path, *, terms=("forward_kl",), steps=300, every=50, seed=0, documents=(TEXT, HOSTILE)) -> Path:
    """Write the folder of a complete run with the given loss terms."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    lines = []
    for step in range(steps + 1):
        if step:
            lines.append(train_line(step, terms, steps, rng))
        if step % every == 0 or step == steps:
            lines.append(eval_line(step, steps, seed, rng))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(
        "student:\n  model: models/small-student\nteacher:\n  model: Example/Teacher-5M\n  dtype: bfloat16\n"
        f"objective:\n  loss: {' + '.join(terms)}\n  temperature: 1.0\ntrain:\n  learning_rate: 2e-5\nseed: 0\n"
    )
    environment = {
        "stillhouse": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "transformers": "5.23.0",
        "platform": "Linux x86_64", "cpu": "Example CPU", "cores": 2, "threads": 2, "device": "cpu",
        "gpu": None, "commit": "0123456789ab", "date": "2026-11-21T10:00:00", "seed": 0,
        "objective": f"minimise {' plus '.join(terms)} on completions",
    }  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(environment))
    report = {"read": 1204, "kept": 1198, "skipped": 2, "without_target": 4, "cut_documents": 31,
              "cut_tokens": 18233, "tokens": 812345, "target_tokens": 790112,
              "reasons": ["train.jsonl:17: not a JSON object"]}  # fmt: skip
    held = report | {"read": 40, "kept": 40, "skipped": 0, "tokens": 30211, "reasons": []}
    (folder / "data.json").write_text(json.dumps({"train": report, "eval": held}))
    numbered = enumerate(documents, 3)
    shown = [{"source": f"eval.jsonl:{line}", "tokens": token_entries(text, rng)} for line, text in numbered]
    (folder / "tokens.json").write_text(json.dumps({"step": steps, "documents": shown}))
    return folder


def train_line(step, terms, steps, rng) -> dict:
    progress = 1 - math.exp(-4 * step / steps)
    values = {f"loss/{term}_nats_per_token": 5 - 3 * progress + rng.gauss(0, 0.06) for term in terms}
    return {
        "step": step, "tokens": 8192 * step, "seconds": 0.71 * step,
        "loss/total_nats_per_token": sum(values.values()), **values,
        "train/student_entropy_nats": 6 - 3.3 * progress + rng.gauss(0, 0.05),
        "train/teacher_entropy_nats": 2.1 + rng.gauss(0, 0.05),
        "train/agreement": 0.05 + 0.4 * progress + rng.gauss(0, 0.01),
        "train/learning_rate": 2e-3 * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
        "train/gradient_norm": 40 * math.exp(-10 * step / steps) + abs(rng.gauss(0.5, 0.1)),
        "speed/tokens_per_second": 11500 + rng.gauss(0, 250),
    }  # fmt: skip


def eval_line(step, steps, seed, rng) -> dict:
    progress = 1 - math.exp(-4 * step / steps)
    return {
        "step": step, "tokens": 8192 * step, "seconds": 0.71 * step, "eval/tokens": 30211,
        "eval/cross_entropy": 7.6 - (4 - 0.1 * seed) * progress + rng.gauss(0, 0.01),
        "eval/forward_kl": 5.2 - (4 - 0.1 * seed) * progress,
        "eval/agreement": 0.02 + (0.45 - 0.02 * seed) * progress, "eval/student_entropy": 7.5 - 4.2 * progress,
        "eval/teacher_entropy": 2.15,
    }  # fmt: skip


def token_entries(text, rng) -> list[dict]:
    """Return the text as tokens, of which the first eight are the prompt."""
    tokens = []
    for index, piece in enumerate(re.findall(r"\n+[ \t]*|[ ]?\w+|\s|[^\w\s]+", text)):
        tokens.append({"text": piece, "target": index >= 8, "kl": None, "teacher": [], "student": []})
        if index:
            others = [" the", "\n", " a", ".", piece][:: rng.choice([1, -1])]
            probabilities = [0.52, 0.21, 0.09, 0.04, 0.0004]
            sides = [[list(pair) for pair in zip(others, probabilities, strict=True)] for _ in range(2)]
            tokens[-1] |= {"kl": rng.lognormvariate(-1.5, 1.8), "teacher": sides[0], "student": sides[1]}
        if index >= 8:
            tokens[-1]["terms"] = {name: term_entry(piece, others, rng) for name in ("cross_entropy", "jsd(0.5)")}
    return tokens


def term_entry(piece, others, rng) -> dict:
    pushed = {"raises": [[piece, rng.uniform(0, 0.5)]], "lowers": [[other, 0.05] for other in others[:3]]}
    return {"value": rng.lognormvariate(-0.5, 1.5), "gradient": rng.lognormvariate(-2, 1.2), **pushed}


class Page(HTMLParser):
    """A parsed page: its elements with their attributes, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self._inside = ""
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])

    @property
    def titles(self) -> list[str]:
        """Return the charts' titles in order."""
        return re.findall(r"<h3>([^<]*)</h3>", self.source)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


#: of the runs with completions
CONFIG = (
    "student:\n  model: models/small-student\nteacher:\n  model: Example/Teacher-5M\nrollout:\n  schedule: async\n"
)


def make_on_policy_run(folder: Path, *, steps=60, texts=(TEXT, HOSTILE), seed=0) -> Path:
    """Write the folder of a complete on-policy run whose completions have these texts."""
    make_run(folder, terms=("reverse_kl",), steps=steps, every=20, seed=seed)
    rng = random.Random(seed)
    (folder / "config.yaml").write_text(CONFIG)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        step = line["step"]
        line |= task_values(step, steps) if "eval/tokens" in line else rollout_values(step, steps, rng)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with RolloutLog(RunFolder(folder), 0, float) as log:
        for step in range(1, steps + 1):
            add_step(log, step, rng)
            log.write([make_sample(text, step, rng) for text in texts])
    return folder


def rollout_values(step, steps, rng) -> dict:
    progress = step / steps
    return {
        "rollout/completion_tokens": 180 + 150 * progress + rng.gauss(0, 10),
        "rollout/completion_tokens_min": 12, "rollout/completion_tokens_max": 512, "rollout/ended_tokens": 150,
        "rollout/truncated": 0.3 * (1 - progress), "speed/reward_seconds": 0.05,
        "rollout/turns": 2.5, "rollout/tool_calls": 1.5, "rollout/tool_errors": 0.1, "rollout/equal_rewards": 0.2,
        "rollout/reward": 0.1 + 0.6 * progress + rng.gauss(0, 0.03), "rollout/reward_std": 0.4,
        "rollout/staleness": 0.8, "rollout/staleness_max": 2, "rollout/log_ratio": 0.004,
        "rollout/log_ratio_max": 0.9,
        "rollout/share": 0.8, "speed/waiting": 0.2 + rng.random() / 10, "speed/sampled_tokens_per_second": 4000,
    }  # fmt: skip


def task_values(step, steps) -> dict:
    return {"eval/exact_match/gsm8k": 0.1 + 0.5 * step / steps, "eval/exact_match/math": 0.02 + 0.2 * step / steps}


def add_step(timeline: RolloutLog, step, rng) -> None:
    """A step of 4 seconds: completions of the next steps are written while this one is trained."""
    start = 4.0 * (step - 1)
    for ahead, begin in ((1, 0.2), (2, 1.1), (2, 1.4)):
        timeline.add(step + ahead, "rollout", "generate", start + begin, start + begin + 2.4 + rng.random())
    arrived = start + 0.5 + rng.random()
    timeline.add(step, "trainer", "wait for completions", start, arrived)
    timeline.add(step, "teacher", "score", arrived, arrived + 0.6)
    timeline.add(step, "trainer", "wait for the teacher", arrived, arrived + 0.6)
    timeline.add(step, "trainer", "forward, backward", arrived + 0.6, start + 3.6)
    timeline.add(step, "trainer", "update", start + 3.6, start + 4.0)
    timeline.add(step, "weights", f"publish <version {step}>", start + 3.8, start + 4.3)


def make_sample(text: str, step, rng, **changes) -> SampleRecord:
    tokens = [
        SampleToken(token["text"], token["kl"] if index else None, step - 2 + (index > 20), index % 9 != 8)
        for index, token in enumerate(token_entries(text, rng))
    ]
    values = {
        "step": step, "length": len(tokens),
        "prompt": f"Write a function.\n{HOSTILE}\n", "completion": text, "tokens": tokens, "reward": rng.random(),
        "advantage": rng.gauss(0, 1), "finish": "stop", "source": "student", "staleness": step % 3,
    }  # fmt: skip
    return SampleRecord(**values | changes)
