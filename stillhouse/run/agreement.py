"""Checks before the first step that all ranks have the same configuration, the same data and the same folder.

Ranks with different values would train a mixture of two runs, without an error. If each machine had its own
local folder, each checkpoint would lack the shards of the other machines, also without an error.
"""

import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stillhouse.config import ConfigError
from stillhouse.output.disk import UNFINISHED, explained_write_errors
from stillhouse.output.folder import library_versions
from stillhouse.parallel import Ranks

#: the maximum time for which the cache of a network file system may hide a new file of another machine
_SECONDS_TO_SEE = 30.0


def require_same_configuration(values: Mapping[str, Any], ranks: Ranks) -> list[str]:
    """Raise ConfigError on all ranks if their configurations differ; the error names the first different key.

    Returns a warning for each library whose version on a rank differs from the version on rank 0.

    values: the configuration by dotted keys.
    """
    compared = {key: value for key, value in values.items() if key != "device"}  # each rank can name a different GPU
    if different := _differences(compared, ranks):
        key, rank, first, other = different[0]
        raise ConfigError(
            key,
            f"rank 0 has {first!r} and rank {rank} has {other!r}: every rank must be started with the same command "
            "and the same file",
        )
    return [
        f"rank {rank} runs {name} {other} and rank 0 runs {name} {first}: their results can differ"
        for name, rank, first, other in _differences(library_versions(), ranks)
    ]


def require_same_sources(hashes: Mapping[str, str], ranks: Ranks) -> None:
    """Raise ValueError on all ranks if the hashes of their data, tokenizers or model files differ."""
    if different := _differences(hashes, ranks):
        name, rank, first, other = different[0]
        raise ValueError(
            f"{name}: rank {rank} and rank 0 read different files under the same name (hashes {other[:12]} and "
            f"{first[:12]}): every machine needs the same files"
        )


def require_shared_folder(folder: Path, ranks: Ranks) -> None:
    """Raise ValueError on all ranks unless each rank sees the files that the other ranks create in the folder."""
    if ranks.size == 1:
        return
    token = ranks.from_first(uuid.uuid4().hex)
    probes = [folder / f".{token}-{rank}{UNFINISHED}" for rank in range(ranks.size)]
    created = not folder.exists()
    with explained_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probes[ranks.rank].touch()  # an empty file, which can be created even on a full disk
    hosts = ranks.gather(socket.gethostname())
    end = time.monotonic() + _SECONDS_TO_SEE
    while (unseen := [rank for rank, probe in enumerate(probes) if not probe.exists()]) and time.monotonic() < end:
        time.sleep(0.1)
    findings = ranks.gather(unseen)
    probes[ranks.rank].unlink()
    if not any(findings):
        return
    if created and not any(folder.iterdir()):
        folder.rmdir()
    viewer, missing = next((rank, not_seen[0]) for rank, not_seen in enumerate(findings) if not_seen)
    raise ValueError(
        f"out: {folder} is not one folder for all ranks: rank {viewer} on {hosts[viewer]} does not see the file "
        f"of rank {missing} on {hosts[missing]}; expected a folder on a file system that all machines share"
    )


def _differences(values: Mapping[str, Any], ranks: Ranks) -> list[tuple[str, int, Any, Any]]:
    """The keys whose values differ between a rank and rank 0: (key, rank, rank 0's value, the rank's value)."""
    first, *others = ranks.gather(dict(values))
    return [
        (key, rank, first.get(key), other.get(key))
        for key in first | values
        for rank, other in enumerate(others, start=1)
        if other.get(key) != first.get(key)
    ]
