"""The demo over several seeds: is the distilled student better than the one that was trained only on the text?

    python -m benchmarks.demo --seeds 0 1 2

Both students have the same initial weights, data, order, tokens, schedule and learning rate. `--sweep` tries other
rates for both, to check that the control has a good one. Writes benchmarks/results/demo-<date>.json.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import result_file, write_result
from stillhouse.tools.demo import demo as demo_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=demo_run.STEPS)
    parser.add_argument(
        "--sweep", type=float, nargs="*", default=[], help="learning rates to try for both at the first seed"
    )
    arguments = parser.parse_args()
    sweep = {rate: rows_at(arguments.seeds[0], arguments.steps, rate) for rate in arguments.sweep}
    runs = {seed: rows_at(seed, arguments.steps) for seed in arguments.seeds}
    gains = [gain(rows) for rows in runs.values()]
    summary = {
        "distilled_minus_text_alone_nats": [-round(gain, 4) for gain in gains],
        "mean_gain_nats": round(statistics.mean(gains), 4),
        "distilled_wins_every_seed": all(gain > 0 for gain in gains),
    }
    print(json.dumps(summary, indent=1))
    write_result(
        result_file("demo"), {"theme": "demo", "summary": summary, "runs": runs, "learning_rate_sweep": sweep}
    )


def rows_at(seed: int, steps: int, rate: float = demo_run.LEARNING_RATE) -> list[dict[str, Any]]:
    """Return the demo's table for one seed and learning rate."""
    with tempfile.TemporaryDirectory() as folder:
        return demo_run.run_demo(Path(folder), seed=seed, steps=steps, learning_rate=rate)


def gain(rows: list[dict[str, Any]]) -> float:
    """Return by how many nats per token the distilled student's held-out cross-entropy is lower."""
    text_only, distilled = (next(row for row in rows if row["run"] == run) for run in ("cross_entropy", "distilled"))
    return text_only["cross_entropy"] - distilled["cross_entropy"]


if __name__ == "__main__":
    main()
