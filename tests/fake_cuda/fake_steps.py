"""Counts the steps of the cases on fake CUDA tensors, in processes of their own: the hooks are loaded before torch.

    python tests/fake_cuda/fake_steps.py             writes golden.json and its table in docs/gpu.md
    python tests/fake_cuda/fake_steps.py CASE …      prints these cases as JSON, one line for each
    python tests/fake_cuda/fake_steps.py -           the same with names from stdin, one line for each

Run it again after an intended change, and read the difference of golden.json. The entry of a case has what one rank
does in a steady step:

    micro_batches   of the rank. With half of them, the waits are the same (`waits_of_half` if they are not)
    waits           how often the host waits for the device, by place and reason
    pageable        copies that are asked not to block, but wait because the host's memory is not pinned, by place
    kernels         launches by their purpose, backward included; `metrics` are those after the update. A micro-batch
                    is one chunk of the objective
    messages        number and bytes of collectives and messages, by axis and operation
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stillhouse.plan.child import load_hooks

FILE = Path(__file__).with_name("golden.json")
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
#: the table is between these lines of the page
BEGIN, END = "<!-- written by tests/fake_cuda/fake_steps.py -->\n", "<!-- end -->\n"


def main(names: Sequence[str]) -> None:
    load_hooks()
    import torch
    from fake_cases import CASES

    entries = dict(counted(map(str.strip, sys.stdin) if names == ["-"] else names or list(CASES)))
    if not names:
        assert len(entries) == len(CASES), "a case has failed"
        content = {"torch": torch.__version__.partition("+")[0], "cases": entries}
        FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table(entries)}{END}{rest.partition(END)[2]}", encoding="utf-8")


def counted(names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield and print the entries of the cases that run. Another case is printed as null; its error is on stderr."""
    from fake_cases import CASES

    fill_caches(CASES["fsdp × tensor"])
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            result = Path(folder) / "entry.json"
            if in_a_process(lambda case=CASES[name], result=result: result.write_text(json.dumps(entry_of(case)))):
                print(f"the case '{name}' has failed", file=sys.stderr, flush=True)
                print(json.dumps({name: None}), flush=True)
                continue
            entry = json.loads(result.read_text())
            print(json.dumps({name: entry}), flush=True)
            yield name, entry


class Stop(Exception):
    """Ends a case before its backward pass."""


def fill_caches(case: Any) -> None:
    """Run a case up to its backward pass, so that copies of this process inherit what torch has prepared for it.

    A process that has run a backward pass on a device cannot be copied.
    """
    with patch("torch.Tensor.backward", side_effect=Stop), suppress(Stop):
        entry_of(case)


def in_a_process(function: Callable[[], Any]) -> int:
    """Call a function in a copy of this process, so that cases are independent; return the exit status."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    status = 1
    try:
        function()
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(status)


def entry_of(case: Any) -> dict[str, Any]:
    from stillhouse.plan import rank_step
    from stillhouse.plan.devices import DEVICES

    purposes = {
        rank_step.STUDENT_ACTIVATIONS: "student",
        rank_step.TEACHER_ACTIVATIONS: "teacher",
        rank_step.OBJECTIVE: "objective",
        rank_step.BATCH: "data",
        rank_step.CLIP: "clip",
        rank_step.OPTIMIZER: "update",
        "other": "metrics",
    }
    os.environ |= {"RANK": str(case.rank), "WORLD_SIZE": str(case.processes), "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        config = case.config(Path(folder))
        planned = rank_step.PlannedRank(config, case.rank, case.processes, "h100", case.document_tokens)
        _, half, counts = rank_step.rank_steps(planned, DEVICES["h100"].properties(), case.tokens_of_steps)
    entry = {
        "micro_batches": case.micro_batches,
        "waits": _lines(counts.waits),
        "pageable": _lines(counts.pageable),
        "kernels": {purposes[purpose]: count for purpose, count in sorted(counts.launches.items())},
        "messages": [f"{counts.messages[key]} × {key}: {size} bytes" for key, size in sorted(counts.sent.items())],
    }
    return entry if half.waits == counts.waits else entry | {"waits_of_half": _lines(half.waits)}


def table(entries: dict[str, Any]) -> str:
    """Return the table of docs/gpu.md: for each case, the kernels and the waits of a step."""
    kinds = ("student", "teacher", "objective", "clip", "update")
    rows = [
        [name, entry["micro_batches"], *(entry["kernels"].get(kind, 0) for kind in kinds), _number(entry["waits"])]
        for name, entry in entries.items()
    ]
    head = ["", "micro-batches", *kinds, "waits"]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in [head, ["---"] * len(head), *rows])


def _number(lines: Sequence[str]) -> int:
    return sum(int(line.partition(" ")[0]) for line in lines)


def _lines(places: dict[str, int]) -> list[str]:
    return [f"{count} × {place}" for place, count in sorted(places.items())]


if __name__ == "__main__":
    main(sys.argv[1:])
