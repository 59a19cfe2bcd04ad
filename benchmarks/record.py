"""Result files of benchmarks: the results, and a header with the date, hardware and versions of the measurement."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from stillhouse.output.folder import environment

#: the folder of result files; a rehearsal uses another one, because its results have no meaning
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))


def result_file(name: str) -> Path:
    """Return benchmarks/results/<name>-<date>.json."""
    return RESULTS / f"{name}-{datetime.now(UTC).date().isoformat()}.json"


def write_result(path: Path, result: dict[str, Any], device: str = "cpu") -> None:
    """Write the header, then `result`. device: the device of the measurement."""
    content = header(torch.device(device)) | result
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)


def header(device: torch.device) -> dict[str, Any]:
    """Return date, hardware, versions, commit and threads, in the format of a run's environment.json."""
    values = environment("", 0, device)
    return {key: value for key, value in values.items() if key not in ("objective", "seed")}
