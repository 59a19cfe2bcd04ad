"""`stillhouse cache`: writes a teacher's signals to disk, and handles what was written."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stillhouse.cli.arguments import configured, load, misused, quiet_libraries

if TYPE_CHECKING:
    from stillhouse.teachers.spec import SignalKind

FOLDER = click.Path(path_type=Path)
SIGNALS: "dict[str, SignalKind]" = {"hidden": "hidden", "top_k": "top_k", "sampled": "sampled"}


class _Group(click.Group):
    """A group whose first command is meant where none is named: `stillhouse cache run.yaml` is `… write run.yaml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, "-h", "--help"}:
            args = ["write", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Group)
def cache() -> None:
    """Write a teacher's signals to disk, once, for any number of runs.

    \b
    stillhouse cache run.yaml --out caches/a            see `stillhouse cache write --help`
    stillhouse cache info caches/a
    """


@cache.command()
@configured
@click.option("--signal", type=click.Choice(list(SIGNALS)), default="hidden", show_default=True,
              help="hidden: exact, at any temperature. top_k: the likeliest ids. sampled: drawn ids.")  # fmt: skip
@click.option("--top-k", type=click.IntRange(1), help="Ids per token of top_k, draws of sampled. [default: 64; 50]")
@click.option("--dtype", help="float32, bfloat16 or float16. [default: the teacher's; float32 for top_k]")
@click.option("--with-label", is_flag=True, help="top_k: the actual next token, too.")
@click.option("--packed", is_flag=True, help="top_k, sampled: ids and counts in as few bits as they need.")
def write(
    arguments: tuple[str, ...],
    signal: str,
    top_k: int | None,
    dtype: str | None,
    with_label: bool,
    packed: bool,
    **flags: str | None,
) -> None:
    """Write a cache; the same command continues an interrupted one.

    CONFIG is the configuration of a run: its data, template, lengths and teacher. `--out` is the folder of the
    cache.

    \b
    stillhouse cache run.yaml --out caches/a --signal top_k --top-k 64
    stillhouse cache run.yaml --out caches/b --signal sampled --packed
    """
    if flags["out"] is None:
        raise misused("--out is missing: expected the folder of the cache")
    out = Path(flags["out"])
    given = {**flags, "student": flags["student"] or flags["teacher"]} if not arguments else flags
    config = load(arguments, given)
    quiet_libraries()
    from stillhouse.parallel import destroy_process_group, is_first
    from stillhouse.train.write_cache import write_cache

    kind = SIGNALS[signal]
    manifest = write_cache(
        config,
        out,
        kind,
        top_k=top_k or (50 if kind == "sampled" else 64),
        dtype=dtype,
        with_label=with_label,
        packed=packed,
    )
    if is_first():
        click.echo(manifest.summary(out))
    destroy_process_group()


@cache.command()
@click.argument("folder", type=FOLDER)
def info(folder: Path) -> None:
    """What a cache holds."""
    from stillhouse.teachers import SignalCache

    click.echo(SignalCache(folder).manifest.summary(folder))


@cache.command()
@click.argument("folder", type=FOLDER)
def verify(folder: Path) -> None:
    """Compare every shard with its hash, and check all rows."""
    from stillhouse.teachers import SignalCache

    opened = SignalCache(folder)
    opened.verify()
    click.echo(opened.manifest.summary(folder))
