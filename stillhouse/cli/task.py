"""`stillhouse task`: writes problems of a task as training data."""

import json
from pathlib import Path

import click

from stillhouse.display import print_escaped
from stillhouse.tasks import TASKS, TaskSpec, problem


@click.command()
@click.argument("name", type=click.Choice(list(TASKS)))
@click.option("--count", type=click.IntRange(1), required=True, help="Number of problems.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Other seeds, other problems."
)
@click.option("--lengths", metavar="A:B", help="Shortest and longest problem. [default: the task's usual range]")
@click.option("--held-out", is_flag=True, help="Problems of the held-out split, such as for data.eval.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A new JSONL file.")
def task(name: str, *, count: int, seed: int, lengths: str | None, held_out: bool, out: Path) -> None:
    """Write problems whose answers can be verified.

    NAME is sums (3+14-5=), reversal or brackets (close the open brackets). A record has prompt, completion, task and
    length. eval.tasks measures the exact match on the held-out problems, which are written only with --held-out, for
    every seed.

    \b
    stillhouse task sums --count 5000 --seed 0 --lengths 2:8 --out sums.jsonl
    """
    spec = TaskSpec.of(name, lengths)
    if out.exists():
        raise ValueError(f"{out} exists: expected the name of a new file")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a folder: expected one for {out.name}")
    if out.suffix == ".parquet":
        raise ValueError(f"got --out {out} for task {name}: expected the name of JSONL")
    from stillhouse.output.disk import replace_text

    records = (problem(spec, seed, number, held_out=held_out).record(name) for number in range(count))
    replace_text(out, "".join(json.dumps(record) + "\n" for record in records))
    print_escaped(f"{out}: {count:,} problems")
