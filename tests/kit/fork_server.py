"""The fork server of a test process: it imports torch, transformers and Megatron-Core, if there is one, only
once, and then starts processes quickly.

Python has one fork server per process, and only the first list of modules to preload counts.
"""

import os
import sys
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest


def run_code(code: str, folder: Path, root: Path) -> tuple[int, str]:
    """Run code in `folder` with the package of `root`. Return the exit code and what was written to stderr."""
    errors = folder / "stderr.txt"
    process = fork_server().Process(target=_run, args=(code, folder, root, errors), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "still running after 120 s"
    text = errors.read_text()
    errors.unlink()
    return process.exitcode, text


def use_package(root: Path) -> None:
    """Forget the imported package of this process, so that the next import reads the package of `root`."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("stillhouse", "kit"):
            del sys.modules[name]
    sys.path.insert(0, str(root))


def command_of_package(root: Path, *arguments: str) -> None:
    """Run a `stillhouse` command of the package of `root`. A hook of `Ranks`; it ends the process."""
    use_package(root)
    from stillhouse import cli

    assert Path(cli.__file__).is_relative_to(root)
    sys.argv = ["stillhouse", *arguments]
    cli.main()


def _run(code: str, folder: Path, root: Path, errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.chdir(folder)
    use_package(root)
    exec(compile(code, "<check>", "exec"), {"__name__": "__main__"})


PRELOAD = [
    *("__main__", "stillhouse.run.run", "stillhouse.tools.check", "stillhouse.engine.engine"),
    *("stillhouse.serving.server.run_server", "peft", "kit.warm", "kit.cuda_is_cpu"),
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
