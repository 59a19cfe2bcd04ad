"""The fork server of a test process: it imports torch, transformers and Megatron-Core, if there is one, only
once, and then starts processes quickly.

Python has one fork server per process, and only the first list of modules to preload counts.
"""

import os
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

PRELOAD = [
    *("__main__", "stillhouse.run.run", "stillhouse.tools.check", "stillhouse.engine.engine"),
    *("stillhouse.serving.server", "peft", "kit.warm", "kit.cuda_is_cpu"),
]


def fork_server() -> ForkServerContext:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the command line sets this, too, before it imports torch
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # Python 3.11 does not pass sys.path on, and skips what it cannot import
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        forkserver.ensure_running()
    return context
