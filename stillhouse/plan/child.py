"""A process that dry-runs ranks: reads jobs as lines of JSON from stdin, and writes each answer as a line to stdout.

    {"kind": "whole", "config": …, "ranks": 64, "rank": 0, "gpus_per_node": 8, "device": "h100", …}

An answer is that of the function with the kind's name, or {"error": …, "key": …} for an error that the user can fix.
The hooks are loaded before torch, so this file imports everything else later.
"""

import json
import os
import sys
from typing import Any

from stillhouse.plan.hooks import load_hooks


def main() -> None:
    # the answers are the only text on stdout, whatever libraries print
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


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
        from stillhouse.plan import few_layers
        from stillhouse.plan.dry_run import whole

        kinds = {"whole": whole, "shapes": few_layers.shapes, "parts": few_layers.parts}
        kinds["estimated"] = few_layers.estimated
        return kinds[job["kind"]](job)
    except (ValueError, OSError) as error:
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        return {"error": problem, "key": getattr(error, "key", None)}


if __name__ == "__main__":
    main()
