"""Result files of benchmarks: the figures under a header that says when, where and with what they were measured."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from stillhouse.train.folder import environment

#: where result files go; elsewhere for a rehearsal, whose figures mean nothing
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))


def result_file(name: str) -> Path:
    """benchmarks/results/<name>-<date>.json"""
    return RESULTS / f"{name}-{datetime.now(UTC).date().isoformat()}.json"


def write_result(path: Path, result: dict[str, Any], device: str = "cpu") -> None:
    """The header, then `result`. `device`: what was measured on."""
    content = header(torch.device(device)) | result
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)


def header(device: torch.device) -> dict[str, Any]:
    """Date, hardware, versions, commit and threads, as a run's environment.json has them."""
    values = environment("", 0, device)
    return {key: value for key, value in values.items() if key not in ("objective", "seed")}
