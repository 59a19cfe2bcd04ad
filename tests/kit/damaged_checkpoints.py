"""Runs with checkpoints of which some are missing or damaged."""

import shutil
from pathlib import Path

NEWEST, BEFORE = "step-00000004", "step-00000002"


def interrupted(complete_run: Path, folder: Path) -> Path:
    """Copy `whole`/out to a new folder, in the state of a run that was killed after step 4."""
    out = folder / "out"
    shutil.copytree(complete_run / "out", out)
    for name in ("model", "checkpoints/step-00000006"):
        shutil.rmtree(out / name)
    for name in ("hashes.json", "report.html"):
        (out / name).unlink(missing_ok=True)
    return out


def zeroed(newest: Path) -> str:
    path = next((newest / "resume").glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-64:] = bytes(64)
    path.write_bytes(raw)
    return f"resume/{path.name} is not what was written (its hash differs)"
