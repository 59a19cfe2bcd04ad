"""Ends a process that torchrun started, if torchrun is gone.

torchrun stops its processes before it ends, unless it is killed by SIGKILL or by the kernel when memory runs out. Its
processes would then train on for nobody, occupy their devices and keep the folder of their run locked. The operating
system gives a process whose parent is gone another parent. A thread looks for that: unlike Linux's
`prctl(PR_SET_PDEATHSIG)`, this works on every system, and also if the thread that started the process ends earlier.
"""

import os
import threading
import time

from stillhouse.ending import end_process, error_line

#: how often the parent is checked, and how much later than the first process of a machine the others end, so that the
#: first one does not report that it has lost contact with them
SECONDS = 0.5
FAILED = 1


def end_with_launcher() -> None:
    """Let this process end at once when torchrun, its parent, is gone. Without torchrun this does nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(SECONDS)
    line = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        line = error_line(
            f"torchrun (process {launcher}), which started this process, is gone; a run continues from its last "
            "checkpoint"
        )
    else:
        time.sleep(2 * SECONDS)
    end_process(FAILED, line)
