"""The process that dry-runs one rank: reads a job as JSON from stdin, and writes the counts as JSON to stdout.

    {"config": …, "ranks": 64, "rank": 0, "gpus_per_node": 8, "device": "h100", "document_tokens": 512}

The answer is `RankCounts`, or {"error": …, "key": …} for an error that the user can fix. The hooks are loaded before
torch, so this file imports everything else later.
"""

import json
import os
import sys

from stillhouse.tools.plan.hooks import load_hooks


def main() -> None:
    job = json.load(sys.stdin)
    # the answer is the only text on stdout, whatever libraries print
    answers, sys.stdout = sys.stdout, sys.stderr
    rank, per_node = job["rank"], job["gpus_per_node"]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(min(per_node, job["ranks"])),
    }
    try:
        load_hooks()
        from stillhouse.tools.plan.dry_run import dry_run

        answer = dry_run(job)
    except (ValueError, OSError) as error:
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        answer = {"error": problem, "key": getattr(error, "key", None)}
    json.dump(answer, answers)


if __name__ == "__main__":
    main()
