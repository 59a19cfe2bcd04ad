"""Compiles and loads `hooks.cpp`, which lets torch run autograd on fake CUDA tensors, on a machine without a GPU.

Torch keeps the first hooks that it uses, so they are loaded before torch is imported, but after the libraries of a
build with CUDA, which have hooks of their own. This file does not import torch.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

#: torch's libraries; a build without CUDA has only the first two
_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so")
_SOURCE = Path(__file__).with_name("hooks.cpp")


def load_hooks() -> None:
    """Load the hooks into this process. Raises ValueError if torch is loaded already, or without a C++ compiler."""
    if "torch" in sys.modules:
        raise ValueError("torch is loaded already: expected a process in which the hooks are loaded first")
    for name in _LIBRARIES:
        if (library := _torch() / "lib" / name).exists():
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(hooks_library()), ctypes.RTLD_GLOBAL)


def hooks_library() -> Path:
    """Return the compiled library for the installed torch. It is compiled once and kept in the user's cache folder.

    Raises ValueError if there is no C++ compiler, or if it fails.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        raise ValueError("no C++ compiler: expected g++, clang++ or c++ on the PATH, or the variable CXX")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stillhouse" / "hooks"
    key = hashlib.sha256(_SOURCE.read_bytes() + f"{version('torch')} {_torch()} {compiler}".encode()).hexdigest()
    library = cache / f"{key[:20]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        compiled = Path(folder) / library.name
        headers = [f"-I{_torch() / 'include'}", f"-I{_torch() / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{_torch() / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [
            compiler,
            "-shared",
            "-fPIC",
            "-std=c++20",
            *headers,
            str(_SOURCE),
            "-o",
            str(compiled),
            *libraries,
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            reason = (result.stderr.strip() or "no message").splitlines()[-1]
            raise ValueError(f"{compiler} cannot compile {_SOURCE.name} for torch {version('torch')}: {reason}")
        compiled.replace(library)
    return library


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
