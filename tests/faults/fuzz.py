"""Thousands of damaged inputs: each must be loaded, or refused with a ValueError. The subject "messages" has random
conversations for the chat templates of TRL: each text must be in the document, or be refused, or a warning names it.

    python tests/faults/fuzz.py configurations --mutations 10000 --seed 0
    python tests/faults/fuzz.py all                                         # and write benchmarks/results/fuzz-*.json

Mutation n of a seed is always the same: `--first n --mutations 1` repeats only this one. A worker process loads the
inputs. If an input ends it, by a crash or by the watchdog, a new worker goes on with the next input.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)]

#: seconds after which one input counts as a hang; the package limits a chat template to 10 s of processor time
SECONDS = 180
#: memory of the worker, so that an input that takes too much memory raises an error
MEMORY_BYTES = 12 * 2**30
LINES, CHARACTERS = 20, 4000


@dataclass
class Campaign:
    """kinds: the number of inputs for each result. failures: the first inputs with a wrong result."""

    subject: str
    seed: int
    mutations: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, object]] = field(default_factory=list)


def outcome(load: object, subject: str, seed: int, number: int) -> tuple[str, str]:
    """Return the result of mutation `number` (loaded, ConfigError, DataError, ValueError or FAILED), and details."""
    from stillhouse.config import ConfigError
    from stillhouse.data import DataError
    from stillhouse.display import escaped

    try:
        load(random.Random(f"{subject} {seed} {number}"))  # type: ignore[operator]
    except ValueError as error:
        text = str(error)
        if text.count("\n") >= LINES or len(text) > CHARACTERS or text != escaped(text, lines=True):
            return "FAILED", f"an error that cannot be read: {text[:300]!r} ({len(text)} characters)"
        if isinstance(error, UnicodeError) or type(error).__module__.split(".")[0] not in ("stillhouse", "builtins"):
            return "FAILED", traceback.format_exc()[-3000:]
        names = {ConfigError: "ConfigError", DataError: "DataError"}
        return next((name for kind, name in names.items() if isinstance(error, kind)), "ValueError"), ""
    except BaseException:  # noqa: BLE001 (the campaign looks for any such exception)
        return "FAILED", traceback.format_exc()[-3000:]
    return "loaded", ""


def work(subject: str, seed: int, first: int, mutations: int) -> None:
    """Run in the worker: print a line of JSON for each input to the real standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    import torch
    import transformers
    from kit.subjects import SUBJECTS, crashing

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        load = (SUBJECTS | {"crashing": crashing})[subject](Path(folder))
        answers.write("ready\n")
        for number in range(first, first + mutations):
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            answers.write(json.dumps(outcome(load, subject, seed, number)) + "\n")
        faulthandler.cancel_dump_traceback_later()


def run(subject: str, mutations: int, seed: int = 0, first: int = 0) -> Campaign:
    """Run all mutations from `first` on in workers."""
    campaign = Campaign(subject, seed)
    while campaign.mutations < mutations:
        at = first + campaign.mutations
        rest = mutations - campaign.mutations
        command = [
            sys.executable, __file__, subject, "--seed", str(seed), "--first", str(at), "--mutations",
            str(rest),
        ]  # fmt: skip
        with tempfile.TemporaryFile("w+") as log:
            worker = subprocess.Popen([*command, "--worker"], stdout=subprocess.PIPE, stderr=log, text=True)
            assert worker.stdout is not None
            ready = worker.stdout.readline() == "ready\n"
            for line in worker.stdout:
                kind, details = json.loads(line)
                add(campaign, first, kind, details)
            status = worker.wait()
            log.seek(0)
            tail = log.read()[-3000:]
        assert ready, f"the worker did not start:\n{tail}"
        if campaign.mutations < mutations:
            add(campaign, first, "FAILED", f"the process ended with status {status}:\n{tail}")
    return campaign


def add(campaign: Campaign, first: int, kind: str, details: str) -> None:
    campaign.kinds[kind] += 1
    if kind == "FAILED":
        campaign.failures.append({"mutation": first + campaign.mutations, "details": details})
        print(f"{campaign.subject} {first + campaign.mutations}: {details}", file=sys.stderr, flush=True)
    campaign.mutations += 1
    if campaign.mutations % 500 == 0:
        print(f"{campaign.subject}: {campaign.mutations:,} {dict(campaign.kinds)}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", help="a name of kit.subjects.SUBJECTS, or all")
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file (JSON); with all: benchmarks/results/fuzz-*.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        with contextlib.suppress(BrokenPipeError):
            work(options.subject, options.seed, options.first, options.mutations)
        return
    every = ["configurations", "data", "messages", "models", "published", "adapters", "answers"]
    subjects = every if options.subject == "all" else [options.subject]
    with ThreadPoolExecutor(len(subjects)) as pool:  # each thread waits for its worker
        campaigns = list(pool.map(lambda name: run(name, options.mutations, options.seed, options.first), subjects))
    if options.out is not None or options.subject == "all":
        from benchmarks.record import result_file, write_result

        content = {"seed": options.seed, "campaigns": [vars(campaign) for campaign in campaigns]}
        write_result(options.out or result_file("fuzz"), content)
    else:
        print(json.dumps(vars(campaigns[0]), indent=1))
    sys.exit(any(campaign.failures for campaign in campaigns))


if __name__ == "__main__":
    main()
