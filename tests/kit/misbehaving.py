"""A reward and an environment for on-policy runs that can be told to misbehave once: to end, to hang or to fail."""

import os
import sys
import time
from pathlib import Path
from typing import Any

#: the variable of a run's processes with the path of a file that says how a reward or environment is to misbehave
FAULT = "STILLHOUSE_CHAOS_FAULT"


def length(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """A reward, which changes its record."""
    misbehave()
    record["seen"] = record.get("seen", 0) + 1
    return float(len(completion) * record["seen"])


def echo(prompt: str, completion: str, record: dict[str, Any]) -> str | None:
    """An environment that answers twice, and changes its record."""
    misbehave()
    record["turns"] = record.get("turns", 0) + 1
    return None if completion.count("!") >= 2 else record["turns"] * " no!"


def misbehave() -> None:
    """Do once what the file says."""
    path = Path(os.environ[FAULT])
    if not path.exists():
        return
    kind = path.read_text()
    path.unlink()
    if kind == "exit":
        sys.exit(0)
    while kind == "hang":
        try:
            time.sleep(150)
        except Exception:  # noqa: BLE001  as the code of users does
            continue
    raise KeyError(kind)
