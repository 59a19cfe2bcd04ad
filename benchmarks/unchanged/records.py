"""Result files of these measurements: a header, then the cases, each value of a case in one line."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "peft")


def header(**values: Any) -> dict[str, Any]:
    """Return the date, the hardware and the versions, in the format of the other result files."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **values,
    }


def dated(name: str) -> Path:
    return RESULTS / f"{name}-{datetime.now(UTC).date().isoformat()}.json"


def machine() -> dict[str, str]:
    """Return the processor and the torch version, because the rounding of sums depends on them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else [platform.processor()]
    decisive = sorted({line for line in lines if line.startswith(("vendor_id", "model", "stepping", "flags"))})
    return {"torch": version("torch"), "cpu": hashlib.sha256("\n".join(decisive).encode()).hexdigest()[:16]}


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(content) + "\n", encoding="utf-8")
    print(path)


def text_of(content: Mapping[str, Any], depth: int = 3, indent: str = "") -> str:
    """Return JSON with a line for each value of the outer `depth` levels."""
    inner = indent + " "
    lines = [
        f"{inner}{json.dumps(key)}: "
        + (
            text_of(value, depth - 1, inner)
            if depth > 1 and isinstance(value, Mapping) and value
            else json.dumps(value)
        )
        for key, value in content.items()
    ]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
