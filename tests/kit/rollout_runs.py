"""Artificial folders of on-policy runs for the tests of the report: invented numbers, written by the real writers."""

import json
import random
from pathlib import Path

from kit.report_runs import HOSTILE, TEXT, make_run, token_entries

from stillhouse.output.folder import RunFolder
from stillhouse.output.records import Sample, SampleToken
from stillhouse.output.rollout_log import RolloutLog, Timeline

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
        line |= (
            task_values(line["step"], steps) if "eval/tokens" in line else rollout_values(line["step"], steps, rng)
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with RolloutLog(RunFolder(folder), 0, lambda: 0.0) as log:
        for step in range(1, steps + 1):
            add_step(log.timeline, step, rng)
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


def add_step(timeline: Timeline, step, rng) -> None:
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


def make_sample(text: str, step, rng, **changes) -> Sample:
    tokens = [
        SampleToken(token["text"], token["kl"] if index else None, step - 2 + (index > 20), index % 9 != 8)
        for index, token in enumerate(token_entries(text, rng))
    ]
    values = {
        "step": step, "length": len(tokens),
        "prompt": f"Write a function.\n{HOSTILE}\n", "completion": text, "tokens": tokens, "reward": rng.random(),
        "advantage": rng.gauss(0, 1), "finish": "stop", "source": "student", "staleness": step % 3,
    }  # fmt: skip
    return Sample(**values | changes)
