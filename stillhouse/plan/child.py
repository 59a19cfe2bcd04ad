"""A process that dry-runs ranks: reads jobs as lines of JSON from stdin, and writes each answer as a line to stdout.

    {"kind": "whole", "config": …, "ranks": 64, "rank": 0, "gpus_per_node": 8, "device": "h100", …}

The answer to a job is the result of the function in `dry_run.py` whose name is the job's kind. If the job fails with
an error that the user can fix, the answer is {"error": …, "key": …}.

The process also compiles and loads `hooks.cpp`, which lets torch run autograd on fake CUDA tensors without a GPU.
Torch keeps the first CUDA hooks that it uses. So the hooks of `hooks.cpp` are loaded before torch is imported, but
after the libraries of a CUDA build, which contain other hooks. Therefore this file imports no module with torch at
its top.
"""

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: torch's libraries; a build without CUDA has only the first two
_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so")
_SOURCE = Path(__file__).with_name("hooks.cpp")


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    rank, per_node = job["rank"], job["gpus_per_node"]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(min(per_node, job["ranks"])),
    }
    try:
        if "torch" not in sys.modules:
            load_hooks()
        from stillhouse.plan.dry_run import estimated, parts, shapes, whole

        kinds = {"whole": whole, "shapes": shapes, "parts": parts, "estimated": estimated}
        return kinds[job["kind"]](job)
    except (ValueError, OSError) as error:
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        return {"error": problem, "key": getattr(error, "key", None)}


def load_hooks() -> None:
    """Load the hooks into this process. They are compiled once for the installed torch, in the user's cache folder.

    Raises ValueError if torch is loaded already, if there is no C++ compiler, or if the compiler fails.
    """
    if "torch" in sys.modules:
        raise ValueError("torch is loaded already: expected a process in which the hooks are loaded first")
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    for library in (torch / "lib" / name for name in _LIBRARIES):
        if library.exists():
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        raise ValueError("no C++ compiler: expected g++, clang++ or c++ on the PATH, or the environment variable CXX")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stillhouse" / "hooks"
    key = hashlib.sha256(_SOURCE.read_bytes() + f"{version('torch')} {torch} {compiler}".encode()).hexdigest()
    hooks = cache / f"{key[:20]}.so"
    if not hooks.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            compiled = Path(folder) / hooks.name
            headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
            libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
            command = [compiler, "-shared", "-fPIC", "-std=c++20", *headers, str(_SOURCE), "-o", str(compiled)]
            result = subprocess.run([*command, *libraries], capture_output=True, text=True)
            if result.returncode:
                reason = (result.stderr.strip() or "no message").splitlines()[-1]
                raise ValueError(f"{compiler} cannot compile {_SOURCE.name} for torch {version('torch')}: {reason}")
            compiled.replace(hooks)
    ctypes.CDLL(str(hooks), ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    # only answers go to stdout; what libraries print goes to stderr
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)
