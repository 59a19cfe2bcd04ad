"""Changes a shard of a cache and writes its hash anew, as a foreign writer would; interrupts a cache's writer."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stillhouse.signals.cache.files import CACHE_KEY, INDEX, shard_name
from stillhouse.tools import cache_folder


def resealed(cache: Path, change: Callable[[dict[str, Tensor]], object], number: int = 0) -> None:
    """Apply `change` to the tensors of a shard, and write the shard and its hash."""
    path = cache / shard_name(number)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        identity = file.metadata()[CACHE_KEY]
    change(tensors)
    save_file(tensors, path, metadata={CACHE_KEY: identity})
    index = json.loads((cache / INDEX).read_text())
    index["sha256"][shard_name(number)] = hashlib.sha256(path.read_bytes()).hexdigest()
    (cache / INDEX).write_text(json.dumps(index))


def interrupt_writer(monkeypatch: pytest.MonkeyPatch, *calls: int) -> list[object]:
    """Interrupt these computations of a shard, counted from 1; return the list of all that are made."""
    compute, made = cache_folder.shard_tensors, list[object]()

    def interrupted(*arguments: Any) -> dict[str, Tensor]:
        made.append(arguments)
        if len(made) in calls:
            raise KeyboardInterrupt
        return compute(*arguments)

    monkeypatch.setattr(cache_folder, "shard_tensors", interrupted)
    return made
